"""Maximum of bytes that a rank of a group sends, without the store, the setup of a backend and packet headers."""

from __future__ import annotations

from doctor.analysis.fabric.pairing import NO_PARTNER
from doctor.probes.collectives import group_limits
from doctor.probes.collectives.group_driver import TURNS
from doctor.probes.collectives.group_steps import WORLD, JoinGroup

RING_TIMES = 2
"""Times that a rank sends a message in an all-reduce over a ring, the algorithm of Gloo (gloo/allreduce.cc): once to
reduce, once to distribute."""
TREE_TIMES = 4
"""The same over a tree of NCCL, more than over its rings: to one parent and three children (NCCL_MAX_TREE_ARITY in
src/include/device.h)."""
ITEM_BYTES = {"float32": 4, "bfloat16": 2}
WORD_BYTES = 8
"""Of a number that ranks agree on, float64 or int64."""
LOOKS = 6
"""Times that ranks agree while they determine how large messages may be."""


def most_sent(order: JoinGroup) -> int:
    """Return the bytes that a rank sends for ``order``, at most."""
    groups = {WORLD: order.count, **{share.axis: len(share.members) for share in order.shares}}
    values = sum(_of_values(order, size) for size in groups.values())
    paces = sum(_of_pace(order, len(share.members), share.bytes) for share in order.shares)
    return _summed(order, order.count, ITEM_BYTES["float32"]) + values + paces + _of_pairs(order)


def _summed(order: JoinGroup, size: int, length: int) -> int:
    """Return the bytes of an all-reduce of ``length`` bytes in a group of ``size``: one rank alone sends none."""
    times = RING_TIMES if order.backend == group_limits.MEASURED else TREE_TIMES
    return times * length if size > 1 else 0


def _of_values(order: JoinGroup, size: int) -> int:
    """Return the bytes of an all-reduce, an all-gather and an all-to-all for each type:
    :func:`doctor.probes.collectives.known_values.known_values`."""
    elements = group_limits.ELEMENTS[order.device]
    piece = max(1, min(elements // 4, group_limits.MOST_GATHERED // size))
    items = [ITEM_BYTES[name] for name in (group_limits.SPANS if order.device == "cuda" else ("float32",))]
    return sum(_summed(order, size, elements * item) + 2 * (size - 1) * piece * item for item in items)


def _of_pace(order: JoinGroup, size: int, length: int) -> int:
    """Return the bytes of all turns along an axis: :class:`doctor.probes.collectives.collective_timing.AxisTimer`."""
    turns = TURNS if size < order.count else 1
    calls = group_limits.IN_A_ROW if order.device == "cuda" else 1
    small = group_limits.SMALL_REPEATS * calls * sum(group_limits.SMALL)
    explored = 2 * min(group_limits.SCOUT, length) + (2 * length if length > group_limits.SCOUT else 0)
    large = (1 + group_limits.MOST_REPEATS) * length if length not in group_limits.SMALL else 0
    words = WORD_BYTES * (turns * group_limits.SMALL_REPEATS * len(group_limits.SMALL) + LOOKS)
    own = explored + turns * (small + large)
    return _summed(order, size, own) + _summed(order, order.count, words)


def _of_pairs(order: JoinGroup) -> int:
    """Return the bytes of messages to all partners, with the requests for them:
    :class:`doctor.probes.collectives.pair_exchange.PairExchange`."""
    most, lengths = group_limits.MOST_BYTES[order.device], [group_limits.FIRST_BYTES]
    while lengths[-1] < most:
        lengths.append(min(lengths[-1] * group_limits.GROWTH, most))
    repeats = group_limits.REPEATS
    messages = [*[group_limits.LEAST_BYTES] * repeats, *lengths, *[lengths[-1]] * (repeats - 1)]
    # A word for every message that is asked for; the room at first, the end of the questions, and the waiting at last.
    one = sum(messages) + WORD_BYTES * (len(messages) + 3)
    met = sum(partner != NO_PARTNER for partner in order.partners)
    return one * met + _summed(order, order.count, WORD_BYTES * len(order.partners))
