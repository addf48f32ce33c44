"""The pairs of hosts for each round, chosen so that a slow component can be distinguished from its neighbors.

A hypercube (partner = index XOR 2^k) puts all pairs across the middle of the job into one round: a boundary there looks
like a round with other load. Windows of the same sizes, placed around the ring of hosts with an offset and mirrored in
every other round, measure pairs across and beside any border in a round of some size; `benchmarks/isolation.py`
compares them.
"""

from __future__ import annotations

Pairs = tuple[tuple[int, int], ...]

ALL_PAIRS_UP_TO = 8
"""The number of hosts up to which every pair is measured: seven rounds for eight hosts."""

FEWEST_ROUNDS = ALL_PAIRS_UP_TO - 1
"""The minimum number of rounds for more hosts: nine hosts need at least as many as eight."""

OFFSET, GOLDEN = 0.4, 0.6180339887498949
"""The offset of windows as a share of their size, because borders of racks and halves are at round positions; when the
sizes repeat, the golden ratio moves them off their earlier positions."""

LEAST_CONFIRMING, MOST_CONFIRMING = 2, 4
"""Bounds of the confirming rounds; there are log2(hosts) + 2 rounds in all, if that leaves enough first ones."""

CONFIRMING_FEW, MOST_CONFIRMING_FEW = 6, 10
"""The same for up to twice :data:`ALL_PAIRS_UP_TO` hosts, for which a round takes tenths of a second; the second number
applies only while a host may be slow at times, because it may have been normal in most rounds so far."""

MOVES = 8
"""The number of window positions that are tried for a round."""


def rounds(count: int, most: int | None = None) -> tuple[Pairs, ...]:
    """Pairs of hosts for at most ``most`` first rounds; a host is in one pair of a round or rests.

    Every pair for up to :data:`ALL_PAIRS_UP_TO` hosts, a subset for up to twice as many; for more hosts the part of
    ceil(log2(``count``)) + 2 rounds that :func:`rounds_to_confirm` leaves. One host rests in each round if ``count`` is
    odd."""
    if count < 2:
        return ()
    planned = _windows(count) if count > 2 * ALL_PAIRS_UP_TO else _every_pair(count)
    if ALL_PAIRS_UP_TO < count <= 2 * ALL_PAIRS_UP_TO:
        planned = tuple(planned[turn * len(planned) // FEWEST_ROUNDS] for turn in range(FEWEST_ROUNDS))
    return planned[:most]


def rounds_to_confirm(count: int) -> int:
    """The number of confirming rounds.

    A link, which is measured in one round, needs three more to be distinguished from other load, and its hosts may be
    paired with others in one of them."""
    if count <= 2 * ALL_PAIRS_UP_TO:
        return CONFIRMING_FEW
    return max(LEAST_CONFIRMING, min(MOST_CONFIRMING, _bits(count) + 2 - FEWEST_ROUNDS))


def most_rounds_to_confirm(count: int) -> int:
    """The same if a host may be slow at times."""
    return MOST_CONFIRMING_FEW if count <= 2 * ALL_PAIRS_UP_TO else rounds_to_confirm(count)


def _bits(count: int) -> int:
    return (count - 1).bit_length()


def _every_pair(count: int) -> tuple[Pairs, ...]:
    """The circle method: host 0 stays (or rests, for odd counts), the others rotate."""
    even = count + count % 2
    turning = list(range(1, even))
    found = []
    for turn in range(even - 1):
        circle = [0, *turning[turn:], *turning[:turn]]
        pairs = zip(circle[: even // 2], reversed(circle[even // 2 :]), strict=True)
        found.append(tuple(sorted((min(pair), max(pair)) for pair in pairs if max(pair) < count)))
    return tuple(found)


def _windows(count: int) -> tuple[Pairs, ...]:
    """Pairs within windows of 2, 4, 8 … hosts and of all hosts, then from the start again if rounds are left."""
    bits = _bits(count)
    number = max(bits + 2 - rounds_to_confirm(count), FEWEST_ROUNDS)
    found: list[Pairs] = []
    paired: set[tuple[int, int]] = set()
    for turn in range(number):
        again, bit = divmod(turn + max(0, bits - number), bits)  # the smallest windows are those to do without
        size = min(2 << bit, count)
        start = 2 * int(size * ((OFFSET + again * GOLDEN) % 1) / 2) + again
        if count % 2:
            start += turn * int(count * GOLDEN)  # who rests is the one before the start
        pairs = _freshest(count, size, start, (bits - bit + again) % 2 == 1, paired)
        paired.update(pairs)
        found.append(pairs)
    return tuple(found)


def _freshest(count: int, size: int, start: int, mirrored: bool, paired: set[tuple[int, int]]) -> Pairs:
    """The windows, shifted by a few hosts if that repeats fewer earlier pairs."""
    best: Pairs = ()
    fewest = count
    for moved in range(MOVES):
        pairs = _within_windows(count, size, start + moved, mirrored=mirrored != (size < count and moved >= MOVES // 2))
        repeated = len(paired.intersection(pairs))
        if repeated < fewest:
            best, fewest = pairs, repeated
        if not repeated:
            break
    return best


def _within_windows(count: int, size: int, start: int, *, mirrored: bool) -> Pairs:
    """The first half of each window of ``size`` or slightly more hosts with its second half, in order or mirrored.

    The window of all hosts is mirrored: in order, all of its pairs would cross the middle."""
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
