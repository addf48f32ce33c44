"""Facts that require a measurement; they are collected only on request."""

from __future__ import annotations

from typing import ClassVar, Literal

import msgspec

from doctor.core.facts.section import Level, Origin, Section

ReachOutcome = Literal["open", "refused", "silent", "unroutable", "unresolved", "stranger", "unanswered"]


class Reach(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One attempt to open a TCP connection.

    ``outcome``: open, refused, silent (no answer), unroutable, unresolved, stranger (another program than the peer
    owns that address) or unanswered (the peer's kernel accepted the connection, but its program did not respond in
    time). ``peer`` is the other host's name; ``purpose``: ``master`` or ``peer``; ``library``: NCCL or Gloo if that
    one would connect to this address. Times in seconds.
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
    """Connections that this rank attempted."""

    key: ClassVar[str] = "reach"
    origin: ClassVar[Origin] = "measured"

    attempts: tuple[Reach, ...] = ()


class PathSample(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One host's path to ``peer`` (a host name). ``round_trip`` and lookup times in seconds.

    ``full_size_arrived``: packets of the full TCP segment size reached the peer on this path; ``False`` if only
    smaller ones did. A lookup without an answer has the seconds until its timeout, and an error; ``reverse_address``
    is the address that was looked up if it is not ``address``.
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
    """Measured paths from this host, and the increase of its counters during the measurement: of segments, those of
    the measuring connections if only these were counted; of errors, those of the interfaces in use."""

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
    """A bandwidth measurement: bytes sent from this host to ``peer`` (a host name) over TCP for a short time.

    ``outcome``: done; unreached (no connection); late (the peer was not ready in time); cut (the connection ended).
    ``bandwidth``: bytes per second at the receiver, 0 if none arrived; ``None`` if it is unknown. ``round``: pairs of
    one round ran at the same time, ``pairs`` of them. ``confirms``: run to confirm a suspicion. ``round_trip``:
    seconds, under load, so including queues. ``waited``: the share of the time, 0 to 1, for which the sender or the
    receiver, whichever is longer, waited for a CPU.
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
    """Bandwidth measurements from this host."""

    key: ClassVar[str] = "transfers"
    level: ClassVar[Level] = "host"
    origin: ClassVar[Origin] = "measured"

    samples: tuple[Transfer, ...] = ()


class CollectiveResult(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A collective of known values: the result and the expected result. ``received`` is ``None`` if it is not finite:
    JSON has no NaN. ``axis``: the mesh axis of the group; ``members``: the ranks that took part, empty for all."""

    operation: str
    backend: str
    expected: float
    received: float | None
    dtype: str = "float32"
    axis: str = "world"
    members: tuple[int, ...] = ()


class CollectiveTiming(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """The duration of a collective of ``bytes`` (of one rank's input): the median of ``repeats``, in seconds; ``None``
    if it failed. ``error`` describes the failure, and ``awaited`` lists the ranks that this one waited for or lost, as
    far as they are known. ``members`` and ``axis`` as in :class:`CollectiveResult`."""

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
    """A message of ``bytes`` that this rank received from the rank ``source`` over the job's backend, in ``seconds``.
    Pairs of one ``round`` exchanged theirs at about the same time. ``waited``: the share of the time, 0 to 1, for
    which one of the two waited for a CPU. ``round_trip``: seconds, of two of the smallest messages."""

    source: int
    bytes: int
    seconds: float
    round: int = 0
    waited: float = 0.0
    round_trip: float | None = None


class CollectiveFacts(Section, frozen=True, kw_only=True):
    """Collectives of known values that this rank ran, the duration of others, and messages from single ranks.
    ``error``: why the process group could not be set up; ``awaited``: the ranks that did not join it;
    ``exchange_error``: why messages of pairs are missing or incomplete."""

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

    ``seconds``: per product, by wall-clock time on a CPU (the median window or all of them, whichever is less) and by
    the device clock on a GPU (the fastest window); ``repeats``: total number of products. ``processor_share``: CPU
    time over wall-clock time while a CPU computed, 1.0 without contention. ``to_device`` and ``to_host``: bytes per
    second from and to pinned memory. ``context``: bytes that the measuring process held of a GPU outside of torch's
    allocator, after products and copies. ``pinned_to``: the CPUs that this rank may use, if these are not all.
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
    context: int | None = None
    pinned_to: tuple[int, ...] = ()
    confirms: bool = False
    error: str | None = None


class DeviceSpeedFacts(Section, frozen=True, kw_only=True):
    """Compute and copy speed of this rank's device. Several samples if a suspicion was confirmed."""

    key: ClassVar[str] = "device_speed"
    origin: ClassVar[Origin] = "measured"

    samples: tuple[DeviceSpeed, ...] = ()


class StorageTrial(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A file of ``bytes`` that this host wrote to a directory: seconds to write it and to flush it to disk (fsync).
    ``error``: the error of the system call; the rest is unknown then. ``role``: as in ``StorageFacts``."""

    path: str
    role: str
    bytes: int = 0
    write_seconds: float | None = None
    sync_seconds: float | None = None
    error: str | None = None


class StorageReading(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """How this host read the file that the host ``writer`` created in a directory: complete, with other bytes (or an
    ``error`` of the system call), not found, or not in time."""

    path: str
    writer: str
    outcome: Literal["whole", "other", "absent", "silent"]
    seconds: float | None = None
    error: str | None = None


class StorageSpeedFacts(Section, frozen=True, kw_only=True):
    """Files that this host wrote to the directories of the job, and files of other hosts that it read there."""

    key: ClassVar[str] = "storage_speed"
    level: ClassVar[Level] = "host"
    origin: ClassVar[Origin] = "measured"

    trials: tuple[StorageTrial, ...] = ()
    readings: tuple[StorageReading, ...] = ()


class Trial(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A measurement that had failed or was slow, repeated with one change.

    ``subject``: path, packet (large packets on a path), collective or device; ``peer``: the other host of a path.
    ``knob``: a description of the change; ``setting``: the command or variable that makes it permanent. ``before`` and
    ``after``: the value without and with the change, in ``unit``; ``None`` if it failed. ``restores``: whether the
    change fixes it.
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
    """Experiments that show why something is slow or fails."""

    key: ClassVar[str] = "trials"
    origin: ClassVar[Origin] = "measured"

    trials: tuple[Trial, ...] = ()


class EstimateFacts(Section, frozen=True, kw_only=True):
    """The estimated peaks of this rank's device memory and host memory, in bytes. ``batch_size``: samples of a
    micro-batch of one rank, for which the estimate was made; ``largest_batch``: those that fit."""

    key: ClassVar[str] = "estimate"
    origin: ClassVar[Origin] = "measured"

    device_peak: int | None = None
    host_peak: int | None = None
    batch_size: int | None = None
    largest_batch: int | None = None
