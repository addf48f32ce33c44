"""Which hosts are paired in which round, so that a slow part can be told from its neighbours.

A hypercube (partner = index XOR 2^k) puts all pairs that cross the middle of the job into one round: a boundary there
looks like a round in which something else was busy. Windows of the same sizes, laid around the circle of hosts with an
offset, and mirrored in every other round, measure pairs across and beside any border in every round of some size;
`benchmarks/isolation.py` compares them.
"""

from __future__ import annotations

Pairs = tuple[tuple[int, int], ...]

ALL_PAIRS_UP_TO = 8
"""Hosts up to which every pair is measured: seven rounds for eight hosts, and no link is left out."""

FEWEST_ROUNDS = ALL_PAIRS_UP_TO - 1
"""Rounds for more hosts than that, at the least: nine hosts are not told apart by less than eight are."""

OFFSET, GOLDEN = 0.4, 0.6180339887498949
"""Where windows start, as a share of their size: borders of racks and halves are at round places, so windows are not;
when the sizes start over, the golden ratio keeps them off their earlier places."""

LEAST_CONFIRMING, MOST_CONFIRMING = 2, 4
"""Rounds that are kept to confirm; log2(hosts) + 2 are played in all, where that leaves enough first ones."""

CONFIRMING_FEW, MOST_CONFIRMING_FEW = 6, 10
"""The same for up to twice :data:`ALL_PAIRS_UP_TO` hosts, where a round costs tenths of a second; more only while some
host may be slow at times, which may have been well in most of the rounds so far."""

MOVES = 8
"""Places that are tried for the windows of a round."""


def rounds(count: int, most: int | None = None) -> tuple[Pairs, ...]:
    """Pairs of hosts for each of the first rounds, at most ``most`` rounds; a host is in one pair a round or rests.

    Every pair for up to :data:`ALL_PAIRS_UP_TO` hosts, a part of all pairs for up to twice as many; for more what
    :func:`rounds_to_confirm` leaves of ceil(log2(``count``)) + 2. One host rests in each where ``count`` is odd.
    """
    if count < 2:
        return ()
    planned = _windows(count) if count > 2 * ALL_PAIRS_UP_TO else _every_pair(count)
    if ALL_PAIRS_UP_TO < count <= 2 * ALL_PAIRS_UP_TO:
        planned = tuple(planned[turn * len(planned) // FEWEST_ROUNDS] for turn in range(FEWEST_ROUNDS))
    return planned[:most]


def rounds_to_confirm(count: int) -> int:
    """Rounds in which suspicions are confirmed: a link, which one round measured, needs three more to be told from a
    busy moment, and its hosts may be wanted elsewhere in one of them."""
    if count <= 2 * ALL_PAIRS_UP_TO:
        return CONFIRMING_FEW
    return max(LEAST_CONFIRMING, min(MOST_CONFIRMING, _bits(count) + 2 - FEWEST_ROUNDS))


def most_rounds_to_confirm(count: int) -> int:
    """The same where a host may be slow at times."""
    return MOST_CONFIRMING_FEW if count <= 2 * ALL_PAIRS_UP_TO else rounds_to_confirm(count)


def _bits(count: int) -> int:
    return (count - 1).bit_length()


def _every_pair(count: int) -> tuple[Pairs, ...]:
    """The circle method: host 0 stays (or rests, for odd counts), the others turn around it."""
    even = count + count % 2
    turning = list(range(1, even))
    found = []
    for turn in range(even - 1):
        circle = [0, *turning[turn:], *turning[:turn]]
        pairs = zip(circle[: even // 2], reversed(circle[even // 2 :]), strict=True)
        found.append(tuple(sorted((min(pair), max(pair)) for pair in pairs if max(pair) < count)))
    return tuple(found)


def _windows(count: int) -> tuple[Pairs, ...]:
    """Pairs within windows of 2, 4, 8 … hosts, of all at last, and so on from the start if rounds are left."""
    bits = _bits(count)
    number = max(bits + 2 - rounds_to_confirm(count), FEWEST_ROUNDS)
    found: list[Pairs] = []
    met: set[tuple[int, int]] = set()
    for turn in range(number):
        again, bit = divmod(turn + max(0, bits - number), bits)  # the smallest windows are those to do without
        size = min(2 << bit, count)
        start = 2 * int(size * ((OFFSET + again * GOLDEN) % 1) / 2) + again
        if count % 2:
            start += turn * int(count * GOLDEN)  # who rests is the one before the start
        pairs = _freshest(count, size, start, (bits - bit + again) % 2 == 1, met)
        met.update(pairs)
        found.append(pairs)
    return tuple(found)


def _freshest(count: int, size: int, start: int, mirrored: bool, met: set[tuple[int, int]]) -> Pairs:
    """The windows, moved on by a few hosts where this leaves fewer pairs that have met before."""
    best: Pairs = ()
    fewest = count
    for moved in range(MOVES):
        pairs = _within_windows(count, size, start + moved, mirrored=mirrored != (size < count and moved >= MOVES // 2))
        repeated = len(met.intersection(pairs))
        if repeated < fewest:
            best, fewest = pairs, repeated
        if not repeated:
            break
    return best


def _within_windows(count: int, size: int, start: int, *, mirrored: bool) -> Pairs:
    """The first half of each window with its second half, in order or mirrored; the window of all is mirrored, for in
    order all of its pairs would cross the middle. Windows are as large as ``size`` or a little larger."""
    windows = count // size
    found = []
    for window in range(windows):
        begin, end = (2 * (at * (count // 2) // windows) for at in (window, window + 1))
        places = [(start + place) % count for place in range(begin, end)]
        half = len(places) // 2
        others = places[half:]
        pairs = zip(places[:half], reversed(others) if mirrored else others, strict=True)
        found += [(min(pair), max(pair)) for pair in pairs]
    return tuple(sorted(found))
