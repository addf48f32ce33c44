"""Lines that a log repeats too often to read each: NCCL INFO and states of progress bars."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

OFTEN = 64
"""Lines of one process with one cue at NCCL's level INFO that are read; further ones are only counted."""
BARS = 2000
"""States of progress bars that are read; of further ones, only the newest before another message."""
LOUD = 20_000
"""Lines with the same cues that are read; of further ones, every :data:`EVERY`-th."""
EVERY = 16
MOST_COUNTED = 1 << 17
"""Maximum number of cues of processes that are counted at the same time."""
_HEAD = 200
_LEVEL = b" NCCL INFO "


class RepeatedInfoLines:
    """Counts the lines of processes at NCCL's level INFO, by cue."""

    def __init__(self) -> None:
        self._counts: dict[tuple[bytes, int], int] = {}

    @property
    def is_full(self) -> bool:
        """Whether the counts should be taken before more lines are read."""
        return len(self._counts) > MOST_COUNTED

    def leaves_out(self, block: bytes, start: int, end: int, cues: Collection[int]) -> bool:
        """Count the line between two offsets; return whether it need not be read."""
        level = block.find(_LEVEL, start, min(end, start + _HEAD))
        if level < 0:
            return False
        head, often = block[start:level], True
        for cue in cues:
            count = self._counts[head, cue] = self._counts.get((head, cue), 0) + 1
            often = often and count > OFTEN
        return often

    def take(self) -> Iterator[tuple[bytes, int, int]]:
        """Return the head (before the level), cue and number of lines that were not read; reset the counts."""
        counts, self._counts = self._counts, {}
        return ((head, cue, count - OFTEN) for (head, cue), count in counts.items() if count > OFTEN)


class RepeatedLines:
    """Counts lines by cues: reading every message of an endless retry loop would take hours."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, ...], int] = {}
        self._left: dict[tuple[int, ...], int] = {}

    def leaves_out(self, cues: Collection[int]) -> bool:
        """Count a line; return whether it need not be read."""
        key = tuple(cues)
        seen = self._seen[key] = self._seen.get(key, 0) + 1
        if len(self._seen) > MOST_COUNTED:
            self._seen.clear()
        if seen <= LOUD or seen % EVERY == 0:
            return False
        self._left[key] = self._left.get(key, 0) + 1
        return True

    def take(self) -> Iterator[tuple[int, int]]:
        """Return each cue with the number of lines that were not read, and reset the counts."""
        left, self._left = self._left, {}
        return ((cue, times) for key, times in left.items() for cue in key)


class DeferredLine(NamedTuple):
    """A line to be read later: its number, its beginning, and the offsets of its cues."""

    number: int
    line: bytes
    cues: dict[int, int]


class ProgressBarStates:
    """States of progress bars; from a limit on, only the newest before another message is read."""

    def __init__(self) -> None:
        self._seen = 0
        self._newest: dict[int, DeferredLine] = {}

    @property
    def is_waiting(self) -> bool:
        """Whether a state is deferred."""
        return bool(self._newest)

    def keeps(self, waiting: DeferredLine) -> bool:
        """Defer this state in place of the previous one; return ``False`` if it should be read now."""
        self._seen += 1
        if self._seen <= BARS:
            return False
        self._newest[min(waiting.cues)] = waiting
        return True

    def take(self) -> tuple[DeferredLine, ...]:
        """Return the deferred states, and reset them."""
        newest, self._newest = self._newest, {}
        return tuple(newest.values())
