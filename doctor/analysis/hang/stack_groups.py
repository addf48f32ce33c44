"""Groups of ranks by where they are, and the tree of their merged stacks.

Library frames between frames of the user are counted, not listed, as they are the same in all ranks; a library frame
stays if it is the innermost one or if ranks part there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from doctor.analysis.call_sites import own_line, place_of_frame, site_of
from doctor.analysis.gpu_activity import activities_text
from doctor.analysis.hang.rank_state import JobState, RankState
from doctor.core.facts import Frame
from doctor.core.job import Job
from doctor.core.report_document import CallNode, StackGroup

MOST_NODES = 2000
"""Frames of a tree; stacks beyond them are cut at their inner ends."""
MOST_DEPTH = 100
_STATES = {"stopped": "stopped", "silent": "locked", "gone": "ended", "ended": "ended", "failed": "ended"}


def stack_groups(job: Job) -> tuple[StackGroup, ...]:
    """The ranks by where they are, the largest group first."""
    found: dict[tuple[str, str, str], list[RankState]] = {}
    for one in JobState(job).ranks.values():
        state = _state_of(one)
        found.setdefault((state, _place_of(one, state), _condition_of(one, state)), []).append(one)
    groups = [_group(*key, members) for key, members in found.items()]
    return tuple(sorted(groups, key=lambda group: (-len(group.ranks), group.ranks)))


def _group(state: str, place: str, condition: str, members: Sequence[RankState]) -> StackGroup:
    times = [one.progress.idle if one.progress else None for one in members]
    known = [seconds for seconds in times if seconds is not None]
    ranks = tuple(sorted(one.rank for one in members))
    is_timed = state not in ("moving", "ended", "unreadable") and len(known) == len(times)
    gpus = activities_text([one.progress.gpu for one in members if one.progress and one.progress.gpu])
    return StackGroup(ranks, state, place, condition, min(known) if is_timed else None, gpus)


def _state_of(one: RankState) -> str:
    if one.state in _STATES:
        return _STATES[one.state]
    if not one.stack:
        return "unreadable" if one.state == "stalled" else "busy"
    if one.waits:
        return "waiting"
    if one.is_snapshot:
        return "seen"
    if one.state == "running":
        return "busy" if one.progress and one.progress.idle else "moving"
    return "standing"


def _place_of(one: RankState, state: str) -> str:
    if state == "moving":
        # Its line changes from sample to sample.
        line = own_line(one.stack)
        return f"{line.file.rpartition('/')[2]} ({line.function})" if line else ""
    if state == "busy":
        # A rank in backward that computes waits for no other, though its call site names the reduction.
        return site_of("", one.stack).text
    return one.site.text if one.site else ""


def _condition_of(one: RankState, state: str) -> str:
    return one.site.condition if one.site and state != "moving" else ""


@dataclass
class _Call:
    """A frame with the frames inside of it, while stacks are merged."""

    frame: Frame
    ranks: list[int] = field(default_factory=list)
    calls: dict[tuple[str, int, str], _Call] = field(default_factory=dict)


def call_tree(job: Job) -> tuple[CallNode, ...]:
    """The merged stacks of all ranks, outermost frames first."""
    stacks = {rank: one.stack for rank, one in JobState(job).ranks.items() if one.stack}
    return _nodes(_merged(stacks.items()).values(), 0)


def _merged(stacks: Iterable[tuple[int, Sequence[Frame]]]) -> dict[tuple[str, int, str], _Call]:
    roots: dict[tuple[str, int, str], _Call] = {}
    count = 0
    for rank, stack in stacks:
        level = roots
        for frame in stack[::-1][:MOST_DEPTH]:
            key = (frame.file, frame.line, frame.function)
            if key not in level:
                if count >= MOST_NODES:
                    break
                level[key] = _Call(frame)
                count += 1
            level[key].ranks.append(rank)
            level = level[key].calls
    return roots


def _nodes(calls: Iterable[_Call], skipped: int) -> tuple[CallNode, ...]:
    ordered = sorted(calls, key=lambda call: (-len(call.ranks), call.ranks))
    return tuple(_node(call, skipped) for call in ordered)


def _node(call: _Call, skipped: int) -> CallNode:
    while not call.frame.user and (inner := _only_call(call)) is not None:
        call, skipped = inner, skipped + 1
    return CallNode(
        place_of_frame(call.frame),
        tuple(sorted(call.ranks)),
        user=call.frame.user,
        skipped=skipped,
        calls=_nodes(call.calls.values(), 0),
    )


def _only_call(call: _Call) -> _Call | None:
    """The frame inside of a call, if all of its ranks are in that one."""
    inner = next(iter(call.calls.values())) if len(call.calls) == 1 else None
    return inner if inner is not None and len(inner.ranks) == len(call.ranks) else None
