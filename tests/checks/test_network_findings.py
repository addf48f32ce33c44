"""Claims, severities and fixes of network findings that depend on what exactly is wrong."""

import pytest

from doctor.core.check_registry import CheckRegistry, builtin_checks
from doctor.core.check_runner import examine_job
from doctor.facts import MasterFacts, NcclFacts, RdmaDevice, RdmaFacts, RdmaPort, ReferencedFile
from doctor.testing import healthy, logged


def found(check_id, sketch):
    check = next(one for one in builtin_checks() if one.id == check_id)
    (result,) = examine_job(sketch.job(), CheckRegistry((check,)))
    (finding,) = result.findings
    return finding


def at_loopback(name, resolved):
    return MasterFacts(address=name, port=29500, resolved=(resolved,), is_local=True, interface="lo")


def test_the_masters_name_is_corrected_on_the_host_that_resolves_it_wrongly():
    wrong = found("NET005", healthy(3, 1).put(at_loopback("node0", "127.0.1.1"), ranks=(2,)))
    assert wrong.fix == "In /etc/hosts on node2, map node0 to 10.0.0.1 instead of 127.0.1.1."
    assert wrong.effect.startswith("Rank 2 connects to its own host")
    named = found("NET005", healthy(2, 1).put(at_loopback("localhost", "127.0.0.1"), ranks=(1,)))
    assert named.fix.splitlines() == ["Use the host of rank 0 on all hosts:", "export MASTER_ADDR=node0"]


@pytest.mark.parametrize(
    ("error", "fix"),
    [
        (
            "110 Connection timed out",
            "Add the route between 10.0.0.1 and 10.0.1.2 that RoCE needs, until this command succeeds on node1:\n"
            "ping -c 1 -I 10.0.0.1 10.0.1.2",
        ),
        ("22 Invalid argument", "Run `unset NCCL_IB_GID_INDEX`"),
    ],
)
def test_an_rdma_connection_names_both_ends(error, fix):
    line = (
        f"node1:41:77 [0] misc/ibvwrap.cc:300 NCCL WARN Call to ibv_modify_qp failed with {error}, on dev mlx5_0:1, "
        "curr state INIT, next state RTR, local GID index 3, local GID ::ffff:10.0.0.1, remote GID ::ffff:10.0.1.2"
    )
    finding = found("NET021", logged(line))
    assert finding.summary.startswith("An RDMA connection from 10.0.0.1 to 10.0.1.2 failed: ")
    assert finding.fix.startswith(fix)


def test_a_missing_port_is_not_a_missing_device():
    port = RdmaPort(1, "ACTIVE", "LinkUp", 400.0, "InfiniBand")
    rdma = RdmaFacts(devices=(RdmaDevice("mlx5_0", (port,), has_uverbs=True),), verbs_library=True)
    sketch = healthy(2, 1).put(rdma)
    finding = found("NET018", sketch.environ(NCCL_IB_HCA="mlx5_0:2"))
    assert finding.summary.endswith("names no port that the RDMA devices have")
    assert found("NET018", sketch.environ(NCCL_IB_HCA="mlx4_0")).summary.endswith("matches no RDMA device")


@pytest.mark.parametrize(("variable", "severity"), [("NCCL_GRAPH_FILE", "error"), ("NCCL_TOPO_FILE", "warning")])
def test_only_a_graph_file_is_needed_to_initialize(variable, severity):
    file = ReferencedFile(variable, "/opt/file.xml", exists=False, readable=False)
    sketch = healthy(1, 2).environ(**{variable: file.path}).alter(NcclFacts, references=(file,))
    assert found("NCCL014", sketch).severity == severity


def test_an_exception_without_a_peer_is_not_certainly_of_the_master():
    finding = found("NET006", logged("ConnectionRefusedError: [Errno 111] Connection refused"))
    assert finding.summary == "A connection failed, probably to the master: Connection refused"
