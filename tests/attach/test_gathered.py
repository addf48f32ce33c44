"""Jobs over several hosts, each with PID, network and UTS namespaces of its own: one report by each engine."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.attach.jobs import PROGRAM
from tests.attach.places import ON_HOSTS, TRAINS_WITH_RAY
from tests.lab.hosts import LabHost, together
from tests.lab.needs import CannotPlay
from tests.lab.openmpi import mpirun
from tests.lab.ray_nodes import ray_nodes
from tests.lab.slurm import SlurmCluster
from tests.lab.speed import patience

pytest.importorskip("torch")
pytestmark = [pytest.mark.timeout(300)]
ATTACH = [sys.executable, "-m", "doctor", "attach", "--isolated", "--format", "json", "--timeout", str(patience(30))]


def findings(report: dict[str, Any]) -> list[tuple[str, list[int], list[str], str]]:
    return [
        (result["id"], finding["ranks"], finding["hosts"], finding["severity"])
        for result in report["results"]
        for finding in result["findings"]
        if result["family"] == "progress"
    ]


def wait_for_ranks(folder: Path, count: int) -> None:
    until = time.monotonic() + patience(90)
    while len(list(folder.glob("rank-*"))) < count:
        assert time.monotonic() < until, "the job did not start"
        time.sleep(0.1)
    time.sleep(1)


@contextlib.contextmanager
def in_background(start: Callable[[], object]) -> Iterator[None]:
    """A launcher that blocks until its ranks have ended, which the lab sees to."""
    thread = threading.Thread(target=start, daemon=True)
    thread.start()
    yield


def test_srun_overlap_attaches_to_the_step_of_a_job(slurm_cluster: Callable[..., SlurmCluster], tmp_path: Path) -> None:
    cluster = slurm_cluster(2)
    job = cluster.hosts[0].start(
        ["srun", "-N", "2", "--ntasks-per-node", "2", sys.executable, PROGRAM, "gathers", tmp_path], env=ON_HOSTS
    )
    try:
        wait_for_ranks(tmp_path, 4)
        done = cluster.srun(["--overlap", "--jobid", "1", "-N", "2", "-n", "2"], ATTACH, timeout=90)
        report = json.loads(done.stdout)
        assert findings(report) == [("RUN006", [3], ["node1"], "error")], done
        assert report["stacks"]["job"].startswith("scenes.py · launched by slurm · 4 ranks · 2 hosts attached · job 1")
        assert done.returncode == 1
        part = cluster.srun(["--overlap", "--jobid", "1", "-N", "1", "-n", "1", "-w", "node0"], ATTACH, timeout=90)
        assert json.loads(part.stdout)["stacks"]["notes"] == ["not attached: ranks 2 and 3 (1 host)"], part
        assert part.returncode == 3
        assert job.poll() is None
    finally:
        cluster.hosts[0].run(["scancel", "--user=root"])


def test_mpirun_attaches_to_a_job_of_mpirun(lab_hosts: Callable[..., tuple[LabHost, ...]], tmp_path: Path) -> None:
    first, second = lab_hosts(2)
    slots = [(first, 1), (second, 1)]
    job = [sys.executable, PROGRAM, "sleeps", tmp_path]
    with in_background(lambda: mpirun(slots, job, ON_HOSTS, timeout=200)):
        wait_for_ranks(tmp_path, 2)
        done = mpirun(slots, ATTACH, timeout=90)
        report = json.loads(done.stdout)
        assert findings(report) == [("RUN001", [1], ["node1"], "error")], done
        assert done.returncode == 1


def test_without_a_launcher_hosts_meet_in_a_folder_by_what_the_ranks_state(
    lab_hosts: Callable[..., tuple[LabHost, ...]], tmp_path: Path
) -> None:
    hosts = lab_hosts(2)
    with started_by_hand(hosts, "sleeps", tmp_path):
        share = ["--share", tmp_path / "share"]
        first, second = together([(host, [*ATTACH, *share], None) for host in hosts], 90)
        report = json.loads(first.stdout)
        assert findings(report) == [("RUN001", [3], ["node1"], "error")], (first, second)
        assert (first.returncode, second.returncode, second.stdout) == (1, 1, "")

        alone = hosts[1].run(ATTACH, timeout=90)
        assert json.loads(alone.stdout)["stacks"]["notes"] == ["not attached: ranks 0 and 1 (1 host)"]
        late = hosts[0].run([*ATTACH[:-1], "3", *share], timeout=90)
        assert json.loads(late.stdout)["coverage"]["ranks_seen"] == 2
        assert late.returncode == 3, late


def test_all_hosts_watch_until_the_job_moves(lab_hosts: Callable[..., tuple[LabHost, ...]], tmp_path: Path) -> None:
    hosts = lab_hosts(2)
    with started_by_hand(hosts, "is-stopped", tmp_path):
        threading.Timer(10, lambda: hosts[1].signal(signal.SIGCONT, str(PROGRAM), RANK="3")).start()
        watch = [*ATTACH, "--watch", "1", "--share", tmp_path / "share"]
        first, second = together([(host, watch, None) for host in hosts], 120)
        reports = [json.loads(text) for text in first.stdout.replace("}\n{", "}\n\0{").split("\0")]
        assert findings(reports[0]) == [("RUN001", [3], ["node1"], "error")], (first, second)
        assert [report["exit_code"] for report in reports[:-1]] == [1] * (len(reports) - 1)
        assert (reports[-1]["exit_code"], first.returncode, second.returncode) == (0, 0, 0)


@contextlib.contextmanager
def started_by_hand(hosts: Sequence[LabHost], scene: str, folder: Path) -> Iterator[None]:
    """Two ranks on each host, as torchrun numbers them."""
    ranks: list[subprocess.Popen[str]] = []
    for node, host in enumerate(hosts):
        for local in range(2):
            numbers = {
                "RANK": 2 * node + local,
                "WORLD_SIZE": 2 * len(hosts),
                "LOCAL_RANK": local,
                "LOCAL_WORLD_SIZE": 2,
                "GROUP_RANK": node,
            }
            environ = ON_HOSTS | {name: str(number) for name, number in numbers.items()}
            ranks.append(host.start([sys.executable, PROGRAM, scene, folder], env=environ))
    wait_for_ranks(folder, len(ranks))
    yield
    assert all(rank.poll() is None for rank in ranks)
    for host in hosts:
        host.kill(str(PROGRAM))


_TRAINS_ON_RAY = """
import os, sys, time, ray

ray.init(address="auto", log_to_driver=False)

@ray.remote(num_cpus=2)
class Trainer:
    def train(self, rank, world_size, address, folder):
        import torch, torch.distributed as dist
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world_size)
        open(f"{folder}/rank-{rank}", "w").close()
        while rank == 1:
            time.sleep(3600)
        dist.all_reduce(torch.ones(3))

trainers = [Trainer.remote() for _ in range(2)]
ray.get([one.train.remote(rank, 2, "tcp://node0:29511", sys.argv[1]) for rank, one in enumerate(trainers)])
"""


def test_ray_train_trains_in_a_thread_of_its_workers(tmp_path: Path) -> None:
    pytest.importorskip("ray.train", exc_type=ImportError)
    with contextlib.ExitStack() as stack:
        try:
            cluster = stack.enter_context(ray_nodes(1))
        except CannotPlay as why:
            pytest.skip(str(why))
        driver = [sys.executable, "-c", TRAINS_WITH_RAY, tmp_path]
        log = stack.enter_context((tmp_path / "log").open("wb"))
        cluster.hosts[0].start(driver, env={**cluster.environ, "PYTHONPATH": ""}, stdout=log, stderr=log)
        wait_for_ranks(tmp_path, 2)
        done = cluster.run([*ATTACH, "--ray", "auto", "--locals"], timeout=90)
        report = json.loads(done.stdout)
        assert findings(report) == [("RUN001", [1], ["node0"], "error")], (done, (tmp_path / "log").read_text())
        assert report["stacks"]["job"].startswith("ray::RayTrainWorker · launched by ray · 2 ranks · 1 host attached")
        waits, sleeps = report["stacks"]["groups"]
        assert (waits["ranks"], waits["place"]) == ([0], "all_reduce at <string>:14 (train)")
        assert (sleeps["ranks"], sleeps["place"]) == ([1], "<string>:13 (train)")
        assert done.returncode == 1


@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
def test_ray_reads_the_trainers_of_all_nodes(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        try:
            cluster = stack.enter_context(ray_nodes(2))
        except CannotPlay as why:
            pytest.skip(str(why))
        driver = [sys.executable, "-c", _TRAINS_ON_RAY, tmp_path]
        log = stack.enter_context((tmp_path / "log").open("wb"))
        cluster.hosts[0].start(driver, env={**cluster.environ, "PYTHONPATH": ""}, stdout=log, stderr=log)
        wait_for_ranks(tmp_path, 2)
        done = cluster.run([*ATTACH, "--ray", "auto", "--locals"], timeout=90)
        report = json.loads(done.stdout)
        assert [(check, ranks) for check, ranks, _, _ in findings(report)] == [("RUN001", [1])], done
        assert report["stacks"]["notes"] == ["rank numbers guessed by the locals of its stack: ranks 0 and 1"]
        assert done.returncode == 1
