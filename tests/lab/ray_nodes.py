"""A real Ray cluster over hosts of the lab: the head on the first, a node on each. See ``ray start --help``."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.lab.hosts import Command, LabHost, hosts, together
from tests.lab.needs import require_tools
from tests.lab.speed import patience

PORT = 6379
READY_WITHIN = patience(60.0)
"""Seconds in which the head is up, and then in which the other nodes are."""
OBJECT_STORE_BYTES = 80 * 2**20
"""Little more than the least that Ray takes."""


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
        CannotPlay: a tool or a right is missing.
    """
    require_tools("ray")
    with hosts(count, names=names) as lab:
        cluster = RayCluster(lab)
        for host in lab:
            host.sh('mkdir -p ray "$1/ray"; mount --bind ray "$1/ray"', str(host.switch.folder))
        head, *others = lab
        _start([_node(head, cluster, cpus, "--head", f"--port={PORT}", "--include-dashboard=false")])
        _start([_node(host, cluster, cpus, f"--address={cluster.environ['RAY_ADDRESS']}") for host in others])
        yield cluster


def _node(host: LabHost, cluster: RayCluster, cpus: int, *options: str) -> Command:
    size = (f"--num-cpus={cpus}", f"--object-store-memory={OBJECT_STORE_BYTES}")
    return host, ["ray", "start", f"--node-ip-address={host.address}", *size, *options], cluster.environ


def _start(nodes: Sequence[Command]) -> None:
    for done in together(nodes, READY_WITHIN):
        assert done.returncode == 0, f"{done.args}\nexit {done.returncode}: {done.stdout}{done.stderr}"
