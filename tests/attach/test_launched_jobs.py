"""Ranks of jobs that real launchers started, with the processes that torch and Lightning start beside them."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from doctor.attach.targets import TargetJob
from tests.attach.sleepers import jobs_of, table_of_tests
from tests.lab.needs import CannotPlay, clean_environ, require_tools
from tests.lab.ports import free_port
from tests.lab.speed import patience

SCRIPTS = Path(sys.executable).parent
IN_GROUP = """
import os, sys, time
import torch
import torch.distributed as dist

def wait():
    dist.all_reduce(torch.ones(1))
    time.sleep(1000)
"""
WITH_LOADER = f"""{IN_GROUP}
from torch.utils.data import DataLoader

if __name__ == "__main__":
    dist.init_process_group("gloo")
    batches = iter(DataLoader(range(1000), num_workers=2))
    next(batches)
    wait()
"""
SPAWNING = f"""{IN_GROUP}
def train(rank, port):
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{{port}}", rank=rank, world_size=2)
    wait()

if __name__ == "__main__":
    torch.multiprocessing.spawn(train, (sys.argv[1],), nprocs=2)
"""
LIGHTNING = """
import sys, time
import torch
from lightning.pytorch import LightningModule, Trainer

class Sleeper(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
    def training_step(self, batch):
        time.sleep(1000)
    def train_dataloader(self):
        return torch.utils.data.DataLoader(range(8))
    def configure_optimizers(self):
        return None

if __name__ == "__main__":
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    Trainer(accelerator="cpu", devices=2, strategy=sys.argv[1], **quiet).fit(Sleeper())
"""


@contextlib.contextmanager
def _started(tmp_path: Path, *command: str | Path) -> Iterator[subprocess.Popen[bytes]]:
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [*map(str, command)],
            env=clean_environ(tmp_path),
            cwd=tmp_path,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            for one in psutil.Process(process.pid).children(recursive=True):
                one.kill()
        process.kill()
        process.wait()


def _job(tmp_path: Path, process: subprocess.Popen[bytes], is_complete: Callable[[TargetJob], bool]) -> TargetJob:
    """The only job of a process and its descendants, once it is complete."""
    until = time.monotonic() + patience(60)
    while True:
        table = table_of_tests()
        jobs = jobs_of([process.pid, *(child.pid for child in table.descendants(process.pid))])
        if len(jobs) == 1 and is_complete(jobs[0]):
            return jobs[0]
        assert time.monotonic() < until, (jobs, (tmp_path / "log").read_text())
        assert process.poll() is None, (tmp_path / "log").read_text()
        time.sleep(0.3)


def _has(**counts: int) -> Callable[[TargetJob], bool]:
    def has_them(job: TargetJob) -> bool:
        roles = [target.facts.role for target in job.targets]
        return all(roles.count(role) == count for role, count in counts.items())

    return has_them


def _numbers(job: TargetJob) -> list[tuple[int | None, str, bool]]:
    return [(target.facts.rank, target.facts.rank_from, target.facts.guessed) for target in job.ranks]


def test_torchrun_and_the_workers_of_its_ranks(tmp_path):
    pytest.importorskip("torch")
    script = tmp_path / "train.py"
    script.write_text(WITH_LOADER)
    torchrun = [SCRIPTS / "torchrun", "--nproc-per-node=2", f"--master-port={free_port()}", "--rdzv-id=mine"]
    with _started(tmp_path, *torchrun, script) as process:
        job = _job(tmp_path, process, _has(rank=2, worker=4))
    assert _numbers(job) == [(0, "RANK", False), (1, "RANK", False)]
    ranks = [target.facts.pid for target in job.ranks]
    workers = [target.facts for target in job.targets if target.facts.role == "worker"]
    assert sorted(worker.parent for worker in workers) == sorted(2 * ranks)
    assert [target.facts.pid for target in job.targets if target.facts.role == "agent"] == [process.pid]
    assert (job.launcher, job.program, job.world_size, job.id) == ("torchrun", str(script), 2, "mine")


def test_accelerate_is_the_launcher_though_its_agent_is_that_of_torchrun(tmp_path):
    pytest.importorskip("accelerate")
    script = tmp_path / "train.py"
    script.write_text("import time\ntime.sleep(1000)\n")
    sizes = ["--num_processes=2", "--num_machines=1", f"--main_process_port={free_port()}"]
    command = [
        SCRIPTS / "accelerate",
        "launch",
        "--multi_gpu",
        "--mixed_precision=no",
        "--dynamo_backend=no",
        *sizes,
        script,
    ]
    with _started(tmp_path, *command) as process:
        job = _job(tmp_path, process, _has(rank=2, agent=1))
    assert "TORCHELASTIC_RUN_ID" in job.ranks[0].process.environ
    assert (job.launcher, job.program, job.world_size) == ("accelerate", str(script), 2)
    assert _numbers(job) == [(0, "RANK", False), (1, "RANK", False)]


def test_processes_of_torch_multiprocessing_spawn(tmp_path):
    pytest.importorskip("torch")
    script = tmp_path / "train.py"
    script.write_text(SPAWNING)
    with _started(tmp_path, sys.executable, script, str(free_port())) as process:
        job = _job(tmp_path, process, _has(rank=2, agent=1))
    assert _numbers(job) == [(0, "order of the processes", True), (1, "order of the processes", True)]
    assert [target.facts.pid for target in job.targets if target.facts.role == "agent"] == [process.pid]
    assert (job.program, job.world_size, job.found_by) == (str(script), 2, "parent")


@pytest.mark.parametrize(
    ("strategy", "numbered_by"), [("ddp", ("LOCAL_RANK of its children", "LOCAL_RANK")), ("ddp_fork", None)]
)
def test_processes_of_lightning(tmp_path, strategy, numbered_by):
    pytest.importorskip("lightning")
    script = tmp_path / "fit.py"
    script.write_text(LIGHTNING)
    with _started(tmp_path, sys.executable, script, strategy) as process:
        job = _job(tmp_path, process, _has(rank=2))
    names = numbered_by or ("order of the processes",) * 2
    assert _numbers(job) == [(rank, name, numbered_by is None) for rank, name in enumerate(names)]
    assert (job.world_size, job.program) == (2, str(script))
    assert (job.ranks[0].facts.pid == process.pid) == (numbered_by is not None)


def test_ranks_of_mpirun(tmp_path):
    try:
        require_tools("mpirun")
    except CannotPlay as reason:
        pytest.skip(str(reason))
    script = tmp_path / "train.py"
    script.write_text("import time\ntime.sleep(1000)\n")
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", "2"]
    with _started(tmp_path, *mpirun, sys.executable, "-S", script) as process:
        job = _job(tmp_path, process, _has(rank=2, agent=1))
    assert _numbers(job) == [(0, "OMPI_COMM_WORLD_RANK", False), (1, "OMPI_COMM_WORLD_RANK", False)]
    assert (job.launcher, job.program, job.world_size) == ("openmpi", str(script), 2)
    assert [target.facts.pid for target in job.targets if target.facts.role == "agent"] == [process.pid]
