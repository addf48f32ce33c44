"""How long ranks waited for one another, from the parts of their time.

Ranks that synchronize take the same time for the same batches. What one of them spends more than another in some part,
it spends less in others: one of the two differences is work, the other one the wait for it. Parts differ in how likely
ranks wait in them, so the difference in the likelier part is the wait. This is never more than a rank really waited as
long as only ranks that synchronize are compared; work and waiting in the same part on both ranks cancel out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from doctor.core.facts import TIME_PARTS, StepFacts

Parts = Mapping[str, float]
"""Seconds by part, as in :data:`doctor.core.facts.TIME_PARTS`."""
NEVER_WAITS = ("evaluation", "epoch-start", "data", "checkpoint")
"""Parts in which a rank does not wait for others, with exceptions, and for which others wait: the least likely last."""


class WaitOrder(msgspec.Struct, frozen=True):
    """Parts by how likely a rank waits for others in them, the likeliest first; ``waits``: those in which it can."""

    parts: tuple[str, ...]
    waits: frozenset[str]


def wait_order(*, on_gpu: bool, has_backward: bool, broadcasts_flag: bool, is_sharded: bool) -> WaitOrder:
    """Return the order for ranks that do the same work.

    ``broadcasts_flag``: the framework has all ranks wait for rank 0 before each batch, as Lightning does.
    ``is_sharded``: parameters are gathered in the forward pass. On a GPU the host only launches kernels, and waits
    where a value is read back (see RUN003).
    """
    flag = ("data",) if broadcasts_flag else ()
    step = () if has_backward else ("step",)
    if on_gpu:
        likely = ("batch-end", *step, "backward", "between", "optimizer", "forward", *flag)
        waits = frozenset(likely)
    else:
        likely = ("backward", *step, *flag, "between", "batch-end", "optimizer", "forward")
        waits = frozenset(likely) - (frozenset() if is_sharded else {"forward"})
    return WaitOrder((*likely, *(part for part in NEVER_WAITS if part not in likely)), waits)


class Wait(msgspec.Struct, frozen=True):
    """Seconds that a rank waited in part ``within`` for rank ``culprit``, which was in part ``because`` meanwhile."""

    culprit: int
    within: str
    because: str
    seconds: float


def waits_of(parts: Mapping[int, Parts], order: WaitOrder) -> dict[int, list[Wait]]:
    """Return the waits of each rank in one span of batches. ``parts``: by rank."""
    if len(parts) < 2:
        return {}
    rows = {rank: [own[part] for part in order.parts] for rank, own in parts.items()}
    culprits = _least_waiting(rows, order)
    found = {}
    for rank, row in rows.items():
        matches = [matched(row, rows[other], other, order) for other in culprits if other != rank]
        found[rank] = max(matches, key=lambda waits: sum(one.seconds for one in waits), default=[])
    return found


def _least_waiting(rows: Mapping[int, Sequence[float]], order: WaitOrder) -> tuple[int, ...]:
    """Return the ranks that others may have waited for: those that can have waited least, in all and in one part."""
    used = [
        place
        for place, part in enumerate(order.parts)
        if part in order.waits and any(row[place] for row in rows.values())
    ]
    if not used:
        return ()
    sums = ((used[0],), tuple(used), tuple(place for place in used if order.parts[place] != "batch-end"))
    return tuple(dict.fromkeys(min(rows, key=lambda rank: sum(rows[rank][one] for one in places)) for places in sums))


def matched(own: Sequence[float], other: Sequence[float], culprit: int, order: WaitOrder) -> list[Wait]:
    """Match what a rank spent more where it can wait with what the culprit spent more in less likely parts.

    ``own``, ``other``: seconds in the order of ``order.parts``.
    """
    less = [
        (place, theirs - mine) for place, (mine, theirs) in enumerate(zip(own, other, strict=True)) if theirs > mine
    ]
    found: list[Wait] = []
    for place, part in enumerate(order.parts) if less else ():
        left = own[place] - other[place]
        while left > 0 and part in order.waits and less and less[-1][0] > place:
            because, excess = less.pop()
            seconds = min(left, excess)
            found.append(Wait(culprit, part, order.parts[because], seconds))
            left -= seconds
            if excess > seconds:
                less.append((because, excess - seconds))
    return found


def parts_by_span(
    ranks: Mapping[int, StepFacts], most: int, *, has_backward: bool
) -> dict[int, dict[int, dict[str, float]]]:
    """Return the parts of each rank by the first batch of a span, in spans that are equal on all ranks.

    ``most``: the number of spans down to which neighbors are merged. ``has_backward``: what lies before the backward
    pass is the forward pass.
    """
    size = max(1, *(steps.span_batches for steps in ranks.values()))
    last = max((one.first for steps in ranks.values() for one in steps.spans), default=0)
    while last // size >= most:
        size *= 2
    table: dict[int, dict[int, dict[str, float]]] = {}
    for rank, steps in ranks.items():
        for one in steps.spans:
            cells = table.setdefault(one.first // size, {}).setdefault(rank, dict.fromkeys(TIME_PARTS, 0.0))
            for part, seconds in zip(TIME_PARTS, one.seconds, strict=False):
                cells["forward" if has_backward and part == "step" else part] += seconds
    return table


def communication(parts: Iterable[Parts], ratio: float) -> float:
    """Return the seconds that every rank spent in collectives of the backward pass, beside waiting for others.

    It is the excess of the backward pass over its arithmetic, ``ratio`` times that of the forward pass (see RUN013), on
    the rank where it is least.
    """
    excess = [own["backward"] - ratio * own["forward"] if own["forward"] else 0.0 for own in parts]
    return max(0.0, min(excess, default=0.0))
