"""Lines of a log that count steps.

They may be nine in ten, and only the last ones matter: the first 200 are read, and of every further block the last few.
Their number is estimated from these.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from doctor.knowledge.linear_regex import linear_bytes

ALL = 200
"""Number of lines at the beginning that are all read."""
OF_A_BLOCK = 16
"""Number of lines read of every further block."""
OF_THE_LAST = 400
"""Number of lines read of the last block."""
TAIL = 1 << 12
"""Bytes at the end of a block that are searched first."""
REACH = 1 << 17
"""Bytes of a block in which its cues are counted."""
MOST_COUNTED = 2
"""Number of cues that are counted in a block."""
_CUES = (b"it/s", b"s/it", b"tep", b"poch", b"iter", b"Iter", b"atch ", b"STEP", b"EPOCH")
"""Every line that counts steps contains one of these, except truncated progress bars."""
_END = re.compile(rb"[\r\n]")
# The last two alternatives match bars without a rate, and those of rich.
_ANY_CUE = linear_bytes(b"|".join(_CUES) + rb"|[0-9][0-9]<[0-9?]|[0-9] \xe2\x80\xa2 ")
_LONGEST = 4000


def step_lines(block: bytes, seen: int, *, is_last: bool) -> Iterator[tuple[int, bytes]]:
    """Yield offset and text of lines that may count steps. ``seen``: number of lines before."""
    if seen < ALL:
        found = list(_of(block, 0, len(block), ALL - seen))
        yield from found
        if len(found) < ALL - seen:
            return
    most, reach = (OF_THE_LAST, 32 * TAIL) if is_last else (OF_A_BLOCK, TAIL)
    yield from _last_ones(block, most, reach)


def estimate(block: bytes, sample: Sequence[tuple[bytes, bool]]) -> int:
    """Estimate the number of lines that count steps, from a ``sample`` with their results.

    Lines of one form contain a cue equally often, so counting the cue is exact for them. For a small sample, only the
    end of the block is counted.
    """
    start = len(block) - REACH if len(sample) <= OF_A_BLOCK and len(block) > REACH else 0
    scale = len(block) / max(len(block) - start, 1)
    left = [line for line, counts in sample if counts]
    total = 0
    for _ in range(MOST_COUNTED):
        cue = max(_CUES, key=lambda one: sum(one in line for line in left))
        counted = sum(cue in line for line in left)
        if not counted:
            break
        total += int(block.count(cue, start) * scale) * counted // sum(line.count(cue) for line, _ in sample)
        left = [line for line in left if cue not in line]
    return total + len(left)


def _of(block: bytes, start: int, end: int, most: int) -> Iterator[tuple[int, bytes]]:
    """Yield the first lines with a cue that begin between two offsets."""
    while most > 0 and (cue := _ANY_CUE.search(block, start, end)):
        found = _END.search(block, cue.start())
        after = found.start() if found else len(block)
        place = max(_start(block, cue.start()), start)
        most -= 1
        yield place, block[place : min(after, place + _LONGEST)]
        start = after + 1


def _last_ones(block: bytes, most: int, reach: int) -> list[tuple[int, bytes]]:
    """Return the last lines with a cue, searching ``reach`` bytes at a time from the end."""
    end = len(block)
    while end > 0:
        start = _start(block, max(end - reach, 0))
        found = list(_of(block, start, end, reach))[-most:]
        if found:
            return found
        end, reach = min(start, end - 1), 2 * reach
    return []


def _start(block: bytes, place: int) -> int:
    least = max(place - _LONGEST, 0)
    return max(block.rfind(b"\n", least, place), block.rfind(b"\r", least, place), least - 1) + 1
