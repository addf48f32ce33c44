"""Which process of which run: the number, the world, and the names that its processes derive identical."""

import pytest

from doctor.cluster.rendezvous.process_identity import process_identity
from doctor.core.capture import WORLD_LIMIT
from tests.cluster.launches import OPEN_MPI, STEP, TORCHRUN
from tests.recorded_launches import PLAIN


def number_and_size(environ):
    identity = process_identity(environ)
    return (identity.number, identity.world_size) if identity else None


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (PLAIN, (3, 8)),
        (TORCHRUN, (3, 8)),
        (STEP, (1, 4)),
        (OPEN_MPI, (1, 2)),
        ({"PMI_RANK": "1", "PMI_SIZE": "4"}, (1, 4)),
        ({}, None),
        ({"RANK": "0"}, None),
        ({**PLAIN, "RANK": "8"}, None),
        ({**PLAIN, "RANK": "-1"}, None),
        ({**PLAIN, "RANK": "three"}, None),
        ({**PLAIN, "WORLD_SIZE": str(WORLD_LIMIT)}, (3, WORLD_LIMIT)),
        ({**PLAIN, "WORLD_SIZE": str(WORLD_LIMIT + 1)}, None),
        ({**PLAIN, "WORLD_SIZE": str(1 << 63)}, None),
    ],
)
def test_number_and_size(environ, expected):
    assert number_and_size(environ) == expected


@pytest.mark.parametrize(("launched", "own"), [(STEP, (1, 4)), (OPEN_MPI, (1, 2))])
def test_the_launcher_counts_where_rank_was_exported_before_the_start(launched, own):
    assert number_and_size({**launched, "RANK": "0", "WORLD_SIZE": "16"}) == own


def test_torchrun_inside_a_step_counts_itself():
    assert number_and_size({**STEP, **TORCHRUN}) == (3, 8)


@pytest.mark.parametrize(
    ("environ", "other"),
    [
        (STEP, {"SLURM_STEP_ID": "1"}),
        (STEP, {"SLURM_JOB_ID": "2"}),
        (TORCHRUN, {"TORCHELASTIC_RUN_ID": "other"}),
        (TORCHRUN, {"TORCHELASTIC_RESTART_COUNT": "1"}),
        ({**OPEN_MPI, "OMPI_MCA_ess_base_jobid": "7"}, {"OMPI_MCA_ess_base_jobid": "8"}),
        (OPEN_MPI, {"PMIX_NAMESPACE": "1158217730"}),
        ({**PLAIN, "PBS_JOBID": "7.server"}, {"PBS_JOBID": "8.server"}),
    ],
)
def test_another_run_has_another_key(environ, other):
    assert process_identity(environ).key != process_identity({**environ, **other}).key


@pytest.mark.parametrize(
    ("environ", "changes"),
    [
        (PLAIN, {"RANK": "0", "MASTER_ADDR": "10.0.0.1", "LOCAL_RANK": "3"}),
        (PLAIN, {"MASTER_PORT": "29501"}),  # told wrongly: to be found, so the two must meet
        (TORCHRUN, {"RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0"}),
        (STEP, {"SLURM_PROCID": "3", "SLURM_NODEID": "1", "SLURM_LOCALID": "1", "SLURM_TASK_PID": "1"}),
        (OPEN_MPI, {"OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}),
    ],
)
def test_all_processes_of_a_run_have_one_key(environ, changes):
    assert process_identity(environ).key == process_identity({**environ, **changes}).key


@pytest.mark.parametrize("environ", [PLAIN, TORCHRUN])
def test_ports_distinguish_runs_on_the_same_host(environ):
    """Their launchers give them no name of their own: torchrun's run id is ``none`` unless one is asked for."""
    one, other = process_identity(environ), process_identity({**environ, "MASTER_PORT": "29501"})
    assert one.key_here != other.key_here
    assert one.key_here == process_identity({**environ, "RANK": "0"}).key_here


@pytest.mark.parametrize(
    ("environ", "spans"),
    [
        (PLAIN, True),
        (TORCHRUN, True),
        ({**TORCHRUN, "GROUP_WORLD_SIZE": "1"}, False),
        (STEP, True),
        ({**STEP, "SLURM_STEP_NUM_NODES": "1"}, False),
        (OPEN_MPI, False),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, True),
        ({**PLAIN, "LOCAL_WORLD_SIZE": "8"}, False),
    ],
)
def test_whether_there_may_be_other_hosts(environ, spans):
    assert process_identity(environ).spans_hosts is spans
