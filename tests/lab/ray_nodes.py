"""A real Ray cluster over hosts of the lab: the head on the first, a node on each. See ``ray start --help``."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.lab.hosts import Command, LabHost, hosts, together
from tests.lab.needs import require_tools
from tests.lab.speed import patience

PORT = 6379
READY_WITHIN = patience(60.0)
"""Seconds in which the head is up, and then in which the other nodes are."""
ATTEMPTS = 3
"""``ray start`` fails where its node is not registered after its first question that took more than 30 s (Node.__init__
in ray/_private/node.py): on a busy machine that happens now and then."""
ONE_AT_A_TIME = pytest.mark.xdist_group("ray")
"""For tests that start Ray: a node is about a dozen processes, and of two clusters that start at once on two processors
neither may be ready in time."""
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
            # How long that first question waits for the node to register; Ray's message on a timeout names it.
            "RAY_raylet_start_wait_time_s": str(round(READY_WITHIN)),
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
        CannotPlay: a tool or a right is missing.
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
        _start([_node(head, cluster, cpus, "--head", f"--port={PORT}", "--include-dashboard=false")])
        _start([_node(host, cluster, cpus, f"--address={cluster.environ['RAY_ADDRESS']}") for host in others])

    def clean() -> None:
        for host in cluster.hosts:
            kill_ray(host)
            host.sh("rm -rf ray/*")

    _attempt(start, clean)


def _attempt(start: Callable[[], None], clean: Callable[[], None]) -> None:
    """Start up to :data:`ATTEMPTS` times, and clean up in between."""
    for _ in range(ATTEMPTS - 1):
        with suppress(NotStarted):
            start()
            return
        clean()
    start()


def _node(host: LabHost, cluster: RayCluster, cpus: int, *options: str) -> Command:
    size = (f"--num-cpus={cpus}", f"--object-store-memory={OBJECT_STORE_BYTES}")
    return host, ["ray", "start", f"--node-ip-address={host.address}", *size, *options], cluster.environ


def _start(nodes: Sequence[Command]) -> None:
    for done in together(nodes, READY_WITHIN):
        if done.returncode != 0:
            raise NotStarted(f"{done.args}\nexit {done.returncode}: {done.stdout}{done.stderr}")
