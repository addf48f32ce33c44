"""Trials on one path: smaller packets, other interfaces, another family. All sockets have deadlines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median

import msgspec

from doctor.analysis.fabric.packet_loss import LEAST_SEGMENTS
from doctor.analysis.trial_selection import AGAIN, Subject
from doctor.core.clock import time
from doctor.core.facts import Transfer, Trial
from doctor.probes.ablation.alternative_paths import AlternativePath
from doctor.probes.ablation.trials import (
    OFFLOADS,
    ROUNDS,
    USUAL_SHARE,
    PacketOrder,
    ReachOrder,
    SpeedOrder,
    is_improvement,
    not_tried,
)
from doctor.probes.bandwidth.transfer_plan import ROUND_SECONDS
from doctor.probes.bandwidth.transfer_worker import TransferWorker
from doctor.probes.reachability.connection_plan import PACKETS, SMALLEST_BURST
from doctor.probes.reachability.path_probe import BURST_SECONDS, GREETING_SECONDS, SMALL_BURST_SECONDS, PathProbe
from doctor.probes.responder.backlog import ConnectionBacklog
from doctor.probes.responder.wire_format import LARGEST, SEGMENT
from doctor.probes.runtime.deadline import ProbeDeadline
from doctor.probes.runtime.tcp_connect import TRIES, TRY_SECONDS
from doctor.probes.runtime.thread_pool import start_side_by_side, wait_for

SIZES_AT_ONCE = 12
"""Sizes of packets that are tried concurrently: three rounds find one of 2,000, four one of 28,000."""

MOST_SEARCHES = 5
"""Rounds that find one of 65,520, the largest MTU in use (InfiniBand in connected mode)."""

LARGEST_SEGMENT = 32767
"""Maximum of TCP_MAXSEG in Linux (MAX_TCP_WINDOW)."""

CONNECT_SECONDS = 1.5
"""In addition to the burst, because the connection has to open: it did a moment ago."""

SPEED_SECONDS = ROUND_SECONDS + 1.0
"""For one path in one round: both hosts receive their orders at about the same time."""

PACKET_SECONDS = MOST_SEARCHES * (SMALL_BURST_SECONDS + CONNECT_SECONDS) + ROUNDS * (BURST_SECONDS + CONNECT_SECONDS)
REACH_SECONDS = ROUNDS * (TRIES * TRY_SECONDS + GREETING_SECONDS)


def most_packet_bytes(order: PacketOrder) -> int:
    """Return the bytes of all bursts of an order, at most."""
    return burst_of(order.largest) * (MOST_SEARCHES * SIZES_AT_ONCE + 1 + ROUNDS * (2 + len(order.peer.others)))


def burst_of(largest: int) -> int:
    """Return the bytes that fill several packets of that size."""
    return min(LARGEST, max(SMALLEST_BURST, PACKETS * largest))


def try_packets(order: PacketOrder, deadline: ProbeDeadline) -> tuple[Trial, ...]:
    """Find the largest packets that arrive, then try these, full-size ones on other paths, and the unchanged case.

    The last three run concurrently.
    """
    peer, bursts = order.peer, _Bursts(order, deadline)
    size = bursts.largest()
    ways = [partial(bursts.value, peer.way, None), partial(bursts.value, peer.way, size)]
    before, *changed = _rounds([*ways, *(partial(bursts.value, way, None) for way in peer.others)], deadline)
    smaller = AlternativePath(
        f"smaller packets ({order.largest} bytes are lost)", order.setting.replace("{}", str(size)), peer.way.address
    )
    return tuple(_trials("packet", peer.name, (smaller, *peer.others), before, changed, "bytes"))


def try_connections(order: ReachOrder, deadline: ProbeDeadline) -> tuple[Trial, ...]:
    """Connect by every path at the same time, the closed one among them."""
    peer, probe = order.peer, PathProbe(deadline, time)

    def opens(way: AlternativePath) -> float | None:
        return 1.0 if probe.reach(way.address, peer.port, peer.word, way.source).outcome == "open" else None

    before, *changed = _rounds([partial(opens, way) for way in (peer.way, *peer.others)], deadline)
    return tuple(_trials("path", peer.name, peer.others, before, changed, "open"))


def try_speeds(order: SpeedOrder, backlog: ConnectionBacklog, deadline: ProbeDeadline) -> tuple[Trial, ...]:
    """Send to the other host by each path in turn, the slow one first, and all of them again.

    Concurrent transfers would slow each other down. The other host records no trials.
    """
    sent = TransferWorker(order.itinerary, backlog, deadline).run()
    if not order.knobs:
        return ()
    return speed_trials(order, sent)


def speed_trials(order: SpeedOrder, sent: Sequence[Transfer]) -> tuple[Trial, ...]:
    """Return the trials of the transfers of all rounds, path by path as in the schedule."""
    every = [(whole(sample) if order.lossy else sample.bandwidth) or None for sample in sent]
    before, *changed = (every[place :: len(order.knobs) + 1] for place in range(len(order.knobs) + 1))
    peer, unit = order.itinerary.meetings[0].peer, "segments" if order.lossy else "B/s"
    return tuple(_trials("path", peer, order.knobs, before, changed, unit, order.usual))


def whole(sample: Transfer) -> float | None:
    """Return the segments per retransmitted one, all of them if there is none; ``None`` if hardly any were sent."""
    sent = sample.segments_sent or 0
    return sent / max(1, sample.segments_retransmitted or 0) if sent >= LEAST_SEGMENTS else None


class _Bursts:
    """Bursts to one peer, each on a connection of its own."""

    def __init__(self, order: PacketOrder, deadline: ProbeDeadline) -> None:
        self._order = order
        self._deadline = deadline
        self._probe = PathProbe(deadline, time)
        self._burst = burst_of(order.largest)

    def value(self, way: AlternativePath, size: int | None) -> float | None:
        """Return the bytes of the packets, if packets of ``size`` (``None``: full size) arrive by ``way``."""
        peer, segment = self._order.peer, None if size is None else size - headers_of(way.address)
        arrived = self._probe.arrives(way.address, peer.port, peer.word, self._burst, segment, way.source)
        return float(size or way.mtu or self._order.largest) if arrived else None

    def largest(self) -> int:
        """Return the bytes of the largest packets that arrive; the smallest size if none do."""
        way = self._order.peer.way
        headers = headers_of(way.address)
        passes, fails = SEGMENT + headers, min(self._order.largest, LARGEST_SEGMENT + headers)
        if self.value(way, passes) is None:
            return passes
        while fails - passes > 1 and self._deadline.left() > SMALL_BURST_SECONDS:
            sizes = sizes_between(passes, fails)
            arrived = _side_by_side([partial(self.value, way, size) for size in sizes], self._deadline)
            # Of those that arrive the largest: one below it was late, and not too large.
            best = max((place for place, value in enumerate(arrived) if value is not None), default=-1)
            fails = sizes[best + 1] if best + 1 < len(sizes) else fails
            passes = sizes[best] if best >= 0 else passes
        return passes


def sizes_between(passes: int, fails: int) -> tuple[int, ...]:
    """Return sizes to try next, evenly between one that passes and one that does not; at most :data:`SIZES_AT_ONCE`."""
    parts = min(SIZES_AT_ONCE, fails - passes - 1) + 1
    return tuple(passes + (fails - passes) * step // parts for step in range(1, parts))


def headers_of(address: str) -> int:
    """Return the bytes of IP and TCP headers for that address, without options; those count as data (RFC 6691)."""
    return 60 if ":" in address else 40


_Values = list[float | None]
"""Values of one path, one per round; ``None`` if it failed."""


def _rounds(ways: Sequence[Callable[[], float | None]], deadline: ProbeDeadline) -> list[_Values]:
    """Return the values of each path in each round; those of one round run concurrently."""
    rounds = [_side_by_side(ways, deadline) for _ in range(ROUNDS)]
    return [list(values) for values in zip(*rounds, strict=True)]


def _side_by_side(tasks: Sequence[Callable[[], float | None]], deadline: ProbeDeadline) -> _Values:
    found: _Values = [None] * len(tasks)

    def work(place: int) -> None:
        found[place] = tasks[place]()

    works = [partial(work, place) for place in range(len(tasks))]
    wait_for(start_side_by_side(works, len(works), deadline), deadline)
    return found


def _trials(
    subject: Subject,
    peer: str,
    knobs: Sequence[AlternativePath],
    before: _Values,
    changed: Sequence[_Values],
    unit: str,
    usual: float | None = None,
) -> Iterator[Trial]:
    """Yield a trial for each of ``knobs``, from the values of all rounds.

    If the unchanged case succeeds, that is the only trial: the fault is intermittent.
    """
    if any(value is not None and value >= USUAL_SHARE * (usual or 0.0) for value in before):
        yield _trial(subject, peer, AlternativePath(AGAIN, "", ""), [], before, unit)
        return
    mended = False
    for way, after in zip(knobs, changed, strict=True):
        trial = _trial(subject, peer, way, before, after, unit)
        restores = is_improvement(before, after, usual)
        error = trial.error
        if error is None and usual is not None and not restores:
            lossy, slow = f"at most {100 / (USUAL_SHARE * usual):.2g} % are healthy", f"usual is {usual / 1e6:.3g} MB/s"
            error = lossy if unit == "segments" else slow
        mended = mended or restores
        yield msgspec.structs.replace(trial, restores=restores, error=error)
    if not mended and unit != "open":
        yield not_tried(subject, OFFLOADS, peer)


def _trial(subject: Subject, peer: str, way: AlternativePath, before: _Values, after: _Values, unit: str) -> Trial:
    """Return the medians of the successful values with and without a change."""
    was, came = ([value for value in values if value is not None] for values in (before, after))
    return Trial(
        subject,
        way.knob,
        way.setting,
        restores=False,
        peer=peer,
        before=median(was) if was else None,
        after=median(came) if came else None,
        unit=unit,
        error=f"{len(came)} of {len(after)} times" if 0 < len(came) < len(after) else None,
    )
