"""Facts that need a measurement: nobody collects them unless asked."""

from __future__ import annotations

from typing import ClassVar, Literal

import msgspec

from doctor.facts.base import Level, Origin, Section


class Reach(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One attempt to open a TCP connection. ``outcome``: open, refused, silent (no answer), unroutable or unresolved.
    ``peer`` is the other host's name; ``purpose``: ``master`` or ``peer``. Times in seconds."""

    peer: str
    address: str
    port: int
    outcome: Literal["open", "refused", "silent", "unroutable", "unresolved"]
    purpose: Literal["master", "peer"] = "peer"
    seconds: float | None = None
    interface: str | None = None
    source_address: str | None = None


class ReachFacts(Section, frozen=True, kw_only=True):
    """Connections that this rank tried."""

    key: ClassVar[str] = "reach"
    origin: ClassVar[Origin] = "measured"

    attempts: tuple[Reach, ...] = ()


class PathSample(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One host's path to ``peer`` (a host name). ``bandwidth`` bytes per second, ``round_trip`` and look-up times in
    seconds. ``full_size_arrived``: packets as large as the interface's MTU came through unfragmented."""

    peer: str
    address: str | None = None
    bandwidth: float | None = None
    round_trip: float | None = None
    forward_lookup: float | None = None
    reverse_lookup: float | None = None
    full_size_arrived: bool | None = None


class PathFacts(Section, frozen=True, kw_only=True):
    """Measured paths from this host, and what its counters gained while they were measured."""

    key: ClassVar[str] = "paths"
    level: ClassVar[Level] = "host"
    origin: ClassVar[Origin] = "measured"

    samples: tuple[PathSample, ...] = ()
    segments_sent: int | None = None
    segments_retransmitted: int | None = None
    interface_errors: int | None = None
    rdma_errors: int | None = None


class ClockFacts(Section, frozen=True, kw_only=True):
    """This host's clock against a reference host: seconds ahead, and the uncertainty (half a round trip)."""

    key: ClassVar[str] = "clock"
    level: ClassVar[Level] = "host"
    origin: ClassVar[Origin] = "measured"

    reference: str = ""
    offset: float = 0.0
    uncertainty: float = 0.0


class CollectiveResult(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A collective of known values: what came back, and what had to. ``received`` is ``None`` for what is no number:
    JSON has no NaN."""

    operation: str
    backend: str
    expected: float
    received: float | None
    dtype: str = "float32"


class CollectiveFacts(Section, frozen=True, kw_only=True):
    """Collectives that this rank ran on known values."""

    key: ClassVar[str] = "collectives"
    origin: ClassVar[Origin] = "measured"

    results: tuple[CollectiveResult, ...] = ()


class EstimateFacts(Section, frozen=True, kw_only=True):
    """The estimated peak of device memory and of host memory of this rank, bytes."""

    key: ClassVar[str] = "estimate"
    origin: ClassVar[Origin] = "measured"

    device_peak: int | None = None
    host_peak: int | None = None
    largest_batch: int | None = None
