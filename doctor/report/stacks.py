"""Where ranks are, as rows: the groups of ranks, and the merged tree of their calls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from doctor.core.report_document import CallNode, RankStacks, StackGroup
from doctor.core.text import ranges

MOST_ROWS = 60
"""Rows of a tree in a report for people to read; JSON has all of them."""
MOST_INDENT = 20
"""Levels of indentation: beyond them all rows begin in one column."""

_STATES = {
    "waiting": "in",
    "standing": "without progress at",
    "busy": "busy at",
    "moving": "making progress in",
    "seen": "at",
    "stopped": "stopped at",
    "locked": "native code holds the interpreter's lock at",
    "unreadable": "not readable",
    "ended": "ended",
}


class CallRow(NamedTuple):
    """A line of the tree. ``depth``: the number of places around it at which ranks part."""

    depth: int
    ranks: str
    place: str
    user: bool
    skipped: int


def ranks_text(ranks: tuple[int, ...]) -> str:
    """Return ``rank 7`` or ``ranks 0-6``."""
    return f"rank{'' if len(ranks) == 1 else 's'} {ranges(ranks)}"


def groups_title(stacks: RankStacks) -> str:
    """Return ``3 groups of ranks``."""
    return f"{len(stacks.groups)} group{'' if len(stacks.groups) == 1 else 's'} of ranks"


def group_text(group: StackGroup) -> str:
    """Return ``in all_reduce at train.py:41 (train), for at least 4 s; GPU 0: 100 % busy at 85 W of 700 W``."""
    state = _STATES.get(group.state, group.state)
    where = state.removesuffix(" at").removesuffix(" in") if not group.place else f"{state} {group.place}"
    condition = f" [{group.condition}]" if group.condition else ""
    seconds = f", for at least {group.seconds:.0f} s" if group.seconds and group.seconds >= 1 else ""
    return f"{where}{condition}{seconds}{f'; {group.gpus}' if group.gpus else ''}"


def skipped_text(row: CallRow) -> str:
    """Return ``(12 library frames above)``; empty if none was left out."""
    return f"({row.skipped} library frame{'' if row.skipped == 1 else 's'} above)" if row.skipped else ""


def call_rows(stacks: RankStacks) -> Iterator[CallRow]:
    """Yield the lines of the tree, outermost calls first; lines are indented where ranks part."""
    yield from _rows(stacks.calls, 0)


def _rows(calls: tuple[CallNode, ...], depth: int) -> Iterator[CallRow]:
    for call in calls:
        yield CallRow(depth, ranges(call.ranks), call.place, call.user, call.skipped)
        yield from _rows(call.calls, depth + (len(calls) > 1 or len(call.calls) > 1))
