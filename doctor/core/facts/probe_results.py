"""Facts that need a measurement: nobody collects them unless asked."""

from __future__ import annotations

from typing import ClassVar, Literal

import msgspec

from doctor.core.facts.section import Level, Origin, Section

ReachOutcome = Literal["open", "refused", "silent", "unroutable", "unresolved", "stranger", "unanswered"]


class Reach(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One attempt to open a TCP connection.

    ``outcome``: open, refused, silent (no answer), unroutable, unresolved, stranger (somebody else than the peer holds
    that address) or unanswered (the peer's kernel took the connection, its program said nothing in time).
    ``peer`` is the other host's name; ``purpose``: ``master`` or ``peer``; ``library``: NCCL or Gloo where that one
    would dial this address. Times in seconds.
    """

    peer: str
    address: str
    port: int
    outcome: ReachOutcome
    purpose: Literal["master", "peer"] = "peer"
    seconds: float | None = None
    interface: str | None = None
    source_address: str | None = None
    library: str | None = None


class ReachFacts(Section, frozen=True, kw_only=True):
    """Connections that this rank tried."""

    key: ClassVar[str] = "reach"
    origin: ClassVar[Origin] = "measured"

    attempts: tuple[Reach, ...] = ()


class PathSample(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One host's path to ``peer`` (a host name). ``round_trip`` and look-up times in seconds.

    ``full_size_arrived``: packets as large as TCP makes them on this way reached the peer; ``False`` where only smaller
    ones did. A look-up that got no answer has the seconds that were waited for it, and an error; ``reverse_address`` is
    the address as it was looked up where that is not ``address``.
    """

    peer: str
    address: str | None = None
    round_trip: float | None = None
    forward_lookup: float | None = None
    reverse_lookup: float | None = None
    full_size_arrived: bool | None = None
    forward_error: str | None = None
    reverse_error: str | None = None
    reverse_address: str | None = None


class PathFacts(Section, frozen=True, kw_only=True):
    """Measured paths from this host, and what its counters gained while they were measured: of the segments, those of
    the measuring connections where only these were counted; of the errors, those of the interfaces in use."""

    key: ClassVar[str] = "paths"
    level: ClassVar[Level] = "host"
    origin: ClassVar[Origin] = "measured"

    samples: tuple[PathSample, ...] = ()
    segments_sent: int | None = None
    segments_retransmitted: int | None = None
    interface_errors: int | None = None
    rdma_errors: int | None = None


class ClockFacts(Section, frozen=True, kw_only=True):
    """This host's clock against the host called ``reference``: seconds ahead, and the uncertainty (half a round trip).

    In a large job the reference has a reference of its own; a host without one names itself."""

    key: ClassVar[str] = "clock"
    level: ClassVar[Level] = "host"
    origin: ClassVar[Origin] = "measured"

    reference: str = ""
    offset: float = 0.0
    uncertainty: float = 0.0


TransferOutcome = Literal["done", "unreached", "late", "cut"]


class Transfer(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """As many bytes as went from this host to ``peer`` (a host name) in a moment, over TCP.

    ``outcome``: done; unreached (no connection); late (the peer was not ready in time); cut (the connection ended).
    ``bandwidth``: bytes a second as the receiver saw them arrive, 0 where none came; ``None`` where nothing was learnt.
    ``round``: pairs of one round ran at the same time, ``pairs`` of them. ``confirms``: done to confirm a suspicion.
    ``round_trip``: while they flowed, seconds: with what stood in queues. ``waited``: the share of the time, 0 to 1,
    for which the sender or the receiver, whichever of them longer, had no processor to run on.
    """

    peer: str
    outcome: TransferOutcome
    bandwidth: float | None = None
    round: int = 0
    pairs: int = 1
    confirms: bool = False
    address: str | None = None
    bytes: int = 0
    seconds: float = 0.0
    segments_sent: int | None = None
    segments_retransmitted: int | None = None
    round_trip: float | None = None
    waited: float = 0.0


class TransferFacts(Section, frozen=True, kw_only=True):
    """What this host sent to others to measure the bandwidth."""

    key: ClassVar[str] = "transfers"
    level: ClassVar[Level] = "host"
    origin: ClassVar[Origin] = "measured"

    samples: tuple[Transfer, ...] = ()


class CollectiveResult(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A collective of known values: what came back, and what had to. ``received`` is ``None`` for what is no number:
    JSON has no NaN. ``axis``: of the mesh along which it ran; ``members``: the ranks that took part, empty for all."""

    operation: str
    backend: str
    expected: float
    received: float | None
    dtype: str = "float32"
    axis: str = "world"
    members: tuple[int, ...] = ()


class CollectiveTiming(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """How long a collective of ``bytes`` (of one rank's input) took: the median of ``repeats``, seconds; ``None`` where
    it did not end well: ``error`` says how, and ``awaited`` which ranks this one waited for or lost, as far as it can
    tell. ``members`` and ``axis`` as in :class:`CollectiveResult`."""

    operation: str
    backend: str
    bytes: int
    seconds: float | None = None
    axis: str = "world"
    members: tuple[int, ...] = ()
    repeats: int = 1
    error: str | None = None
    awaited: tuple[int, ...] = ()


class Exchange(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A message of ``bytes`` that this rank got from the rank ``source`` over the back end of the job, in ``seconds``.
    Pairs of one ``round`` exchanged theirs at about the same time. ``waited``: the share of the time, 0 to 1, for which
    one of the two had no processor to run on. ``round_trip``: seconds, of two of the smallest messages."""

    source: int
    bytes: int
    seconds: float
    round: int = 0
    waited: float = 0.0
    round_trip: float | None = None


class CollectiveFacts(Section, frozen=True, kw_only=True):
    """Collectives that this rank ran on known values, how long others took, and messages from single ranks. ``error``:
    why the group could not be set up at all; ``awaited``: the ranks that did not come to it; ``exchange_error``: why
    there are no messages of pairs, or not all."""

    key: ClassVar[str] = "collectives"
    origin: ClassVar[Origin] = "measured"

    results: tuple[CollectiveResult, ...] = ()
    timings: tuple[CollectiveTiming, ...] = ()
    backend: str | None = None
    device: str | None = None
    error: str | None = None
    awaited: tuple[int, ...] = ()
    exchanges: tuple[Exchange, ...] = ()
    exchange_error: str | None = None


class DeviceSpeed(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Matrix products (``size`` x ``size``, ``dtype``) on one device, and copies between it and the host.

    ``seconds``: of one product, by wall time on a CPU (the median window or all of them, whichever is less) and by its
    own clock on a GPU (the fastest window); ``repeats``: products in all. ``processor_share``: processor time over
    wall time while a CPU computed, 1.0 where nobody else wanted the processor. ``to_device`` and ``to_host``: bytes a
    second from and to pinned memory. ``pinned_to``: the processors that this rank may use, where these are not all.
    """

    device: str
    name: str = ""
    dtype: str = "float32"
    size: int = 0
    seconds: float | None = None
    repeats: int = 0
    processor_share: float | None = None
    to_device: float | None = None
    to_host: float | None = None
    pinned_to: tuple[int, ...] = ()
    confirms: bool = False
    error: str | None = None


class DeviceSpeedFacts(Section, frozen=True, kw_only=True):
    """How fast this rank's device computes and copies. Several samples where a suspicion was confirmed."""

    key: ClassVar[str] = "device_speed"
    origin: ClassVar[Origin] = "measured"

    samples: tuple[DeviceSpeed, ...] = ()


class StorageTrial(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A file of ``bytes`` that this host wrote into a directory: seconds to write it and to have it on the disk
    (fsync). ``error``: what the system said; the rest is unknown then. ``role``: as in ``StorageFacts``."""

    path: str
    role: str
    bytes: int = 0
    write_seconds: float | None = None
    sync_seconds: float | None = None
    error: str | None = None


class StorageReading(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """What this host saw of the file that the host ``writer`` left in a directory: whole, other bytes (or an ``error``
    of the system), no such file, or no answer in time."""

    path: str
    writer: str
    outcome: Literal["whole", "other", "absent", "silent"]
    seconds: float | None = None
    error: str | None = None


class StorageSpeedFacts(Section, frozen=True, kw_only=True):
    """What this host wrote to the directories of the job, and read there of others."""

    key: ClassVar[str] = "storage_speed"
    level: ClassVar[Level] = "host"
    origin: ClassVar[Origin] = "measured"

    trials: tuple[StorageTrial, ...] = ()
    readings: tuple[StorageReading, ...] = ()


class Trial(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A measurement that had failed or was slow, done again with one thing changed.

    ``subject``: path, packet (large packets on a path), collective or device; ``peer``: the other host of a path.
    ``knob``: what was changed, in words; ``setting``: how to change it for good, to be pasted. ``before`` and
    ``after``: the value without and with the change, in ``unit``; ``None`` where it failed. ``restores``: whether the
    change mends it.
    """

    subject: Literal["path", "packet", "collective", "device"]
    knob: str
    setting: str
    restores: bool
    peer: str | None = None
    before: float | None = None
    after: float | None = None
    unit: str = ""
    error: str | None = None


class TrialFacts(Section, frozen=True, kw_only=True):
    """What was tried to find out why something is slow or fails."""

    key: ClassVar[str] = "trials"
    origin: ClassVar[Origin] = "measured"

    trials: tuple[Trial, ...] = ()


class EstimateFacts(Section, frozen=True, kw_only=True):
    """The estimated peak of device memory and of host memory of this rank, bytes."""

    key: ClassVar[str] = "estimate"
    origin: ClassVar[Origin] = "measured"

    device_peak: int | None = None
    host_peak: int | None = None
    largest_batch: int | None = None
