"""Jobs whose hosts measured the bandwidth between them, for the cases of checks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from doctor.core.facts import PathFacts, PathSample, Transfer, TransferFacts
from doctor.testing.cases import JobBuilder, healthy

HostPath = Callable[[int, int, int], bool]
"""Selects transfers, by the numbers of source host, target host and round."""

SEGMENTS = 4000
"""TCP segments of each transfer."""
IDLE_SECONDS = 100e-6


def nowhere(_source: int, _target: int, _turn: int) -> bool:
    """Select no transfer."""
    return False


def touching(host: int) -> HostPath:
    """Select all that ``host`` sends and receives."""
    return lambda source, target, _: host in (source, target)


def sent_by(host: int) -> HostPath:
    """Select all that ``host`` sends."""
    return lambda source, _target, _: source == host


def received_by(host: int) -> HostPath:
    """Select all that ``host`` receives."""
    return lambda _source, target, _: target == host


def between(one: int, other: int) -> HostPath:
    """Select what two hosts send each other."""
    return lambda source, target, _: {source, target} == {one, other}


def across(side: range) -> HostPath:
    """Select what the hosts of ``side`` and all others send each other."""
    return lambda source, target, _: (source in side) != (target in side)


def at_times(path: HostPath) -> HostPath:
    """Select ``path`` in every second round."""
    return lambda source, target, turn: turn % 2 == 0 and path(source, target, turn)


def transferred(
    hosts: int,
    slow: HostPath = nowhere,
    *,
    share: float = 0.01,
    usual: float = 1.2e9,
    lossy: HostPath = nowhere,
    failed: HostPath = nowhere,
    queued: bool = False,
    waited: float = 0.0,
) -> JobBuilder:
    """Return a job of ``hosts`` with one rank each that measured in rounds, and again to confirm slow transfers.

    ``slow`` transfers have ``share`` of the ``usual`` bandwidth, bytes per second; ``lossy`` ones retransmitted a
    twentieth of their packets, with a long queue if ``queued``; both waited for a CPU for the share ``waited`` of the
    time. ``failed`` ones never started.
    """
    # A watched run imports this module with NET015, but builds no case.
    from doctor.analysis.fabric.localization.localizer import BandwidthReading, rounds
    from doctor.analysis.fabric.transfer_matrix import HostBandwidths, rounds_to_confirm, unhindered

    numbers = random.Random(1)  # noqa: S311 - noise, and the same each time
    sent: dict[int, list[Transfer]] = {host: [] for host in range(hosts)}
    readings: list[BandwidthReading] = []

    def measure(source: int, target: int, turn: int, confirms: bool) -> None:
        if failed(source, target, turn):
            sent[source].append(Transfer(f"node{target}", "late", round=turn, confirms=confirms))
            return
        is_slow = slow(source, target, turn)
        value = usual * (share if is_slow else 1.0) * numbers.uniform(0.93, 1.07)
        is_lossy = lossy(source, target, turn)
        sample = Transfer(
            f"node{target}",
            "done",
            value,
            round=turn,
            confirms=confirms,
            segments_sent=SEGMENTS,
            segments_retransmitted=SEGMENTS // 20 if is_lossy else 2,
            round_trip=50e-3 if queued else 200e-6,
            waited=waited if is_slow or is_lossy else 0.0,
        )
        sent[source].append(sample)
        readings.append(BandwidthReading(source, target, unhindered(sample), turn, confirms))

    planned = rounds(hosts)
    for source, target, turn in _host_paths(planned):
        measure(source, target, turn, confirms=False)
    names = tuple(f"node{host}" for host in range(hosts))
    for source, target, turn in _host_paths(rounds_to_confirm(HostBandwidths(names, tuple(readings), ()))):
        measure(source, target, turn + len(planned), confirms=True)
    sketch = healthy(hosts, 1)
    for host, samples in sent.items():
        peers = dict.fromkeys(sample.peer for sample in samples)
        idle = PathFacts(samples=tuple(PathSample(peer, round_trip=IDLE_SECONDS) for peer in peers))
        sketch = sketch.put(TransferFacts(samples=tuple(samples)), hosts=(f"node{host}",))
        sketch = sketch.put(idle, hosts=(f"node{host}",))
    return sketch


def _host_paths(planned: tuple[tuple[tuple[int, int], ...], ...]) -> Iterator[tuple[int, int, int]]:
    for turn, pairs in enumerate(planned):
        for one, other in pairs:
            yield one, other, turn
            yield other, one, turn
