"""Lines of a log that count steps. They may be nine of ten, and only the last ones matter: the first 200 are
looked at, and of every further block the last few. How many there are is estimated from these."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from doctor.knowledge.linear_regex import linear_bytes

ALL = 200
"""Lines that are looked at in full."""
OF_A_BLOCK = 16
"""Lines of every further block."""
OF_THE_LAST = 400
"""Lines of the last block, and those of any kind that are looked at there."""
TAIL = 1 << 12
"""Bytes at the end of a block in which they are looked for first."""
REACH = 1 << 17
"""Bytes of a block in which its cues are counted."""
MOST_COUNTED = 2
"""Cues that are counted in a block."""
_CUES = (
    b"it/s",
    b"s/it",
    b"tep",
    b"poch",
    b"iter",
    b"Iter",
    b"atch ",
    b"STEP",
    b"EPOCH",
)
"""Texts of which one stands in every line that counts steps, but for bars that are cut."""
_END = re.compile(rb"[\r\n]")
# Then a bar whose rate is missing, and one that rich draws.
_ANY_CUE = linear_bytes(b"|".join(_CUES) + rb"|[0-9][0-9]<[0-9?]|[0-9] \xe2\x80\xa2 ")
_LONGEST = 4000


def step_lines(block: bytes, seen: int, *, is_last: bool) -> Iterator[tuple[int, bytes]]:
    """Lines of a block that may count steps, each with its offset, in order. ``seen``: how many there were before."""
    if seen < ALL:
        found = list(_of(block, 0, len(block), ALL - seen))
        yield from found
        if len(found) < ALL - seen:
            return
    most, reach = (OF_THE_LAST, 32 * TAIL) if is_last else (OF_A_BLOCK, TAIL)
    yield from _last_ones(block, most, reach)


def estimate(block: bytes, sample: Sequence[tuple[bytes, bool]]) -> int:
    """How many lines of a block count: each line of the ``sample`` with whether it counts. Lines of one form hold a cue
    equally often, so that counting the cue is exact for them. Behind a small sample, only the end of the block is
    counted."""
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
    """The first lines that hold a cue, of those that begin between two places."""
    while most > 0 and (cue := _ANY_CUE.search(block, start, end)):
        found = _END.search(block, cue.start())
        after = found.start() if found else len(block)
        place = max(_start(block, cue.start()), start)
        most -= 1
        yield place, block[place : min(after, place + _LONGEST)]
        start = after + 1


def _last_ones(block: bytes, most: int, reach: int) -> list[tuple[int, bytes]]:
    """The last lines that hold a cue; ``reach``: how many bytes are searched at a time, from the end on."""
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
