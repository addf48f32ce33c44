"""What a command and the driver that it starts tell each other: an order on the command line, then lines of JSON."""

from __future__ import annotations

import msgspec

from doctor.cluster.gather.probe_schedule import ProbeOptions


class DriverOrder(msgspec.Struct, frozen=True):
    """What the driver is to do. ``close_at``: the monotonic moment after which no node is waited for; it is one clock
    for all processes of a host (CLOCK_MONOTONIC). ``timeout``: the seconds that a gathering may take. ``directories``:
    pairs of role and path. ``wanted``: what is to be measured. ``discreet``: no names in what is told."""

    address: str
    close_at: float
    timeout: float
    wanted: ProbeOptions | None = None
    directories: tuple[tuple[str, str], ...] = ()
    discreet: bool = False


class StatusLine(msgspec.Struct, frozen=True, tag="told"):
    """A line for the user."""

    line: str


class ClusterLost(msgspec.Struct, frozen=True, tag="lost"):
    """The cluster could not be had, or was lost; ``why`` is a sentence."""

    why: str


class CollectedJob(msgspec.Struct, frozen=True, tag="brought"):
    """The job, as a capture."""

    capture: msgspec.Raw


DriverMessage = StatusLine | ClusterLost | CollectedJob
