"""Styled text in a terminal without rich: width, colors, wrapping and escape sequences.

Ranks of a watched job print findings with it: importing rich draws from ``random`` (rich/style.py), so a program that
imports rich later than the doctor would get other random numbers.
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, NamedTuple

from doctor.core.text import lazy_compile

StyledLine = list[tuple[str, str]]
"""Pairs of text and style, such as ``bold red``."""

PIPED_WIDTH = 120
"""Columns if the output is not a terminal and COLUMNS is not set: log viewers scroll."""

UNKNOWN_WIDTH = 80
"""Columns of a terminal that does not report its size."""

LEAST_WIDTH, MOST_WIDTH = 20, 1000
"""Limits of COLUMNS."""

_ATTRIBUTES = {"bold": "1", "dim": "2"}
_COLORS = {"red": "31", "green": "32", "yellow": "33", "magenta": "35", "cyan": "36"}
"""Parameters of SGR (ECMA-48)."""
_WORD = lazy_compile(r"\s*\S+\s*")
_WITHOUT_WIDTH = ("Mn", "Me", "Cf")
"""Categories of Unicode that take no column: combining marks and format characters."""


class TerminalLook(NamedTuple):
    """How text is shown on a stream. ``styled``: bold and dim text is possible, ``colored``: colors, too."""

    width: int
    styled: bool
    colored: bool


def is_piped(stream: IO[str]) -> bool:
    """Return whether ``stream`` is not a terminal that a user looks at.

    Open MPI gives its ranks a terminal whatever mpirun's own output is (``orte_iof``): theirs counts as a pipe.
    """
    return not stream.isatty() or "OMPI_COMM_WORLD_RANK" in os.environ


def columns_of(stream: IO[str]) -> int:
    """Return COLUMNS within limits, else the columns of the terminal, else those of a pipe."""
    columns = os.environ.get("COLUMNS", "")
    if re.fullmatch("[0-9]{1,9}", columns):
        return min(max(int(columns), LEAST_WIDTH), MOST_WIDTH)
    return PIPED_WIDTH if is_piped(stream) else _terminal_columns(stream)


def _terminal_columns(stream: IO[str]) -> int:
    for descriptor in (stream.fileno, lambda: 0, lambda: 1, lambda: 2):
        try:
            columns = os.get_terminal_size(descriptor()).columns
        except (OSError, ValueError):  # not a descriptor, or not of a terminal
            continue
        if columns:
            return columns
    return UNKNOWN_WIDTH


def look_of(stream: IO[str]) -> TerminalLook:
    """Return how text is shown on ``stream``: plain in a pipe, without colors if NO_COLOR is set."""
    styled = not is_piped(stream) and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")
    return TerminalLook(columns_of(stream), styled, styled and not os.environ.get("NO_COLOR"))


def escape_sequences(line: StyledLine, look: TerminalLook) -> str:
    """Return a line as ``look`` shows it, without blanks at its end."""
    shown = []
    for text, style in _stripped(line):
        known = (_ATTRIBUTES if look.styled else {}) | (_COLORS if look.colored else {})
        codes = ";".join(known[word] for word in style.split() if word in known)
        shown.append(f"\x1b[{codes}m{text}\x1b[0m" if codes and text else text)
    return "".join(shown)


def _stripped(line: StyledLine) -> StyledLine:
    kept = list(line)
    while kept:
        text, style = kept.pop()
        if text := text.rstrip(" "):
            return [*kept, (text, style)]
    return kept


def columns(text: str) -> int:
    """Return the number of columns that ``text`` takes: 2 for wide characters, none for combining ones."""
    return len(text) if text.isascii() else sum(map(_columns, text))


def _columns(character: str) -> int:
    if unicodedata.east_asian_width(character) in ("W", "F"):
        return 2
    return 0 if unicodedata.category(character) in _WITHOUT_WIDTH else 1


def wrapped(line: StyledLine, width: int) -> Iterator[StyledLine]:
    """Yield the lines of at most ``width`` columns into which ``line`` is broken: at line breaks, between words, and
    within words that are longer than a line."""
    width = max(width, 1)
    for one in _lines(line):
        yield from _divided(one, list(_breaks("".join(text for text, _ in one), width)))


def _lines(line: StyledLine) -> Iterator[StyledLine]:
    """Yield the lines of a text, with tabs replaced by blanks."""
    current: StyledLine = []
    for text, style in line:
        first, *others = text.expandtabs().split("\n")
        current.append((first, style))
        for other in others:
            yield current
            current = [(other, style)]
    yield current


def _breaks(text: str, width: int) -> Iterator[int]:
    """Yield the positions where new lines begin."""
    used = 0
    for match in _WORD.finditer(text):
        word, start = match[0], match.start()
        length = columns(word.rstrip())
        if length <= width - used:
            used += columns(word)
        elif length > width:
            chunks = _chunks(word, width)
            for chunk in chunks:
                if start:
                    yield start
                start += len(chunk)
            used = columns(chunks[-1])
        else:
            yield start
            used = columns(word)


def _chunks(word: str, width: int) -> list[str]:
    """Return parts of a word that have at most ``width`` columns each."""
    chunks, used = [""], 0
    for character in word:
        size = _columns(character)
        if used + size > width and chunks[-1]:
            chunks.append("")
            used = 0
        chunks[-1] += character
        used += size
    return chunks


def _divided(line: StyledLine, breaks: Sequence[int]) -> Iterator[StyledLine]:
    spans = list(line)
    position = 0
    for end in breaks:
        part: StyledLine = []
        while position < end:
            text, style = spans.pop(0)
            taken = text[: end - position]
            part.append((taken, style))
            position += len(taken)
            if rest := text[len(taken) :]:
                spans.insert(0, (rest, style))
        yield part
    yield spans


def beside(label: StyledLine, label_columns: int, line: StyledLine, width: int) -> Iterator[StyledLine]:
    """Yield ``line`` wrapped to the right of ``label``, which is padded to ``label_columns``, in ``width`` columns."""
    used = sum(columns(text) for text, _ in label)
    start: StyledLine = [*label, (" " * max(label_columns - used, 0), "")]
    for one in wrapped(line, width - label_columns):
        yield [*start, *one]
        start = [(" " * label_columns, "")]


def indented(lines: Iterable[StyledLine], indent: int) -> Iterator[StyledLine]:
    """Yield the lines with blanks before them."""
    for line in lines:
        yield [(" " * indent, ""), *line]
