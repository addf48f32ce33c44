"""A real SLURM over hosts of the lab: the controller on the first, a node on each, one munged for all of them.

The daemons stay in the foreground, so they end with their hosts. Their ports are SLURM's own, in the network of the
lab; the configuration is where it belongs, in each host's own ``/etc/slurm``. See slurm.conf(5), gres.conf(5).
"""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.lab.hosts import LabHost, hosts, together
from tests.lab.needs import require_tools
from tests.lab.running import GONE_WITHIN
from tests.lab.speed import patience

READY_WITHIN = patience(30.0)
"""Seconds in which all nodes are idle after the start."""
TOOLS = ("munged", "sbatch", "scancel", "sinfo", "slurmctld", "slurmd", "squeue", "srun")

_CONFIGURATION = """
ClusterName=lab
SlurmctldHost={first.name}({first.address})
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
SwitchType=switch/none
SchedulerParameters=batch_sched_delay=0
ReturnToService=2
SlurmdTimeout=20
KillWait=2
SlurmdParameters=config_overrides
GresTypes=gpu
PartitionName=lab Nodes=ALL Default=YES MaxTime=01:00:00 State=UP
"""
_INSTALL = 'mkdir -p /etc/slurm; rm -f /etc/slurm/*; cp "$1"/{slurm,gres}.conf /etc/slurm/'


@dataclass(frozen=True)
class SlurmCluster:
    """``hosts`` are the nodes. What is submitted comes from the first of them; ``folder`` has the daemons' logs."""

    hosts: tuple[LabHost, ...]
    folder: Path

    def srun(
        self,
        options: Sequence[str],
        argv: Sequence[str | Path],
        env: Mapping[str, str] | None = None,
        timeout: float = 60,
    ) -> subprocess.CompletedProcess[str]:
        """What ``srun OPTIONS ARGV`` did. After ``timeout`` seconds it is killed with its tasks on all nodes: it then
        has the return code -9, and the nodes that can be reached are free again."""
        [done] = together([(self.hosts[0], ["srun", *options, *argv], env)], timeout)
        if done.returncode == -signal.SIGKILL:
            self._cancel_all()
        return done

    def sbatch(self, script: str, options: Sequence[str] = (), timeout: float = 60) -> str:
        """What the job of the batch script wrote to both its outputs, once it has ended.

        Raises:
            subprocess.TimeoutExpired: it had not ended after ``timeout`` seconds, and is cancelled.
        """
        until = time.monotonic() + patience(timeout)
        submit = ["sbatch", "--parsable", f"--output={self.folder}/%j.out", *options]
        submitted = self.hosts[0].run(submit, input=script, timeout=timeout)
        assert submitted.returncode == 0, submitted.stderr
        job = submitted.stdout.strip()
        output = self.folder / f"{job}.out"
        while not self._has_none(f"--jobs={job}"):
            if time.monotonic() > until:
                self._cancel_all()
                raise subprocess.TimeoutExpired(submit, timeout, _text(output))
            time.sleep(0.1)
        return _text(output)

    def wait_until_idle(self) -> None:
        """Wait until every node is up and free of jobs, also of those that are ending."""
        until = time.monotonic() + READY_WITHIN
        while self._ask("sinfo", "--noheader", "--Node", "--format=%T").stdout.split() != ["idle"] * len(self.hosts):
            assert time.monotonic() < until, f"{self._ask('sinfo', '--long', '--Node').stdout}\n{self._logs()}"
            time.sleep(0.05)

    def _cancel_all(self) -> None:
        until = time.monotonic() + GONE_WITHIN
        self._ask("scancel", "--user=root")
        while not self._has_none() and time.monotonic() < until:
            time.sleep(0.05)

    def _has_none(self, *which: str) -> bool:
        """Whether the controller says, and is not too busy to, that no such job waits, runs or is ending."""
        found = self._ask("squeue", "--noheader", *which)
        return found.returncode == 0 and not found.stdout.strip()

    def _ask(self, *argv: str) -> subprocess.CompletedProcess[str]:
        return self.hosts[0].run(argv)

    def _logs(self) -> str:
        return "".join(f"{log.name}: {log.read_text(errors='replace')[-1000:]}\n" for log in self.folder.glob("*.log"))


@contextmanager
def slurm(count: int, *, cpus: int = 4, gpus: int = 0, names: str = "node{}") -> Iterator[SlurmCluster]:
    """A cluster of ``count`` nodes that believe to have so many ``cpus`` and ``gpus`` each (device files of which
    nothing can be read).

    Raises:
        CannotPlay: a tool or a right is missing.
    """
    require_tools(*TOOLS)
    with hosts(count, names=names) as lab:
        folder = lab[0].switch.folder / "slurm"
        cluster = SlurmCluster(lab, folder)
        _configure(cluster, cpus, gpus)
        _start(cluster)
        cluster.wait_until_idle()
        yield cluster


def _configure(cluster: SlurmCluster, cpus: int, gpus: int) -> None:
    folder = cluster.folder
    (folder / "state").mkdir(parents=True)
    key = folder / "munge.key"
    key.touch(mode=0o400)
    key.write_bytes(os.urandom(128))
    devices = [folder / f"gpu{number}" for number in range(gpus)]
    for device in devices:
        os.mknod(device, 0o600 | stat.S_IFCHR, os.stat("/dev/null").st_rdev)
    nodes = [
        f"NodeName={host.name} NodeAddr={host.address} CPUs={cpus} RealMemory=1000 Gres=gpu:{gpus}\n"
        for host in cluster.hosts
    ]
    first = cluster.hosts[0]
    (folder / "slurm.conf").write_text(_CONFIGURATION.format(first=first, folder=folder) + "".join(nodes))
    (folder / "gres.conf").write_text("".join(f"Name=gpu File={device}\n" for device in devices))


def _start(cluster: SlurmCluster) -> None:
    for host in cluster.hosts:
        host.sh(_INSTALL, str(cluster.folder))
    first = cluster.hosts[0]
    _start_munge(first, cluster.folder)
    _start_daemon(first, ["slurmctld", "-D", "-c"])
    for host in cluster.hosts:
        _start_daemon(host, ["slurmd", "-D", "-N", host.name])


def _start_munge(host: LabHost, folder: Path) -> None:
    """All hosts reach its socket by the shared file system."""
    paths = {"key-file": "key", "socket": "sock", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    options = [f"--{option}={folder}/munge.{suffix}" for option, suffix in paths.items()]
    # --force: the folder lies in /tmp, which all may write to.
    _start_daemon(host, ["munged", "--foreground", "--force", "--num-threads=2", *options])
    until = time.monotonic() + READY_WITHIN
    while not (folder / "munge.sock").exists():
        assert time.monotonic() < until, (folder / "munge.log").read_text()
        time.sleep(0.01)


def _start_daemon(host: LabHost, argv: Sequence[str]) -> None:
    """It keeps a log of its own."""
    host.start(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _text(file: Path) -> str:
    """What is in ``file``; nothing where the job did not come to write it."""
    return file.read_text(errors="replace") if file.exists() else ""
