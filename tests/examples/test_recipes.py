"""The recipes do what their words say, with real launchers over hosts of the lab."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.lab.hosts import LabHost, together
from tests.lab.needs import require_tools
from tests.lab.openmpi import mpirun
from tests.lab.slurm import SlurmCluster

EXAMPLES = Path(__file__).parents[2] / "examples"
DOCS = EXAMPLES.with_name("docs") / "how-to"
TRAIN = "import os; print('trained', os.environ.get('RANK', os.environ.get('SLURM_PROCID')))"

pytest.importorskip("torch")


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A training that says that it ran."""
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    return path


def _on_both(hosts: tuple[LabHost, ...], script: Path, **odd: str) -> list[tuple[int, str, str]]:
    runs = [
        (
            host,
            ["bash", EXAMPLES / "torchrun.sh", script],
            {"HEAD": hosts[0].name, "NODES": "2", "NODE_RANK": str(rank), **(odd if rank else {})},
        )
        for rank, host in enumerate(hosts)
    ]
    return [(done.returncode, done.stdout, done.stderr) for done in together(runs, timeout=100)]


def test_torchrun_trains_on_healthy_hosts(lab_hosts: Callable[..., tuple[LabHost, ...]], script: Path) -> None:
    for rank, (code, out, err) in enumerate(_on_both(lab_hosts(2), script)):
        assert code == 0, (out, err)
        assert out.splitlines()[-1] == f"trained {rank}"


def test_torchrun_does_not_start_where_a_host_fails(
    lab_hosts: Callable[..., tuple[LabHost, ...]], script: Path
) -> None:
    first, second = _on_both(lab_hosts(2), script, NCCL_SOCKET_IFNAME="eth9")
    assert (first[0], second[0]) == (1, 1)
    assert "NET007" in first[1]
    assert "trained" not in first[1] + second[1]


def _batch(recipe: str, *, tasks: int) -> str:
    """The recipe as the lab can run it: nodes without GPUs, an hour at most, and fewer tasks."""
    lines = (EXAMPLES / recipe).read_text().splitlines()
    kept = [line for line in lines if not line.startswith(("#SBATCH --gpus", "#SBATCH --time"))]
    text = "\n".join(kept).replace("--ntasks-per-node=8", f"--ntasks-per-node={tasks}")
    return text.replace("srun python", f"srun {sys.executable}") + "\n"


@pytest.mark.parametrize("page", ["slurm.md", "my-job-hangs-now.md"])
def test_the_command_for_a_job_that_hangs_reaches_every_node(
    slurm_cluster: Callable[..., SlurmCluster], page: str
) -> None:
    """From outside of the job, as a user starts it: srun's default there is a single node."""
    cluster = slurm_cluster(2)
    first = cluster.hosts[0]
    submitted = first.run(["sbatch", "--parsable", "--nodes=2", "--output=/dev/null", "--wrap", "srun sleep 60"])
    job = submitted.stdout.strip()
    (command,) = re.findall(r"^srun --overlap .*", (DOCS / page).read_text(), re.MULTILINE)
    try:
        for _ in range(100):
            if "RUNNING" in first.run(["squeue", "--noheader", f"--jobs={job}", "--format=%T"]).stdout:
                break
            time.sleep(0.1)
        done = first.run(["bash", "-c", command.replace("JOBID", job).replace("doctor attach", "hostname")])
    finally:
        first.run(["scancel", job])
        cluster.wait_until_idle()
    assert sorted(done.stdout.split()) == [host.name for host in cluster.hosts], done.stderr


def test_slurm_job_checks_in_a_step_and_trains(slurm_cluster: Callable[..., SlurmCluster], script: Path) -> None:
    cluster = slurm_cluster(2)
    healthy = cluster.sbatch(_batch("slurm_job.sbatch", tasks=1).replace('"$@"', str(script)), timeout=100)
    assert "trained 0" in healthy, healthy
    assert "trained 1" in healthy, healthy
    faulty = _batch("slurm_job.sbatch", tasks=1).replace('"$@"', str(script))
    output = cluster.sbatch(faulty.replace("srun doctor", "NCCL_SOCKET_IFNAME=eth9 srun doctor"), timeout=100)
    assert "NET007" in output, output
    assert "trained" not in output


def test_lightning_numbers_its_ranks_by_slurm(slurm_cluster: Callable[..., SlurmCluster]) -> None:
    pytest.importorskip("lightning")
    cluster = slurm_cluster(2)
    recipe = _batch("lightning_slurm.sbatch", tasks=1).replace('"$@"', str(EXAMPLES / "lightning_train.py"))
    output = cluster.sbatch(recipe, timeout=100)
    assert "rank 0 of 2 has trained" in output, output
    assert "rank 1 of 2 has trained" in output, output


@pytest.mark.parametrize(("limit", "code"), [("ulimit -n 65536", 0), ("mount -o remount,size=1m /dev/shm", 1)])
def test_the_prolog_fails_for_a_finding_alone(
    lab_hosts: Callable[..., tuple[LabHost, ...]], limit: str, code: int
) -> None:
    (host,) = lab_hosts(1)
    doctor = f"{Path(sys.executable).parent}/doctor"
    done = host.run(["bash", "-c", f"{limit}; DOCTOR={doctor} bash {EXAMPLES}/slurm_prolog.sh"])
    assert done.returncode == code, done.stderr
    assert ("MEM010" in done.stderr) == bool(code)


def test_the_prolog_lets_jobs_run_without_the_doctor(lab_hosts: Callable[..., tuple[LabHost, ...]]) -> None:
    (host,) = lab_hosts(1)
    done = host.run(["bash", EXAMPLES / "slurm_prolog.sh"], env={"DOCTOR": "/nowhere/doctor"})
    assert (done.returncode, "node not checked, exit code 127" in done.stderr) == (0, True)


@pytest.mark.parametrize(
    ("spoilt", "code"),
    [("ulimit -v 100000", 3), ("mkdir gone && cd gone && echo 'timeout = true' >doctor.toml", 2)],
    ids=["no memory for the doctor", "settings that can't be used"],
)
def test_the_prolog_lets_jobs_run_where_the_doctor_fails(
    lab_hosts: Callable[..., tuple[LabHost, ...]], tmp_path: Path, spoilt: str, code: int
) -> None:
    (host,) = lab_hosts(1)
    run = f"cd {tmp_path} && {spoilt}; DOCTOR={Path(sys.executable).parent}/doctor bash {EXAMPLES}/slurm_prolog.sh"
    done = host.run(["bash", "-c", run])
    assert done.returncode == 0, done.stderr
    assert f"rankdoctor: node not checked, exit code {code}: " in done.stderr


@pytest.mark.parametrize(("variable", "code"), [("NCCL_DEBUG=WARN", 0), ("NCCL_SOCKET_IFNAME=eth9", 1)])
def test_mpirun_checks_and_trains(
    lab_hosts: Callable[..., tuple[LabHost, ...]], script: Path, variable: str, code: int
) -> None:
    require_tools("mpirun")
    (host,) = lab_hosts(1)
    placed = ["--allow-run-as-root", "--oversubscribe", "-n", "2", "-x", variable]
    done = host.run(["bash", EXAMPLES / "mpirun.sh", *placed, "--", sys.executable, script], timeout=100)
    assert done.returncode == code, (done.stdout, done.stderr)
    assert done.stdout.count("trained") == (0 if code else 2)


def test_mpirun_by_the_address_of_its_own_host(lab_hosts: Callable[..., tuple[LabHost, ...]]) -> None:
    first, second = lab_hosts(2)
    done = mpirun([(first, 1), (second, 1)], ["doctor", "check", "--select", "ENV,NET", "--quiet"], timeout=100)
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert "2 of 2 ranks seen" in done.stdout
