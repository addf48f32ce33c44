"""Ranks that left the training loop, or the watched run, before their loader was exhausted, while others go on."""

from __future__ import annotations

import msgspec

from doctor.analysis.hang.rank_state import JobState, RankState
from doctor.core.facts import LeftLoop, ProgressFacts

TRAINING = "train"


class RanksThatLeft(msgspec.Struct, frozen=True):
    """``ranks`` left a pass over the training data that ``continuing`` are still in. ``loop``: the pass of the first
    one, where its loop shows it; ``ended``: it has left the watched run with it."""

    ranks: tuple[int, ...]
    continuing: tuple[int, ...]
    loop: LeftLoop | None
    ended: bool


def ranks_that_left(states: JobState) -> RanksThatLeft | None:
    """The ranks that left early, unless their loader ended or they do not wait for the others."""
    if states.joins:
        return None
    left = {rank: one for rank, one in states.ranks.items() if _has_left(one)}
    if not left:
        return None
    first = next(iter(left.values()))
    loop, progress = _loop_of(first), first.progress
    epoch = loop.epoch if loop is not None else progress.epoch if progress is not None else None
    is_ended = first.state == "ended"
    continuing = tuple(
        rank for rank, one in states.ranks.items() if rank not in left and _is_inside(one, None if is_ended else epoch)
    )
    if not continuing or len(continuing) + len(left) < len(states.ranks):
        return None
    return RanksThatLeft(tuple(sorted(left)), continuing, loop, is_ended)


def _has_left(one: RankState) -> bool:
    progress = one.progress
    if progress is None or one.is_sampled or not progress.run or one.failure is not None:
        return False
    if one.state == "ended":
        return _loop_of(one) is not None or (progress.epoch is not None and not _was_exhausted(progress))
    loop = _loop_of(one)
    is_beyond = loop is not None and (progress.point == "epoch-end" or progress.epoch != loop.epoch)
    return is_beyond and (one.waits or bool(one.ended_waiting))


def _loop_of(one: RankState) -> LeftLoop | None:
    """The newest pass over training data that a rank left, if it has not exhausted one since."""
    progress = one.progress
    found = next((each for each in reversed(progress.left) if each.stage == TRAINING), None) if progress else None
    if progress is None or found is None or any(end.epoch > found.epoch for end in progress.ended):
        return None
    return found


def _was_exhausted(progress: ProgressFacts) -> bool:
    return any((end.stage, end.epoch) == (TRAINING, progress.epoch) for end in progress.ended)


def _is_inside(one: RankState, epoch: int | None) -> bool:
    """Whether a rank waits in the pass number ``epoch`` over its training data, or in any if that is ``None``."""
    progress = one.progress
    if progress is None or progress.stage != TRAINING or one.state == "ended":
        return False
    # An exception leaves the loop, too.
    has_left = one.failure is None and any(each.epoch == progress.epoch for each in progress.left)
    if has_left or _was_exhausted(progress):
        return False
    waits = one.waits or one.may_wait_in_backward or bool(one.ended_waiting)
    return waits and epoch in (None, progress.epoch)
