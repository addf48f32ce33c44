"""Bytes of a log as blocks that end with a line, in UTF-8 and without terminal colours, and their lines.

A line ends with a line feed; carriage returns part what a progress bar writes over one another, which is one line of
the file all the same.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Iterator

BLOCK = 1 << 20
"""Bytes at which a block is handed on; a line that is longer comes in several."""
OVERLAP = 1 << 10
"""Bytes of a line without an end that wait for the next block, so that no text is cut in two."""
LONG = 1 << 13
"""Bytes of a line that are looked at as a whole."""

_ESCAPES = re.compile(rb"\x1b(?:\[[0-?]{0,64}[ -/]{0,8}[@-~]|\][^\x07\x1b\n]{0,512}(?:\x07|\x1b\\)|[@-Z\\^_])")
_SAMPLE = 512
_MARKS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))


def blocks_of(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The text of a file as blocks of whole lines, except where a line is longer than a block."""
    rest = b""
    for piece in _utf8(pieces):
        data = rest + piece if rest else piece
        if len(data) < BLOCK:
            rest = data
            continue
        end = _last_end(data)
        yield _plain(data[:end])
        rest = data[end:]
    if rest:
        yield _plain(rest)


def _last_end(data: bytes) -> int:
    """Where the last whole line of a block ends, or what can be told of an endless one."""
    return max(data.rfind(b"\n"), data.rfind(b"\r")) + 1 or max(len(data) - OVERLAP, 1)


def _plain(block: bytes) -> bytes:
    """A block without the escape sequences of terminals."""
    return _ESCAPES.sub(b"", block) if b"\x1b" in block else block


def _utf8(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """A stream in UTF-8, whatever its byte order mark or its zeros say; other bytes stay as they are."""
    iterator = iter(pieces)
    head = b""
    for piece in iterator:
        head += piece
        if len(head) >= _SAMPLE:
            break
    encoding, skipped = _encoding(head)
    if encoding == "utf-8":
        yield head[skipped:]
        yield from iterator
        return
    decoder = codecs.getincrementaldecoder(encoding)("replace")
    yield decoder.decode(head[skipped:]).encode("utf-8", "replace")
    for piece in iterator:
        yield decoder.decode(piece).encode("utf-8", "replace")


def _encoding(head: bytes) -> tuple[str, int]:
    """The encoding of a stream that begins so, and the length of its mark. PowerShell's ``>`` and ``Tee-Object`` write
    UTF-16."""
    for mark, encoding in _MARKS:
        if head.startswith(mark):
            return encoding, len(mark)
    sample = head[:_SAMPLE]
    half = len(sample) // 2
    if half >= 8:
        if sample[1::2].count(0) > 0.9 * half and sample[::2].count(0) < 0.1 * half:
            return "utf-16-le", 0
        if sample[::2].count(0) > 0.9 * half and sample[1::2].count(0) < 0.1 * half:
            return "utf-16-be", 0
    return "utf-8", 0


def text_of(line: bytes) -> str:
    """A line as text: without zeros, other encodings than UTF-8 replaced."""
    return line.decode("utf-8", "replace").replace("\0", "").rstrip()


def windows_of(line: bytes, places: Iterable[int]) -> Iterator[tuple[bytes, tuple[int, ...]]]:
    """A line as it is looked at, each time with the numbers of the places that this shows. A long one is not shown
    whole: its head, which tells who says it, and what stands around each place."""
    wanted = tuple(enumerate(places))
    if len(line) <= LONG:
        yield line, tuple(number for number, _ in wanted)
        return
    shown = -1
    for number, place in wanted[:_MOST_WINDOWS]:
        if place >= shown:
            start, shown = max(place - 512, 0), place + LONG // 2
            yield (
                (line[:256] + b" " if start > 256 else b"") + line[start if start > 256 else 0 : shown],
                tuple(other for other, where in wanted[number:] if where < shown),
            )


_MOST_WINDOWS = 64
"""Places of one long line that are looked at."""
