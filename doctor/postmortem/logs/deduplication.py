"""Lines that a log repeats too often to look at each: what NCCL says at the level INFO, and states of progress bars."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

OFTEN = 64
"""Lines of NCCL's INFO with one text that a process may write before they are only counted."""
BARS = 2000
"""States of progress bars that are looked at; of further ones, the newest before anything else is said."""
LOUD = 20_000
"""Lines with the same texts that are looked at; of further ones, every :data:`EVERY`-th."""
EVERY = 16
MOST_COUNTED = 1 << 17
"""Texts of processes that are counted at the same time."""
_HEAD = 200
_LEVEL = b" NCCL INFO "


class RepeatCount(NamedTuple):
    """What stands before the level in a line of NCCL, and tells who says it; a text, by its number; how often more it
    was said."""

    head: bytes
    cue: int
    times: int


class RepeatedInfoLines:
    """What processes say at NCCL's level INFO, by the numbers of the texts that their lines hold."""

    def __init__(self) -> None:
        self._counts: dict[tuple[bytes, int], int] = {}

    @property
    def is_full(self) -> bool:
        """Whether the counts should be taken before more is read."""
        return len(self._counts) > MOST_COUNTED

    def leaves_out(self, block: bytes, start: int, end: int, cues: Collection[int]) -> bool:
        """Whether the line between two places was said often enough; it is counted."""
        level = block.find(_LEVEL, start, min(end, start + _HEAD))
        if level < 0:
            return False
        head, often = block[start:level], True
        for cue in cues:
            count = self._counts[head, cue] = self._counts.get((head, cue), 0) + 1
            often = often and count > OFTEN
        return often

    def take(self) -> Iterator[RepeatCount]:
        """What was left out, and begin anew."""
        counts, self._counts = self._counts, {}
        return (RepeatCount(head, cue, count - OFTEN) for (head, cue), count in counts.items() if count > OFTEN)


class RepeatedLines:
    """Lines of any process, by the numbers of the texts that they hold: a message in an endless loop of attempts would
    take hours."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, ...], int] = {}
        self._left: dict[tuple[int, ...], int] = {}

    def leaves_out(self, cues: Collection[int]) -> bool:
        """Whether a line need not be looked at, among so many like it."""
        key = tuple(cues)
        seen = self._seen[key] = self._seen.get(key, 0) + 1
        if len(self._seen) > MOST_COUNTED:
            self._seen.clear()
        if seen <= LOUD or seen % EVERY == 0:
            return False
        self._left[key] = self._left.get(key, 0) + 1
        return True

    def take(self) -> Iterator[tuple[int, int]]:
        """Each text, and how many lines with it were left out."""
        left, self._left = self._left, {}
        return ((cue, times) for key, times in left.items() for cue in key)


class DeferredLine(NamedTuple):
    """A line that is looked at later: its number, its begin, and the numbers of its texts with their places."""

    number: int
    line: bytes
    cues: dict[int, int]


class ProgressBarStates:
    """Very many states of progress bars, of which the newest waits until something else is said."""

    def __init__(self) -> None:
        self._seen = 0
        self._newest: dict[int, DeferredLine] = {}

    @property
    def is_waiting(self) -> bool:
        """Whether a state waits."""
        return bool(self._newest)

    def keeps(self, waiting: DeferredLine) -> bool:
        """Whether this state waits, and takes the place of the one before."""
        self._seen += 1
        if self._seen <= BARS:
            return False
        self._newest[min(waiting.cues)] = waiting
        return True

    def take(self) -> tuple[DeferredLine, ...]:
        """The states that wait."""
        if not self._newest:
            return ()
        newest, self._newest = self._newest, {}
        return tuple(newest.values())
