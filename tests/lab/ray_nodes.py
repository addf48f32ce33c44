"""A real Ray cluster over hosts of the lab: the head on the first, a node on each. See ``ray start --help``."""

from __future__ import annotations

import fcntl
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.lab.hosts import Command, LabHost, hosts, together
from tests.lab.needs import CannotPlay, require_tools
from tests.lab.speed import patience

PORT = 6379
READY_WITHIN = patience(60.0)
"""Seconds in which the head is up, and then in which the other nodes are."""
ATTEMPTS = 3
OVERDUE = "The current node timed out during startup"
"""What Ray says where a node was not ready within 30 s, which no option changes: its raylet waits so long for the file
with the port of its agent (WaitForDashboardAgentPorts in raylet/node_manager.cc), whose imports take long on a busy
machine, and Node.__init__ (ray/_private/node.py) as long for the raylet."""
WITHOUT_LOGS = "--include-log-monitor=false"
SPARED = ("--no-monitor", "--include-dashboard=false")
"""Processes of a node, and of the head, that nothing here needs: the fewer start, the sooner the agent is there."""
OBJECT_STORE_BYTES = 80 * 2**20
"""Little more than the least that Ray takes."""


class NotStarted(Exception):
    """``ray start`` failed on a node."""


@dataclass(frozen=True)
class RayCluster:
    """``hosts`` are the nodes; Ray's sessions and logs are in the folder ``ray`` of each."""

    hosts: tuple[LabHost, ...]

    @property
    def environ(self) -> dict[str, str]:
        """What drivers need to find the cluster."""
        # All nodes must name the folder of the session alike; each has one of its own mounted there.
        return {
            "RAY_ADDRESS": f"{self.hosts[0].address}:{PORT}",
            "RAY_TMPDIR": str(self.hosts[0].switch.folder),
            "RAY_USAGE_STATS_ENABLED": "0",
        }

    def run(
        self, argv: Sequence[str | Path], env: Mapping[str, str] | None = None, timeout: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """What ``argv``, a driver on the head, did; see :meth:`LabHost.run`."""
        return self.hosts[0].run(argv, env={**self.environ, **(env or {})}, timeout=timeout)


@contextmanager
def ray_nodes(count: int, *, cpus: int = 2, names: str = "node{}") -> Iterator[RayCluster]:
    """A cluster of ``count`` nodes that offer so many ``cpus`` each. Its processes end with their hosts.

    Raises:
        CannotPlay: a tool or a right is missing, or the machine is too busy for Ray's own deadlines.
    """
    require_tools("ray")
    with hosts(count, names=names) as lab:
        cluster = RayCluster(lab)
        for host in lab:
            host.sh('mkdir -p ray "$1/ray"; mount --bind ray "$1/ray"', str(host.switch.folder))
        _start_cluster(cluster, cpus)
        yield cluster


def start_again(nodes: Sequence[Command]) -> None:
    """Start nodes in place of those that run on their hosts."""

    def clean() -> None:
        for host, *_ in nodes:
            kill_ray(host)

    clean()
    _attempt(lambda: _start(nodes), clean)


def kill_ray(host: LabHost) -> None:
    """End all of Ray on a host at once, as when it loses power."""
    until = time.monotonic() + READY_WITHIN
    while found := host.processes("ray"):
        assert time.monotonic() < until, f"{host.name}: {found} do not end"
        for process in found:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(0.05)


def _start_cluster(cluster: RayCluster, cpus: int) -> None:
    """Start the head, then the others."""
    head, *others = cluster.hosts

    def start() -> None:
        _start([_node(head, cluster, cpus, "--head", f"--port={PORT}", *SPARED)])
        _start([_node(host, cluster, cpus, f"--address={cluster.environ['RAY_ADDRESS']}") for host in others])

    def clean() -> None:
        for host in cluster.hosts:
            kill_ray(host)
            host.sh("rm -rf ray/*")

    _attempt(start, clean)


def _attempt(start: Callable[[], None], clean: Callable[[], None]) -> None:
    """Start up to :data:`ATTEMPTS` times, and clean up in between. One cluster starts at a time on this machine."""
    with Path(tempfile.gettempdir(), "rankdoctor-lab-ray.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for _ in range(ATTEMPTS - 1):
            with suppress(NotStarted):
                start()
                return
            clean()
        try:
            start()
        except NotStarted as why:
            if OVERDUE in str(why):
                raise CannotPlay(f"Ray was not ready within its own 30 s in {ATTEMPTS} attempts") from why
            raise


def _node(host: LabHost, cluster: RayCluster, cpus: int, *options: str) -> Command:
    size = (f"--num-cpus={cpus}", f"--object-store-memory={OBJECT_STORE_BYTES}")
    return host, ["ray", "start", f"--node-ip-address={host.address}", WITHOUT_LOGS, *size, *options], cluster.environ


def _start(nodes: Sequence[Command]) -> None:
    for done in together(nodes, READY_WITHIN):
        if done.returncode != 0:
            raise NotStarted(f"{done.args}\nexit {done.returncode}: {done.stdout}{done.stderr}")
