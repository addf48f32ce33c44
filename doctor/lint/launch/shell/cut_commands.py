"""Finds commands that end at a backslash with a blank behind it, which does not continue the line."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from doctor.core.text import lazy_compile
from doctor.lint.launch.shell.statements import Statement
from doctor.lint.launch.shell.tokens import Literal

_ESCAPED_BLANK = lazy_compile(r"\\[ \t]+(?:#.*)?$")
_WORD = lazy_compile(r"(?!\d*[<>])[^#|&;()]")
"""What begins a word: no comment, operator or redirection."""


class CutCommand(NamedTuple):
    """``line``: the one that ends with a backslash and a blank; ``rest``: the next line if it was meant to belong to
    the command, because it is an option or further to the right; else empty."""

    line: int
    rest: str


def cut_commands(text: str, statements: Iterable[Statement]) -> tuple[CutCommand, ...]:
    """The commands of a script whose last word is an escaped blank, or ends with one, at the end of a line.

    The shell removes a backslash only together with the newline directly behind it (POSIX.1-2017, Shell Command
    Language, 2.2.1): any other character behind it is literal, so the blank becomes a word and the newline ends the
    command.
    """
    if "\\ " not in text and "\\\t" not in text:
        return ()
    lines = text.split("\n")
    return tuple(
        CutCommand(one.end_line, _rest(lines, one))
        for one in statements
        if _ends_with_blank(one) and _ESCAPED_BLANK.search(lines[one.end_line - 1])
    )


def _ends_with_blank(statement: Statement) -> bool:
    last = statement.words[-1].parts[-1:]
    return any(isinstance(part, Literal) and part.text.endswith((" ", "\t")) for part in last)


def _rest(lines: list[str], statement: Statement) -> str:
    following = lines[statement.end_line] if statement.end_line < len(lines) else ""
    words = following.strip()
    is_inner = _indentation(following) > _indentation(lines[statement.line - 1])
    return words if words.startswith(("-", "+")) or (is_inner and _WORD.match(words)) else ""


def _indentation(line: str) -> int:
    return len(line) - len(line.lstrip())
