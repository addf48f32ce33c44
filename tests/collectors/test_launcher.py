"""Who launched a process, what each source says, and whether it is one of several that run now."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from doctor.collectors.base import Machine
from doctor.collectors.launch.launcher import collect_launch, launch_facts, launcher_of, running_together
from doctor.collectors.launch.rank_variables import claims_of, tasks_on_node, whole_number
from doctor.core.facts import Claim
from doctor.core.masking import REDACTED
from tests.lab.cases import each_case
from tests.lab.speed import patience
from tests.recorded_launches import PLAIN, TORCHRUN, recorded

STEP = recorded("slurm_step.env")
BATCH = recorded("slurm_batch.env")
SALLOC = recorded("slurm_salloc.env")
MPI = recorded("openmpi.env")
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
RAY = {**PLAIN, "RAY_JOB_ID": "01000000", "RAY_RAYLET_PID": "77", "LOCAL_RANK": "1"}
POD = {**PLAIN, "KUBERNETES_SERVICE_HOST": "10.96.0.1", "PET_NNODES": "8", "PET_NODE_RANK": "3"}
LIGHTNING = {**PLAIN, "LOCAL_RANK": "1", "NODE_RANK": "0"}
del LIGHTNING["RANK"]


@each_case(
    ("environ", "launcher", "together"),
    [
        ({}, "none", ""),
        (PLAIN, "none", "RANK"),
        (TORCHRUN, "torchrun", "TORCHELASTIC_RUN_ID"),
        ({**STEP, **TORCHRUN}, "torchrun", "TORCHELASTIC_RUN_ID"),
        ({**STEP, **TORCHRUN, "WORLD_SIZE": "1", "RANK": "0"}, "torchrun", ""),
        ({**TORCHRUN, "RANK": "8"}, "torchrun", ""),
        ({**TORCHRUN, "RANK": "-1"}, "torchrun", ""),
        ({"TORCHELASTIC_RUN_ID": "left-over"}, "torchrun", ""),
        (STEP, "slurm", "SLURM_STEP_ID"),
        ({**STEP, "SLURM_STEP_NUM_TASKS": "1"}, "slurm", ""),
        ({key: STEP[key] for key in ("SLURM_STEP_ID", "SLURM_NTASKS", "SLURM_PROCID")}, "slurm", "SLURM_STEP_ID"),
        ({**STEP, "SLURM_PROCID": "4"}, "slurm", ""),
        (BATCH, "none", ""),
        (SALLOC, "none", ""),
        ({**BATCH, "SLURM_STEP_ID": "batch"}, "none", ""),
        ({**SALLOC, "SLURM_STEP_ID": "4294967290", "SLURM_PROCID": "0"}, "none", ""),
        ({**BATCH, **TORCHRUN}, "torchrun", "TORCHELASTIC_RUN_ID"),
        (MPI, "openmpi", "OMPI_COMM_WORLD_SIZE"),
        ({**SALLOC, **MPI}, "openmpi", "OMPI_COMM_WORLD_SIZE"),
        ({**STEP, **MPI}, "openmpi", "OMPI_COMM_WORLD_SIZE"),
        ({**STEP, **MPI, "OMPI_COMM_WORLD_SIZE": "4"}, "slurm", "OMPI_COMM_WORLD_SIZE"),
        ({**STEP, **LIGHTNING}, "slurm", "SLURM_STEP_ID"),
        ({**STEP, **LIGHTNING, "SLURM_STEP_NUM_TASKS": "1"}, "slurm", ""),
        ({**MPI, "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}, "openmpi", ""),
        (HYDRA, "mpich", "PMI_SIZE"),
        ({**STEP, **HYDRA}, "slurm", "PMI_SIZE"),
        ({**STEP, **HYDRA, "PMI_SIZE": "32", "PMI_RANK": "9"}, "mpich", "PMI_SIZE"),
        ({"JSM_NAMESPACE_RANK": "1", **MPI}, "lsf", "OMPI_COMM_WORLD_SIZE"),
        (RAY, "ray", "RANK"),
        ({**STEP, **RAY}, "ray", "RANK"),
        ({**STEP, "RAY_JOB_ID": "1"}, "ray", ""),
        ({"RAY_ADDRESS": "auto"}, "none", ""),
        (POD, "kubeflow", "RANK"),
        ({"KUBERNETES_SERVICE_HOST": "10.96.0.1"}, "none", ""),
        ({"PET_NNODES": "2"}, "none", ""),
        ({"PET_NNODES": "2", "KUBERNETES_SERVICE_HOST": "10.96.0.1"}, "kubeflow", ""),
        ({"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-2"}, "sagemaker", ""),
        (LIGHTNING, "lightning", ""),
        ({"ACCELERATE_MIXED_PRECISION": "no"}, "accelerate", ""),
        ({"ACCELERATE_LOG_LEVEL": "INFO"}, "none", ""),
        ({**TORCHRUN, "ACCELERATE_MIXED_PRECISION": "no"}, "torchrun", "TORCHELASTIC_RUN_ID"),
        ({"LOCAL_RANK": "0"}, "none", ""),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "none", ""),
        ({**PLAIN, "RANK": "8"}, "none", ""),
        ({**PLAIN, "RANK": "abc"}, "none", ""),
        ({**PLAIN, "WORLD_SIZE": "1", "RANK": "0"}, "none", ""),
        ({**PLAIN, "MASTER_PORT": "0"}, "none", ""),
        ({**PLAIN, "MASTER_PORT": "port"}, "none", ""),
        ({**PLAIN, "MASTER_ADDR": " "}, "none", ""),
    ],
)
def test_launcher_and_mark(environ: dict[str, str], launcher: str, together: str) -> None:
    assert launcher_of(environ) == launcher
    assert running_together(environ) == together


@each_case(
    ("environ", "claim"),
    [
        (PLAIN, Claim("environment", 3, 8)),
        (TORCHRUN, Claim("torchrun", 3, 8, 1, 2, 1, 4)),
        (STEP, Claim("slurm", 1, 4, 1, 2, 0, 2)),
        (BATCH, Claim("slurm", 0, 4, 0, 2, 0, 2)),
        (SALLOC, Claim("slurm", None, 2, None, None, None, 1)),
        ({**STEP, "SLURM_STEP_TASKS_PER_NODE": "3,1", "SLURM_NODEID": "1"}, Claim("slurm", 1, 4, 1, 1, 1, 2)),
        (MPI, Claim("openmpi", 1, 2, 1, 2)),
        (HYDRA, Claim("pmi", 1, 4, 1, 2)),
        (
            {"MV2_COMM_WORLD_RANK": "2", "MV2_COMM_WORLD_SIZE": "4", "MV2_COMM_WORLD_LOCAL_RANK": "0"},
            Claim("pmi", 2, 4, 0),
        ),
        (
            {"JSM_NAMESPACE_RANK": "5", "JSM_NAMESPACE_SIZE": "6", "JSM_NAMESPACE_LOCAL_RANK": "1"},
            Claim("lsf", 5, 6, 1),
        ),
        (POD, Claim("kubeflow", None, None, None, None, 3, 8)),
        (
            {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "8", "PET_NODE_RANK": "1"},
            Claim("kubeflow", None, 16, None, 8, 1, 2),
        ),
        ({"PET_NNODES": "2:4", "PET_NPROC_PER_NODE": "auto"}, Claim("kubeflow")),
        (RAY, Claim("ray", 3, 8, 1)),
        (
            {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-2", "SM_NUM_GPUS": "8"},
            Claim("sagemaker", None, 16, None, 8, 1, 2),
        ),
        ({"SM_HOSTS": "{", "SM_CURRENT_HOST": "algo-2", "SM_NUM_GPUS": "0"}, Claim("sagemaker")),
        (LIGHTNING, Claim("lightning", 1, 8, 1, None, 0)),
        ({**LIGHTNING, "NODE_RANK": "2"}, Claim("lightning", None, 8, 1, None, 2)),
        ({**LIGHTNING, "NODE_RANK": "2", "LT_DEVICES": "2"}, Claim("lightning", 5, 8, 1, 2, 2)),
        ({**MPI, "ACCELERATE_MIXED_PRECISION": "no"}, Claim("accelerate", 1, 2, 1, 2)),
        (
            {"FORCE_TORCHRUN": "1", "NNODES": "2", "NODE_RANK": "1", "NPROC_PER_NODE": "4"},
            Claim("llamafactory", None, 8, None, 4, 1, 2),
        ),
        ({"RANK": "abc", "WORLD_SIZE": ""}, Claim("environment")),
    ],
)
def test_claims(environ: dict[str, str], claim: Claim) -> None:
    assert claim in claims_of(environ)


def test_sources_that_say_nothing_make_no_claim() -> None:
    assert claims_of({"HOME": "/x", "NNODES": "2", "RAY_ADDRESS": "auto", "LT_DEVICES": "2"}) == ()


def test_torch_is_told_by_the_plain_names() -> None:
    facts = launch_facts({**STEP, "RANK": "7", "WORLD_SIZE": "9"})
    assert (facts.rank, facts.world_size, facts.local_rank, facts.node_rank) == (7, 9, 1, 0)
    assert facts.claim("slurm") == Claim("slurm", 1, 4, 1, 2, 0, 2)
    assert facts.running_together == "SLURM_STEP_ID"


def test_the_launcher_speaks_where_torch_is_told_nothing() -> None:
    facts = launch_facts(MPI)
    assert (facts.rank, facts.world_size, facts.local_rank, facts.local_world_size) == (1, 2, 1, 2)


@pytest.mark.parametrize("environ", [BATCH, SALLOC, {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "8"}])
def test_lone_processes_have_no_rank(environ: dict[str, str]) -> None:
    facts = launch_facts(environ)
    assert (facts.rank, facts.world_size, facts.local_rank) == (None, None, None)


def test_values_stay_as_they_are_and_secrets_do_not() -> None:
    environ = {"RANK": "abc", "LOCAL_RANK": "", "SLURM_JWT": "x.y", "RAY_REDIS_PASSWORD": "p", "HOME": "/x"}
    facts = launch_facts(environ)
    assert [variable.name for variable in facts.variables] == ["LOCAL_RANK", "RANK", "RAY_REDIS_PASSWORD", "SLURM_JWT"]
    assert (facts.get("RANK"), facts.get("LOCAL_RANK"), facts.get("WORLD_SIZE")) == ("abc", "", None)
    assert facts.get("SLURM_JWT") == facts.get("RAY_REDIS_PASSWORD") == REDACTED


LONGEST = (1 << 17) - 1
"""Bytes of a variable with its name: Linux starts no program with a longer one (MAX_ARG_STRLEN, execve(2))."""
NONSENSE = [
    "",
    " ",
    "-1",
    "1e3",
    "٣",
    "0x10",
    "9" * 19,
    "9" * 23,
    "-" + "9" * 23,
    "9" * LONGEST,
    "x" * LONGEST,
    b"\xff\xfe\x00".decode("utf-8", "surrogateescape"),
    "[" * 100_000,
    "4(x99999999999999)",
    "4(x-1),,",
    "1(x0)",
    '{"a": [1]}',
    '["a", 1, null]',
    "nan",
]


@each_case("value", NONSENSE)
def test_nonsense_can_always_be_written(value: str) -> None:
    names = {*STEP, *MPI, *TORCHRUN, *POD, *RAY, *HYDRA, *LIGHTNING}
    names |= {"SM_HOSTS", "SM_CURRENT_HOST", "SM_NUM_GPUS", "PET_NPROC_PER_NODE", "NNODES", "NPROC_PER_NODE"}
    names |= {"LT_DEVICES", "ACCELERATE_MIXED_PRECISION", "FORCE_TORCHRUN"}
    everything = dict.fromkeys(names, value)
    without_torchrun = {name: value for name, value in everything.items() if name != "TORCHELASTIC_RUN_ID"}
    for environ in (everything, without_torchrun, {**TORCHRUN, "RANK": value}, {**STEP, "SLURM_PROCID": value}):
        facts = launch_facts(environ)
        assert len(msgspec.msgpack.encode(facts)) < 1 << 20
        msgspec.json.encode(facts)


def test_the_first_name_that_holds_a_number() -> None:
    assert whole_number({"RANK": "9" * 30, "OTHER": " 2 "}, "MISSING", "RANK", "OTHER") == 2
    assert whole_number({"RANK": "1.0"}, "RANK") is None


@pytest.mark.parametrize(
    ("text", "node", "tasks"),
    [
        ("4(x2)", 1, 4),
        ("4(x2)", 2, None),
        ("4(x2),3,1(x2000000000)", 2, 3),
        ("4(x2),3,1(x2000000000)", 1_000_000, 1),
        ("4", -1, None),
        ("four", 0, None),
        ("", 0, None),
    ],
)
def test_tasks_on_node(text: str, node: int, tasks: int | None) -> None:
    assert tasks_on_node(text, node) == tasks


def test_ancestors_of_a_recorded_step(tmp_path: Path) -> None:
    for pid, name, parent in (("self", "python", 70), (70, "slurmstepd", 1), (1, "systemd", 0)):
        (tmp_path / str(pid)).mkdir()
        number = 71 if pid == "self" else pid
        (tmp_path / str(pid) / "status").write_text(f"Name:\t{name}\nPid:\t{number}\nPPid:\t{parent}\n")
    facts = collect_launch(Machine(environ=STEP, proc=tmp_path))
    assert facts.ancestors == ("slurmstepd", "systemd")
    (tmp_path / "70" / "status").unlink()
    assert collect_launch(Machine(environ=STEP, proc=tmp_path)).ancestors == ()


def test_a_circle_of_parents_ends(tmp_path: Path) -> None:
    for pid, parent in (("self", 5), (5, 6), (6, 5)):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "status").write_text(f"Name:\tx\nPid:\t{pid if pid != 'self' else 4}\nPPid:\t{parent}\n")
    assert 0 < len(collect_launch(Machine(environ={}, proc=tmp_path)).ancestors) < 100


def test_a_rank_of_a_real_torchrun() -> None:
    pytest.importorskip("torch")
    code = (
        "import os, sys; sys.path[:0] = os.environ['DOCTOR_PATH'].split(':');"
        "from doctor.collectors.base import Machine; from doctor.collectors.launch.launcher import collect_launch;"
        "f = collect_launch(Machine());"
        "print(f.launcher, f.rank, f.world_size, f.local_world_size, f.node_rank, f.running_together, f.ancestors[0])"
        " if f.rank == 1 else None"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
    environ = {**os.environ, "DOCTOR_PATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [*command, sys.executable, "-c", code], capture_output=True, text=True, env=environ, timeout=patience(100)
    )
    assert done.returncode == 0, done.stderr
    words = done.stdout.split()
    assert words[:6] == ["torchrun", "1", "2", "2", "0", "TORCHELASTIC_RUN_ID"]
    assert words[6].startswith(("pt_elastic", "python", "torchrun"))


def test_a_rank_of_a_real_mpirun() -> None:
    import shutil

    if shutil.which("mpirun") is None:
        pytest.skip("no mpirun on this machine")
    code = (
        "import os, sys; sys.path[:0] = os.environ['DOCTOR_PATH'].split(':');"
        "from doctor.collectors.base import Machine; from doctor.collectors.launch.launcher import collect_launch;"
        "f = collect_launch(Machine());"
        "print(f.launcher, f.rank, f.world_size, f.running_together, f.ancestors[0]) if f.rank == 1 else None"
    )
    version = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, timeout=patience(30)).stdout
    if "Open MPI" not in version:
        pytest.skip("this mpirun is not Open MPI's")
    command = ["mpirun", "-n", "2", "--oversubscribe", *(["--allow-run-as-root"] if os.geteuid() == 0 else [])]
    environ = {**os.environ, "DOCTOR_PATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [*command, sys.executable, "-c", code], capture_output=True, text=True, env=environ, timeout=patience(60)
    )
    assert done.stdout.split()[:4] == ["openmpi", "1", "2", "OMPI_COMM_WORLD_SIZE"], done.stderr
