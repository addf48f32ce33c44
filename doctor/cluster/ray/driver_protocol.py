"""Messages between a command and its driver: an order as argument, then lines of JSON."""

from __future__ import annotations

import msgspec

from doctor.cluster.gather.probe_schedule import ProbeOptions


class DriverOrder(msgspec.Struct, frozen=True):
    """Order for the driver.

    ``close_at``: the monotonic time at which the gather stops waiting for nodes, valid in all processes of a host
    (CLOCK_MONOTONIC). ``timeout``: the seconds that a gather may take. ``directories``: pairs of role and path.
    ``wanted``: the probes to run. ``discreet``: omit names from messages. ``remote``: what the nodes collect, see
    :class:`doctor.cluster.gather.participant.HostCollector`.
    """

    address: str
    close_at: float
    timeout: float
    wanted: ProbeOptions | None = None
    directories: tuple[tuple[str, str], ...] = ()
    discreet: bool = False
    remote: tuple[str, str] = ("", "")


class StatusLine(msgspec.Struct, frozen=True, tag="told"):
    """A line for the user."""

    line: str


class ClusterLost(msgspec.Struct, frozen=True, tag="lost"):
    """The cluster could not be reached, or was lost; ``why`` is a sentence."""

    why: str


class CollectedJob(msgspec.Struct, frozen=True, tag="brought"):
    """The job, as a capture."""

    capture: msgspec.Raw


DriverMessage = StatusLine | ClusterLost | CollectedJob
