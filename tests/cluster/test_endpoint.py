"""Where the store of a job is, by the environment alone."""

import pytest

from doctor.cluster.gather.plan import NoRendezvous, parse_master, store_endpoint
from doctor.cluster.rendezvous.mpirun import expand_nodes
from doctor.cluster.rendezvous.process_identity import process_identity
from doctor.collectors.launch.launcher import launcher_of
from doctor.core.errors import UnusableError
from tests.cluster.launches import OPEN_MPI, STEP, TORCHRUN
from tests.recorded_launches import PLAIN, recorded

EPHEMERAL = 32768
"""The first port that Linux gives to outgoing connections (ip_local_port_range)."""


def endpoint(environ, **changes):
    environ = {**environ, **changes}
    return store_endpoint(environ, launcher_of(environ), process_identity(environ))


def test_what_the_environment_says():
    found = endpoint(PLAIN)
    assert found == (("node0",), 29500, "there", "MASTER_ADDR and MASTER_PORT")
    assert found.text == "node0:29500"
    assert endpoint(PLAIN, RANK="0").hosted == "here"
    assert endpoint(PLAIN, MASTER_ADDR="fd00::1").text == "[fd00::1]:29500"


def test_torchruns_agent_hosts_for_every_rank():
    assert endpoint(TORCHRUN).hosted == endpoint(TORCHRUN, RANK="0").hosted == "agent"


@pytest.mark.parametrize("told", [{"TORCHELASTIC_USE_AGENT_STORE": "False"}, {"TORCHELASTIC_USE_AGENT_STORE": ""}])
def test_torchrun_whose_agent_does_not_share_its_store(told):
    assert endpoint(TORCHRUN, **told).hosted == "there"
    assert endpoint(TORCHRUN, RANK="0", **told).hosted == "here"


def test_a_left_over_mark_of_torchruns_agent_is_no_agent():
    assert endpoint(PLAIN, RANK="0", TORCHELASTIC_USE_AGENT_STORE="True").hosted == "here"


def test_srun_tells_the_first_node():
    found = endpoint(STEP)
    assert found.names == ("node0",)
    assert found.hosted == "there"
    assert endpoint(STEP, SLURM_PROCID="0", SLURM_LOCALID="0") == found._replace(hosted="here")


def test_srun_where_the_step_names_no_nodes():
    environ = {name: value for name, value in STEP.items() if name != "SLURM_STEP_NODELIST"}
    assert endpoint(environ).names == ("node0",)


def test_mpirun_tells_its_own_node():
    found = endpoint(OPEN_MPI)
    assert found.names == ("192.0.2.2", "198.51.100.7", "fd00::2")
    assert found.hosted == "there"
    assert endpoint(OPEN_MPI, OMPI_COMM_WORLD_LOCAL_RANK="0").hosted == "here"


def test_no_rank_on_other_nodes_of_mpirun_hosts():
    daemon = "1611268096.1;tcp://192.0.2.3:4711"
    assert endpoint(OPEN_MPI, OMPI_COMM_WORLD_LOCAL_RANK="0", OMPI_MCA_orte_local_daemon_uri=daemon).hosted == "there"


@pytest.mark.parametrize(
    ("environ", "other"),
    [(STEP, {"SLURM_STEP_ID": "1"}), (STEP, {"SLURM_JOB_ID": "2"}), (OPEN_MPI, {"PMIX_NAMESPACE": "5"})],
)
def test_neighbouring_runs_derive_other_ports(environ, other):
    assert endpoint(environ).port == endpoint(environ, RANK="0").port < EPHEMERAL
    assert endpoint(environ).port != endpoint(environ, **other).port < EPHEMERAL


@pytest.mark.parametrize(
    "environ",
    [
        recorded("openmpi.env"),
        {**OPEN_MPI, "OMPI_MCA_orte_hnp_uri": "1611268096.0;usock"},
        {"PMI_RANK": "1", "PMI_SIZE": "4"},
        {**STEP, "SLURM_STEP_NODELIST": "[", "SLURM_JOB_NODELIST": "[", "SLURM_NODELIST": "["},
        {**recorded("openmpi.env"), "MASTER_ADDR": "node0"},
        {**recorded("openmpi.env"), "MASTER_ADDR": "node0", "MASTER_PORT": "70000"},
        {**recorded("openmpi.env"), "MASTER_ADDR": " ", "MASTER_PORT": "29500"},
    ],
)
def test_the_error_names_the_options_that_provide_a_rendezvous(environ):
    with pytest.raises(NoRendezvous, match=r"--master HOST:PORT .* or --share DIR"):
        endpoint(environ)


def test_the_option_overrides_the_environment():
    identity = process_identity(TORCHRUN)
    found = store_endpoint(TORCHRUN, "torchrun", identity, "[fd00::9]:4000")
    assert found == (("fd00::9",), 4000, "there", "--master")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("node0:29500", ("node0", 29500)),
        (" node0:1 ", ("node0", 1)),
        ("10.0.0.1:65535", ("10.0.0.1", 65535)),
        ("[fe80::1%eth0]:29500", ("fe80::1%eth0", 29500)),
    ],
)
def test_a_master_that_can_be_read(text, expected):
    assert parse_master(text) == expected


@pytest.mark.parametrize(
    "text",
    ["", "node0", "node0:", ":29500", "node0:0", "node0:65536", "fd00::1:29500", "a b:1", "n:²", "n:1:2", "[]:1"],
)
def test_a_master_that_can_not(text):
    with pytest.raises(UnusableError, match="is not a valid HOST:PORT"):
        parse_master(text)


APART = {
    **OPEN_MPI,
    "OMPI_MCA_orte_local_daemon_uri": "1611268096.1;tcp://192.0.2.3:4711",
    "OMPI_MCA_orte_node_regex": "login,gpu[2:1-4].lab@0(5)",
    "OMPI_MCA_ess_base_num_procs": "5",
    "OMPI_MCA_orte_num_nodes": "4",
}
"""A process of an mpirun whose own node has no rank, as those of Kubeflow's MPIJob and of login nodes."""


def test_mpirun_on_a_node_without_ranks():
    found = endpoint(APART)
    assert found.names == ("192.0.2.2", "198.51.100.7", "fd00::2", "gpu01.lab")
    assert found.hosted == "there"
    assert endpoint(APART, OMPI_COMM_WORLD_RANK="0").hosted == "here"


def test_rank_0_elsewhere_where_all_nodes_have_ranks():
    for counted in ("5", "10"):  # once, and twice as with --map-by seq
        found = endpoint(APART, OMPI_COMM_WORLD_RANK="0", OMPI_MCA_orte_num_nodes=counted)
        assert (found.hosted, found.names[-1]) == ("there", "fd00::2")


def test_rank_0_of_mpirun_that_no_other_rank_could_find():
    with pytest.raises(NoRendezvous):
        endpoint(APART, OMPI_COMM_WORLD_RANK="0", OMPI_MCA_orte_node_regex="")
    assert endpoint(APART, OMPI_MCA_orte_node_regex="").hosted == "there"


FIVE = {
    "OMPI_VERSION": "5.0.11",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "PMIX_NAMESPACE": "prterun-gpu-01-4711@1",
    "PMIX_SERVER_URI4": "prterun-gpu-01-4711@0.0;tcp4://127.0.0.1:45843",
}


def test_open_mpi_5_names_the_node_of_mpirun():
    found = endpoint(FIVE)
    assert (found.names, found.hosted) == (("gpu-01",), "here")
    remote = {"PMIX_SERVER_URI4": "prterun-gpu-01-4711@0.2;tcp4://127.0.0.1:40001"}
    assert endpoint(FIVE, **remote).hosted == "there"
    with pytest.raises(NoRendezvous):
        endpoint(FIVE, **remote, OMPI_COMM_WORLD_RANK="0")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node[1:0-2]@0(3)", ["node0", "node1", "node2"]),
        ("login,node[2:0-1,7].lab@0(4)", ["login", "node00.lab", "node01.lab", "node07.lab"]),
        ("[2:10].20.0.11,last@0(2)", ["10.20.0.11", "last"]),
        ("node[1:0-999999999]@0", ["node0", "node1", "node2", "node3"]),
        ("", []),
        ("node[1:1-2-3]@0", []),
        ("node[1:]@0", []),
        ("@", []),
    ],
)
def test_node_lists_of_mpirun(text, names):
    assert expand_nodes(text, most=4) == names
