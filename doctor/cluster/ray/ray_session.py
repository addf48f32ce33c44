"""Gather of a Ray cluster, as the command sees it: starts a driver, which returns the job."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from types import TracebackType

import msgspec

from doctor.cluster.gather.dismissal import Dismissed
from doctor.cluster.gather.gather_session import INCONCLUSIVE
from doctor.cluster.gather.plan import NoRendezvous
from doctor.cluster.gather.probe_schedule import ProbeOptions
from doctor.cluster.ray.driver_protocol import ClusterLost, CollectedJob, DriverMessage, DriverOrder, StatusLine
from doctor.core.capture import parse_capture
from doctor.core.clock import monotonic
from doctor.core.decoding import prepared
from doctor.core.job import Job
from doctor.core.process import abandon_child, start_python

OVERTIME = 10.0
"""Seconds that a driver may take beyond the gather: to start, to connect late, to return the job."""
LEAVING = 8.0
"""Seconds for a driver that has returned the job to release the nodes and leave the cluster."""


class RayGatherSession:
    """Gather of all nodes of a cluster, which starts at once.

    Used like :class:`doctor.cluster.gather.gather_session.GatherSession`. ``timeout``: seconds within which the cluster
    accepts a driver and all nodes answer. ``directories``: pairs of role and path that every node also inspects.
    ``write_line`` gets lines for stderr; ``discreet``: without names and addresses. ``remote``: what the nodes collect,
    see :class:`doctor.cluster.gather.participant.HostCollector`. Raises
    :class:`doctor.cluster.gather.plan.NoRendezvous` if no process can be started.
    """

    judges = True

    def __init__(
        self,
        address: str,
        *,
        probe_options: ProbeOptions | None,
        timeout: float,
        directories: tuple[tuple[str, str], ...],
        write_line: Callable[[str], None],
        discreet: bool = False,
        remote: tuple[str, str] = ("", ""),
    ) -> None:
        self._write_line = write_line
        self._until = monotonic() + timeout + OVERTIME
        order = DriverOrder(address, monotonic() + timeout, timeout, probe_options, directories, discreet, remote)
        arguments = [msgspec.json.encode(order).decode()]
        # Otherwise a late call after Ray was left would start a cluster (ray/_private/auto_init_hook.py).
        environ = {**os.environ, "RAY_ENABLE_AUTO_CONNECT": "0"}
        try:
            # All workers of a Ray job import from the directory of its driver: this one has no modules.
            self._driver = start_python("doctor.cluster.ray.driver_process", arguments, cwd="/", env=environ)
        except OSError as error:
            raise NoRendezvous(f"cannot start a Ray driver: {error.strerror or error}") from None

    def __enter__(self) -> RayGatherSession:
        """Return the session; the driver is already running."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for the driver to leave the cluster, up to a timeout."""
        if error is not None:
            self._driver.send_signal(signal.SIGTERM)
        try:
            self._driver.wait(LEAVING)
        except subprocess.TimeoutExpired:
            abandon_child(self._driver)

    def announce(self, code: int) -> None:
        """Do nothing: no node exits with a code."""

    def gather(self) -> Job:
        """Return the job whose ranks are the nodes. Raises :class:`Dismissed` if the cluster cannot be reached."""
        for message in self._messages():
            if isinstance(message, CollectedJob):
                return parse_capture(bytes(message.capture), "the job of the cluster", masked=True).job()
            if isinstance(message, ClusterLost):
                self._write_line(message.why)
                raise Dismissed(INCONCLUSIVE)
            self._write_line(message.line)
        code = self._driver.wait()
        end = f"was ended by signal {-code}" if code < 0 else "ended"
        self._write_line(f"Ray's driver {end} before it delivered the job")
        raise Dismissed(INCONCLUSIVE)

    def _messages(self) -> Iterator[DriverMessage]:
        """Yield the driver's messages until it ends or is killed."""
        assert self._driver.stdout is not None
        late = threading.Timer(self._until - monotonic(), self._driver.kill)
        late.daemon = True
        late.start()
        try:
            for line in self._driver.stdout:
                yield msgspec.json.decode(line, type=prepared(StatusLine | ClusterLost | CollectedJob))
        finally:
            late.cancel()
