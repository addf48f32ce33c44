"""Splitting of a log into blocks of whole lines, in UTF-8 and without terminal escapes, zeros and marks of quotes.

A line ends with a line feed. Carriage returns separate the states of a progress bar, which are one line of the file.
Zeros fill the gap in a log that was truncated while a process wrote to it.
"""

from __future__ import annotations

import codecs
import itertools
import re
from collections.abc import Iterable, Iterator

BLOCK = 1 << 20
"""Minimum size of a block in bytes; a longer line is split."""
OVERLAP = 1 << 10
"""Bytes of an unfinished line that are kept for the next block, so that no cue is cut in two."""
LONG = 1 << 13
"""Maximum bytes of a line that is read as a whole."""

_ESCAPES = re.compile(rb"\x1b(?:\[[0-?]{0,64}[ -/]{0,8}[@-~]|\][^\x07\x1b\n]{0,512}(?:\x07|\x1b\\)|[@-Z\\^_])")
_SAMPLE = 512
_MARKS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))


def blocks_of(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the text of a file as blocks of whole lines, unless a line is longer than a block."""
    blocks = _blocks_of(pieces)
    first = next(blocks, None)
    if first is None:
        return
    second = next(blocks, None)
    rest = itertools.chain(() if second is None else (second,), blocks)
    mark = _mark_of_quote(first)
    is_escaped = _is_html(first)
    for block in itertools.chain((first,), rest):
        plain = mark.sub(b"", block) if mark else block
        plain = _ENTITY.sub(lambda found: _ENTITIES[found[0]], plain) if is_escaped else plain
        plain = _EMPHASIS.sub(rb"\g<indent>\g<text>", plain) if b"**" in plain or b"`" in plain else plain
        # Text that was copied from a terminal is short.
        yield _unwrapped(plain) if second is None else plain


_EMPHASIS = re.compile(
    rb"^(?P<indent>[ \t]{0,40})(?P<mark>\*\*|__|`)(?P<text>[A-Za-z][^\n`]{0,4000}?)(?P=mark)[ \t]*(?=\r?$)",
    re.MULTILINE,
)
"""A line of Markdown that is bold or code as a whole."""
_ENTITIES = {
    b"&lt;": b"<",
    b"&gt;": b">",
    b"&quot;": b'"',
    b"&#34;": b'"',
    b"&#39;": b"'",
    b"&#x27;": b"'",
    b"&nbsp;": b" ",
    b"&amp;": b"&",
}
_ENTITY = re.compile(b"|".join(_ENTITIES))


def _is_html(block: bytes) -> bool:
    """Return whether a text is the source of a web page: it has entities, and none of what they replace."""
    sample = block[:_QUOTE_SAMPLE]
    return b"&" in sample and not (b"<" in sample or b">" in sample) and _MARKUP.search(sample) is not None


_MARKUP = re.compile(b"&(?:[lg]t|quot|#39|#x27);")


def _unwrapped(block: bytes) -> bytes:
    """Join lines that a terminal of fixed width cut. Empty lines take their place, so that numbers of lines stay."""
    if len(block) > _QUOTE_SAMPLE:
        return block
    lines = block.split(b"\n")
    width = _width_of_terminal(lines)
    if width is None:
        return block
    joined: list[bytes] = []
    row, pending, is_full = b"", 0, False
    for line in lines:
        if is_full and not _BEGINNING.match(line):
            row, pending = row + line, pending + 1
        else:
            joined += [row, *[b""] * pending]
            row, pending = line, 0
        is_full = len(_decoded(line)) == width
    return b"\n".join([*joined[1:], row, *[b""] * pending])


def _width_of_terminal(lines: list[bytes]) -> int | None:
    """Return the length at which several different lines were cut; ``None`` if lines have their own lengths."""
    lengths = [len(_decoded(line)) for line in lines]
    width = max(lengths, default=0)
    cut = [number for number, length in enumerate(lengths[:-1]) if length == width]
    if not MIN_WIDTH <= width <= MAX_WIDTH or len({lines[number] for number in cut}) < 2:
        return None
    followed = [number for number in cut if lines[number + 1] and not _BEGINNING.match(lines[number + 1])]
    rests = {number + 1 for number in cut}
    heads = {_head(line) for number, line in enumerate(lines) if line and number not in rests}
    # A log whose lines have one length by their format begins them in the same way.
    own = [number for number in followed if _head(lines[number + 1]) not in heads]
    return width if 2 * len(own) >= len(cut) and _LETTER.search(lines[cut[0]]) else None


def _head(line: bytes) -> bytes:
    return _DIGITS.sub(b"0", line[:8])


_DIGITS = re.compile(rb"\d+")


def _decoded(line: bytes) -> str:
    return line.decode("utf-8", "replace")


MIN_WIDTH, MAX_WIDTH = 70, 320
"""Range of the width of a terminal, in characters."""
_LETTER = re.compile(rb"[A-Za-z]{2}")
_BEGINNING = re.compile(
    rb"\s|$|[\[({<=*+#|>-]|\d+: |\xe2[\x94\x95]|\d{4}-|\d{1,3}%|\d\d:\d\d|Traceback |File |"
    rb"[A-Z]\w*(?:Error|Exception|Warning)\b|(?:[\w.-]{1,60}:){2,3}\d|(?:INFO|WARN|WARNING|ERROR|DEBUG|srun|slurmstepd|mpirun|terminate|frame)\b"
)
"""What the first line of a message begins with, or a line of an indented text or of a box."""


def _blocks_of(pieces: Iterable[bytes]) -> Iterator[bytes]:
    rest = b""
    for piece in _utf8(pieces):
        if b"\0" in piece:
            piece = piece.translate(None, b"\0")
        data = rest + piece if rest else piece
        if len(data) < BLOCK:
            rest = data
            continue
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1 or max(len(data) - OVERLAP, 1)
        yield _without_escapes(data[:end])
        rest = data[end:]
    if rest:
        yield _without_escapes(rest)


def _mark_of_quote(block: bytes) -> re.Pattern[bytes] | None:
    """Return what precedes each line of a text that was quoted in a mail or indented as code in Markdown."""
    lines = [line for line in block[:_QUOTE_SAMPLE].splitlines() if line.strip()]
    if len(lines) < 2:
        return None
    quoted = [line for line in lines if line.lstrip(b" ").startswith(b">")]
    if len(quoted) > _MOST_LINES * len(lines):
        has_space = all(_SPACED_QUOTE.match(line) for line in quoted)
        return _SPACED_QUOTE if has_space else _TIGHT_QUOTE
    # A long message of an exception is indented, too, but not its first line.
    return _INDENT if all(map(_INDENT.match, lines)) else None


_QUOTE_SAMPLE = 1 << 16
_MOST_LINES = 0.9
"""Minimum share of quoted lines in the sample."""
_SPACED_QUOTE = re.compile(rb"^(?: {0,3}>(?: |(?=\r?$)))+", re.MULTILINE)
_TIGHT_QUOTE = re.compile(rb"^(?: {0,3}>)+", re.MULTILINE)
_INDENT = re.compile(rb"^(?: {4}|\t)", re.MULTILINE)


def _without_escapes(block: bytes) -> bytes:
    return _ESCAPES.sub(b"", block) if b"\x1b" in block else block


def _utf8(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Convert UTF-16, recognized by byte order mark or zeros, to UTF-8; keep other bytes."""
    iterator = iter(pieces)
    head = b""
    for piece in iterator:
        head += piece
        if len(head) >= _SAMPLE:
            break
    encoding, skipped = encoding_of(head)
    if encoding == "utf-8":
        yield head[skipped:]
        yield from iterator
        return
    decoder = codecs.getincrementaldecoder(encoding)("replace")
    yield decoder.decode(head[skipped:]).encode("utf-8", "replace")
    for piece in iterator:
        yield decoder.decode(piece).encode("utf-8", "replace")


def encoding_of(head: bytes) -> tuple[str, int]:
    """Return the encoding (PowerShell's ``>`` writes UTF-16) and the length of the byte order mark."""
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
    """Decode a line, without zeros; replace bytes that are not UTF-8."""
    return line.decode("utf-8", "replace").replace("\0", "").rstrip()


def windows_of(line: bytes, places: Iterable[int]) -> Iterator[tuple[bytes, tuple[int, ...]]]:
    """Yield the parts of a line to read, each with the numbers of the offsets in it.

    A long line is not read as a whole, but as its head, which names the origin, followed by the text at each offset.
    """
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
"""Maximum number of parts of one long line that are read."""
