"""Ranks whose loop ended while others are still in it, from stacks alone.

Either the ranks are in one function of the user, some in a loop and the others behind it; or the loop is in a function
that some ranks are in, and the others have returned from: they are on a later line of the function that called it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from doctor.analysis.call_sites import POINT_TO_POINT
from doctor.analysis.hang.rank_state import JobState, RankState
from doctor.analysis.hang.uneven_loaders import UnevenLoaders
from doctor.core.facts import Frame

Stacks = Mapping[int, Sequence[Frame]]


class _LoopExit(msgspec.Struct, frozen=True):
    """A loop, by a frame in it, that the ranks ``inside`` are in and the ranks ``behind`` have left."""

    loop: Frame
    inside: tuple[int, ...]
    behind: tuple[int, ...]


def uneven_of_stacks(states: JobState) -> UnevenLoaders | None:
    """The ranks that wait behind a loop of the user in which all others wait; ``None`` unless all ranks wait."""
    stacks = {
        rank: [frame for frame in one.stack if frame.user]
        for rank, one in states.ranks.items()
        if one.waits or one.may_wait_in_backward
    }
    if len(stacks) < len(states.ranks) or states.joins:
        return None
    by_call = all(_may_part(one) for one in states.ranks.values())
    exits = (
        one
        for frames in _common_frames(stacks)
        for one in (*_past_end(frames), *(_past_call(frames, stacks) if by_call else ()))
    )
    found = next((one for one in exits if not _trains(states, one.behind)), None)
    if found is None:
        return None
    ended, continuing = found.behind, found.inside
    by_data = bool(found.loop.loop_data)
    return UnevenLoaders("", 0, None, None, ended, continuing, certain=False, loop=found.loop, by_data=by_data)


def _may_part(rank_state: RankState) -> bool:
    """Whether it waits in no transfer: the stages of a pipeline are in functions of their own all the time."""
    return rank_state.stack_wait not in POINT_TO_POINT


def _trains(states: JobState, ranks: Sequence[int]) -> bool:
    """Whether some of the ranks are in a backward pass, so that they have not ended training."""
    return any(states.ranks[rank].may_wait_in_backward for rank in ranks)


def _common_frames(stacks: Stacks) -> Iterator[dict[int, Frame]]:
    """The frame of each rank in every function that all ranks are in, the innermost function first."""
    found: dict[tuple[str, str], dict[int, Frame]] = {}
    for rank, frames in stacks.items():
        for frame in frames:
            found.setdefault((frame.file, frame.function), {}).setdefault(rank, frame)
    return (frames for frames in found.values() if len(frames) == len(stacks))


def _past_end(frames: Mapping[int, Frame]) -> Iterator[_LoopExit]:
    """Ranks behind the last line of a loop that the others are in."""
    loops = {frame.loop[1]: frame for frame in frames.values() if frame.loop}
    for end, loop in sorted(loops.items()):
        inside = tuple(rank for rank, frame in frames.items() if frame.loop[1:] == (end,))
        behind = tuple(rank for rank, frame in frames.items() if frame.line > end)
        if behind and len(inside) + len(behind) == len(frames):
            yield _LoopExit(loop, inside, behind)


def _past_call(frames: Mapping[int, Frame], stacks: Stacks) -> Iterator[_LoopExit]:
    """Ranks behind the call of a function whose loop the others are in."""
    first = min(frame.line for frame in frames.values())
    inside = tuple(rank for rank, frame in frames.items() if frame.line == first)
    behind = tuple(rank for rank in frames if rank not in inside)
    if (
        not behind
        or len({frame.loop for frame in frames.values()}) > 1
        or any(one.condition for one in frames.values())
    ):
        return
    loops = {rank: _outermost_loop(stacks[rank], frames[rank]) for rank in inside}
    loop = loops[inside[0]]
    if loop is None or any(frame.function == loop.function for rank in behind for frame in stacks[rank]):
        return
    if len({(one.file, one.loop) if one is not None else None for one in loops.values()}) == 1:
        yield _LoopExit(loop, inside, behind)


def _outermost_loop(stack: Sequence[Frame], around: Frame) -> Frame | None:
    """The outermost frame inside of another one that is in a loop."""
    inner = stack[: stack.index(around)]
    return next((frame for frame in reversed(inner) if frame.loop), None)
