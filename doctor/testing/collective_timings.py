"""Jobs whose collectives were timed along a mesh, for the cases of checks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from doctor.analysis.fabric.pairing import NO_PARTNER, RankSlot, partners_of
from doctor.core.facts import CollectiveFacts, CollectiveTiming, Exchange
from doctor.testing.cases import JobBuilder, healthy

BUCKET = 25 << 20
SMALL = 4096
AXES = ("dp", "tp")
TURNS = 2

Seconds = Callable[[str, tuple[int, ...], int, int], float]
"""Returns the seconds of a collective, from an axis, a group of it, a size in bytes and a round."""


def timed_on_mesh(seconds: Seconds, *, backend: str = "gloo", hosts: int = 4, per_host: int = 4) -> JobBuilder:
    """Return a job on a mesh of dp between hosts and tp within each, timed twice along both axes."""
    sketch = healthy(hosts, per_host, gpus=None if backend == "nccl" else 0)
    world = hosts * per_host
    for rank in range(world):
        first = rank - rank % per_host
        groups = (tuple(range(rank % per_host, world, per_host)), tuple(range(first, first + per_host)))
        timings = tuple(
            CollectiveTiming("all_reduce", backend, size, seconds(axis, group, size, turn), axis, group, 5)
            for turn in range(TURNS)
            for axis, group in zip(AXES, groups, strict=True)
            for size in (8, BUCKET)
        )
        sketch = sketch.put(CollectiveFacts(timings=timings, backend=backend), ranks=(rank,))
    return sketch


def usual_seconds(axis: str, group: tuple[int, ...], size: int, turn: int) -> float:
    """Return similar times, with the slowest group about a third above the fastest."""
    if size <= SMALL:
        return 20e-6 + 1e-6 * turn
    return (0.1 if axis == "dp" else 0.01) * (1 + group[0] % 4 / 10 + turn / 20)


def slow_with(*ranks: int, times: float = 4.0, axes: Iterable[str] = AXES, turns: Sequence[int] = (0, 1)) -> Seconds:
    """Return times in which large messages of groups with one of ``ranks`` take ``times`` as long."""
    slow_axes = tuple(axes)

    def seconds(axis: str, group: tuple[int, ...], size: int, turn: int) -> float:
        is_slow = size > SMALL and axis in slow_axes and turn in turns and bool(set(group).intersection(ranks))
        return usual_seconds(axis, group, size, turn) * (times if is_slow else 1.0)

    return seconds


BETWEEN_HOSTS = 23e9
"""Bytes per second of a NIC of 200 Gb/s."""

Odd = Callable[[int, int], bool]
"""Selects messages from one rank to another."""


def exchanged(
    slow: Odd = lambda source, target: False,
    *,
    share: float = 0.1,
    hosts: int = 4,
    per_host: int = 4,
    backend: str = "nccl",
    errors: Mapping[int, str] | None = None,
    between: float = BETWEEN_HOSTS,
    rdma: int = 0,
) -> JobBuilder:
    """Return a job whose ranks exchanged messages with those of the same local rank on other hosts, and within their
    host, where a bridge connects the first two.

    ``slow`` messages have ``share`` of the usual bandwidth; ``errors`` by rank. ``between``: the usual bandwidth from
    host to host, bytes per second; ``rdma``: InfiniBand ports per host, of 400 Gb/s.
    """
    sketch = healthy(hosts, per_host, rdma=rdma)
    slots = [RankSlot(host, place) for host in range(hosts) for place in range(per_host)]
    received: dict[int, list[Exchange]] = {rank: [] for rank in range(len(slots))}
    for rank, partners in enumerate(partners_of(slots)):
        for turn, partner in enumerate(partners):
            if partner != NO_PARTNER:
                usual = _usual_bandwidth(partner, rank, per_host, between) * (
                    1 + 0.01 * ((7 * rank + partner + turn) % 5)
                )
                value = usual * (share if slow(partner, rank) else 1.0)
                received[rank].append(Exchange(partner, 1 << 26, (1 << 26) / value, turn))
    for rank, own in received.items():
        error = (errors or {}).get(rank)
        facts = CollectiveFacts(
            backend=backend,
            device=f"cuda:{rank % per_host}",
            exchanges=tuple(own) if not error else (),
            exchange_error=error,
        )
        sketch = sketch.put(facts, ranks=(rank,))
    return sketch


def _usual_bandwidth(one: int, other: int, per_host: int, between: float) -> float:
    if one // per_host != other // per_host:
        return between
    return 160e9 if {one % per_host, other % per_host} == {0, 1} else 40e9


def breaking(error: str, own: tuple[int, ...], others: str, *, awaited: tuple[int, ...] = ()) -> JobBuilder:
    """Return two hosts of four ranks along tp. Those in ``own`` fail with ``error`` (waiting for ``awaited``, if any);
    all others wait for these, and fail with ``others``."""
    sketch = healthy(2, 4, gpus=0)
    members = tuple(range(8))
    for rank in members:
        is_own = rank in own
        peers = tuple(peer for peer in (awaited if is_own else own) if peer != rank)
        text = error if is_own else others
        broken = CollectiveTiming("all_reduce", "gloo", 0, axis="tp", members=members, error=text, awaited=peers)
        sketch = sketch.put(CollectiveFacts(timings=(broken,), backend="gloo"), ranks=(rank,))
    return sketch


def not_set_up(error: str, awaited: tuple[int, ...] = (), *, backend: str = "gloo") -> CollectiveFacts:
    """Return the facts of a rank whose process group was not created."""
    return CollectiveFacts(backend=backend, error=error, awaited=awaited)
