"""Where the ranks of a job are for the process that attaches: in namespaces, on other hosts, or out of its reach.

What refuses access is real: the user, the capabilities and the system calls of the process that attaches.
"""

from __future__ import annotations

import contextlib
import functools
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import psutil

from tests.attach.jobs import ATTACH, PROGRAM, TrainingJob, doctor_attach, running
from tests.attach.readable import FILTERED
from tests.lab.hosts import LabHost
from tests.lab.needs import clean_environ
from tests.lab.ray_nodes import RayCluster, ray_nodes
from tests.lab.slurm import SlurmCluster, slurm
from tests.lab.users import ALICE, BOB, run_as

ON_HOSTS = {
    "PYTHONPATH": "",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "GLOO_SOCKET_IFNAME": "eth0",
    "OMP_NUM_THREADS": "1",
}
"""Variables of ranks on hosts of the lab."""
TRAINS_WITH_RAY = """
import sys, time, ray, ray.train, torch, torch.distributed as dist
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

ray.init(address="auto", log_to_driver=False, runtime_env={"env_vars": {"GLOO_SOCKET_IFNAME": "eth0"}})

def train(config):
    rank = ray.train.get_context().get_world_rank()
    dist.all_reduce(torch.ones(3))
    open(f"{config['folder']}/rank-{rank}", "w").close()
    while rank == 1:
        time.sleep(3600)
    dist.all_reduce(torch.ones(3))

TorchTrainer(
    train,
    train_loop_config={"folder": sys.argv[1]},
    torch_config=TorchConfig(backend="gloo"),
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(storage_path=sys.argv[1]),
).fit()
"""
_LONGEST = 300.0
_WITHOUT_PTRACE = ("setpriv", "--bounding-set", "-sys_ptrace")


class _ReadByAnother(TrainingJob):
    """It is read by a process whose command line begins with ``before``, and that may not see its variables."""

    before: Sequence[str] = ()

    def run_doctor(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        """Run the command, which is told the processes."""
        pids = [option for process in self.processes for option in ("--pid", process.pid)]
        return doctor_attach(*pids, *arguments, before=self.before)


@contextlib.contextmanager
def _read_by(
    before: Callable[[], Sequence[str]], scene: str, folder: Path, world: int, **variables: str
) -> Iterator[TrainingJob]:
    folder.chmod(0o777)
    with running(scene, folder, world, **variables) as job:
        reader = _ReadByAnother(job.name, job.processes, world, folder)
        reader.before = before()
        yield reader


class _OverFolder(TrainingJob):
    """Each of its ranks has a host of its own, where a process attaches; they meet in a folder."""

    def run_doctor(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        """Run the command on all hosts at once; return what the one did that reports."""
        command = [*ATTACH, *map(str, arguments), "--share", str(self.folder / "share"), "--timeout", str(_LONGEST)]
        commands = [_inside(process, command, self.folder) for process in self.processes]
        outputs = [one.communicate(timeout=_LONGEST) for one in commands]
        codes = {one.returncode for one in commands}
        report = "".join(stdout for stdout, _ in outputs)
        return subprocess.CompletedProcess(command, codes.pop() if len(codes) == 1 else -1, report, str(outputs))


def _inside(holder: psutil.Process, command: Sequence[str], folder: Path) -> subprocess.Popen[str]:
    """Start a command in the namespaces of a rank, by the process that waits for it."""
    (rank,) = holder.children()
    enter = ["nsenter", "--target", str(rank.pid), "--pid", "--uts", "--mount", "--"]
    pipe = subprocess.PIPE
    return subprocess.Popen([*enter, *command], env=clean_environ(folder), stdout=pipe, stderr=pipe, text=True)


@contextlib.contextmanager
def _over_folder(scene: str, folder: Path, world: int) -> Iterator[TrainingJob]:
    with running(scene, folder, world, own_hosts=True) as job:
        yield _OverFolder(job.name, job.processes, world, folder)


class _OnCluster(TrainingJob):
    """Its processes are those of hosts of the lab whose command line holds ``holding``."""

    def __init__(self, cluster: SlurmCluster | RayCluster, holding: str, world: int, folder: Path) -> None:
        super().__init__("1", (), world, folder)
        self.cluster = cluster
        self.wait_for_scene()
        self.processes = [process for host in cluster.hosts for process in host.processes(holding)]


class _SlurmJob(_OnCluster):
    def run_doctor(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        """Run the command in a step of the same job on all nodes."""
        count = str(len(self.cluster.hosts))
        options = ["--overlap", "--jobid", self.name, "-N", count, "-n", count]
        assert isinstance(self.cluster, SlurmCluster)
        return self.cluster.srun(options, [*ATTACH, *map(str, arguments)], timeout=_LONGEST)


class _RayJob(_OnCluster):
    def run_doctor(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        """Run the command on the head of the cluster."""
        assert isinstance(self.cluster, RayCluster)
        return self.cluster.run([*ATTACH, *map(str, arguments), "--ray", "auto", "--locals"], timeout=_LONGEST)


@contextlib.contextmanager
def _under_slurm(scene: str, folder: Path, world: int) -> Iterator[TrainingJob]:
    with slurm(2) as cluster:
        half = str(world // 2)
        command = ["srun", "-N", "2", "--ntasks-per-node", half, sys.executable, str(PROGRAM), scene, str(folder)]
        with _logged(cluster.hosts[0], command, ON_HOSTS, folder):
            yield _SlurmJob(cluster, str(PROGRAM), world, folder)


@contextlib.contextmanager
def _under_ray(_: str, folder: Path, world: int) -> Iterator[TrainingJob]:
    with ray_nodes(1) as cluster:
        command = [sys.executable, "-c", TRAINS_WITH_RAY, str(folder)]
        with _logged(cluster.hosts[0], command, {**cluster.environ, "PYTHONPATH": ""}, folder):
            yield _RayJob(cluster, "ray::RayTrainWorker", world, folder)


@contextlib.contextmanager
def _logged(host: LabHost, command: Sequence[str], environ: dict[str, str], folder: Path) -> Iterator[None]:
    with (folder / "log").open("wb") as log:
        host.start(command, env=environ, stdout=log, stderr=log)
        yield


_AS_ALICE = {"RUN_AS": str(ALICE)}
_CLOSED = {**_AS_ALICE, "NOT_DUMPABLE": "1"}
Place = Callable[[str, Path, int], AbstractContextManager[TrainingJob]]
PLACES: dict[str, Place] = {
    "own PID namespaces": functools.partial(running, own_hosts=True),
    "hosts over --share": _over_folder,
    "srun --overlap": _under_slurm,
    "Ray Train": _under_ray,
    "another user": functools.partial(_read_by, lambda: run_as(BOB), **_AS_ALICE),
    "PR_SET_DUMPABLE 0": functools.partial(_read_by, lambda: run_as(ALICE), **_CLOSED),
    "no CAP_SYS_PTRACE": functools.partial(_read_by, lambda: _WITHOUT_PTRACE),
    "seccomp filter": functools.partial(_read_by, lambda: FILTERED),
    "seccomp filter, PR_SET_DUMPABLE 0": functools.partial(_read_by, lambda: [*FILTERED, *run_as(ALICE)], **_CLOSED),
}
"""A context with a job that plays a scene, by what tells it from one of the same user and host."""
SHARED = ("srun --overlap", "Ray Train")
"""Places that take longer to start than to attach to: one job is attached to several times."""
