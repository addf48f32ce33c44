"""Finds commands that end before the lines that were meant to continue them: at a backslash with a blank behind it, or
at a comment."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from doctor.core.text import lazy_compile
from doctor.lint.launch.shell.statements import Statement
from doctor.lint.launch.shell.tokens import Literal

_ESCAPED_BLANK = lazy_compile(r"\\[ \t]+(?:#.*)?$")
_OPTION = lazy_compile(r"\s*--[A-Za-z][\w-]*(?:[= \t]|\\?$)")
_WORD = lazy_compile(r"(?!\d*[<>])[^#|&;()]")
"""What begins a word: no comment, operator or redirection."""


class CutCommand(NamedTuple):
    """``end``: the last line of the command; ``line``: the one that ends it; ``by``: a ``blank``, a ``comment`` or a
    ``newline`` without a backslash; ``rest``: the next line if it was meant to belong to the command, because it is an
    option or further to the right, else empty."""

    end: int
    line: int
    by: str
    rest: str


def cut_commands(text: str, statements: Iterable[Statement]) -> Iterator[CutCommand]:
    """The commands of a script that are cut.

    The shell removes a backslash only together with the newline directly behind it (POSIX.1-2017, Shell Command
    Language, 2.2.1): any other character behind it is literal, so a blank becomes a word and the newline ends the
    command. A comment reaches to the newline, also behind a backslash (2.3): there is nothing that continues it.
    """
    lines = text.split("\n")
    for one in statements:
        end = one.end_line
        last = lines[end - 1]
        behind = next((at for at in range(end, len(lines)) if not lines[at].lstrip().startswith("#")), len(lines))
        if _ESCAPED_BLANK.search(last) and _ends_with_blank(one):
            yield CutCommand(end, end, "blank", _rest(lines, one, end))
        elif last.endswith("\\") and behind > end:
            yield CutCommand(end, end + 1, "comment", _rest(lines, one, behind))
        elif not last.endswith("\\") and behind < len(lines) and _OPTION.match(lines[behind]):
            yield CutCommand(end, end, "newline", _rest(lines, one, behind))


def _ends_with_blank(statement: Statement) -> bool:
    last = statement.words[-1].parts[-1:]
    return any(isinstance(part, Literal) and part.text.endswith((" ", "\t")) for part in last)


def _rest(lines: list[str], statement: Statement, at: int) -> str:
    following = lines[at] if at < len(lines) else ""
    words = following.strip()
    is_inner = _indentation(following) > _indentation(lines[statement.line - 1])
    return words if words.startswith(("-", "+")) or (is_inner and _WORD.match(words)) else ""


def _indentation(line: str) -> int:
    return len(line) - len(line.lstrip())
