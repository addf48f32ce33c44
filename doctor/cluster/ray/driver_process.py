"""Driver of a Ray cluster, in a process of its own: Ray's C++ code prints, blocks and exits.

It coordinates the gather, whose ranks are the nodes, and returns the job. It is not a rank itself.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import sys
from collections.abc import Callable
from typing import BinaryIO

import msgspec

from doctor.cluster.gather.coordinator import Coordinator, MemberRegistry
from doctor.cluster.gather.probe_schedule import ProbeSchedule, probe_schedule
from doctor.cluster.ray.cluster_address import RayUnreachable
from doctor.cluster.ray.driver_protocol import ClusterLost, CollectedJob, DriverMessage, DriverOrder, StatusLine
from doctor.cluster.ray.ray_cluster import RayCluster, RayNode
from doctor.cluster.rendezvous.process_identity import ProcessIdentity
from doctor.cluster.transport.ray_store import RayStoreBackend, new_run
from doctor.cluster.transport.secret_file import VARIABLE, secret_from_environ
from doctor.cluster.transport.signing import RejectedMessages, SignedBackend
from doctor.cluster.transport.store import KeyValueStore, StoreLost, first_line
from doctor.collectors.base import Machine
from doctor.core.capture import to_document
from doctor.core.clock import monotonic
from doctor.core.decoding import prepared
from doctor.core.text import ranks_in_words

LOOK_EVERY = 0.25
"""Seconds between two polls for finished tasks."""


def main(order: str) -> None:
    """Execute the ``order`` and exit, whatever threads Ray has left."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    driver = RayDriver(msgspec.json.decode(order, type=prepared(DriverOrder)), _take_standard_output())
    try:
        driver.drive()
    finally:
        driver.report_error(sys.exc_info()[1])
        os._exit(0)


def _take_standard_output() -> BinaryIO:
    """Return standard output for this module alone; other output of the process is discarded."""
    output = os.fdopen(os.dup(1), "wb")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(nowhere, descriptor)
    return output


class RayDriver:
    """Driver of one gather of a cluster; messages go to ``output``."""

    def __init__(self, order: DriverOrder, output: BinaryIO) -> None:
        self._order = order
        self._output = output

    def drive(self) -> None:
        """Gather the cluster and return the job or the reason for its absence; then leave."""
        cluster = RayCluster()
        try:
            cluster.enter(self._order.address, self._order.close_at)
            self._coordinate(cluster)
        except (RayUnreachable, StoreLost) as lost:
            self._send(ClusterLost("the Ray cluster is unreachable" if self._order.discreet else str(lost)))
        finally:
            cluster.leave()

    def report_error(self, error: BaseException | None) -> None:
        """Report an exception that is a fault rather than a requested exit."""
        if isinstance(error, Exception):
            with contextlib.suppress(BrokenPipeError):
                self._send(ClusterLost(f"the Ray driver failed: {type(error).__name__}: {first_line(error)}"))

    def _coordinate(self, cluster: RayCluster) -> None:
        nodes, run, write_line = cluster.nodes(), new_run(), self._write_line
        if lost := cluster.lost():
            names = "" if self._order.discreet else f" ({', '.join(node.text for node in lost[:4])})"
            count = f"{len(lost)} node{'s' * (len(lost) > 1)}"
            write_line(f"Ray lost {count}{names} earlier and has not replaced it; not checked")
        identity = ProcessIdentity(len(nodes), len(nodes), run)  # one beyond the last rank: the driver is not a rank
        secret, rejected = secret_from_environ(os.environ), RejectedMessages()
        store = KeyValueStore(SignedBackend(RayStoreBackend(run), run, secret, rejected))
        ended = EndedNodes(cluster, nodes, write_line, discreet=self._order.discreet)
        try:
            schedule = self._schedule(identity)

            coordinator = Coordinator(
                store,
                identity,
                secrets.token_hex(8),
                close_at=self._order.close_at,
                write_line=write_line,
                registry=MemberRegistry([node.host for node in nodes], ended.numbers),
                overtime=schedule.overtime if schedule else 0.0,
                rejected=rejected,
            )
            coordinator.open()
            # The key is not sent: nodes read the same path. Older releases accept only the arguments they need.
            key = os.environ[VARIABLE] if secret else ""
            more = (key, *self._order.remote) if self._order.remote[0] else (key,) if key else ()
            cluster.start(nodes, run, self._order.timeout, self._order.wanted, self._order.directories, *more)
            job = coordinator.gather(None, schedule)
            if rejected.warning:
                write_line(rejected.warning)
            if not job.ranks:
                raise RayUnreachable("no node of the cluster responded")
            self._send(CollectedJob(msgspec.Raw(msgspec.json.encode(to_document(job)))))
            coordinator.announce(0)
            coordinator.dismiss()
        finally:
            store.close()

    def _schedule(self, identity: ProcessIdentity) -> ProbeSchedule | None:
        if self._order.wanted is None:
            return None
        return probe_schedule(
            self._order.wanted,
            identity.number,
            self._order.timeout,
            Machine(),
            leads_host=False,
            write_line=self._write_line,
        )

    def _write_line(self, line: str) -> None:
        self._send(StatusLine(line))

    def _send(self, message: DriverMessage) -> None:
        self._output.write(msgspec.json.encode(message) + b"\n")
        self._output.flush()


class EndedNodes:
    """The ``nodes`` of a ``cluster`` whose task has ended.

    ``write_line`` gets one line for each of them; ``discreet``: without its name and the reason.
    """

    def __init__(
        self, cluster: RayCluster, nodes: list[RayNode], write_line: Callable[[str], None], *, discreet: bool
    ) -> None:
        self._cluster = cluster
        self._nodes = nodes
        self._write_line = write_line
        self._discreet = discreet
        self._gone: set[int] = set()
        self._look_at = 0.0

    def numbers(self) -> set[int]:
        """Return their ranks; Ray is asked at most once in :data:`LOOK_EVERY` seconds."""
        if monotonic() >= self._look_at:
            self._look_at = monotonic() + LOOK_EVERY
            for number, why in self._cluster.ended().items():
                self._gone.add(number)
                where = "" if self._discreet else f" on {self._nodes[number].text}"
                self._write_line(f"{ranks_in_words((number,))}{where}: {'does not join' if self._discreet else why}")
        return self._gone
