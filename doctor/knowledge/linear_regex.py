r"""Regular expressions over text that others wrote.

A log, a record or a file name may be made so that a backtracking search takes hours. RE2 searches in time that is
linear in the text, whatever the pattern is. It has no lookahead and no lookbehind: the few patterns that need them stay
with :mod:`re`, and ``tests/hostile`` proves a bound for each of them. Where RE2 is not installed (it has no wheels for
musl or ppc64le), all patterns stay with :mod:`re`, and the time budget of a file is the only bound.

``\d``, ``\w``, ``\s`` and ``\b`` are those of ASCII in RE2.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple, Protocol

try:
    import re2
except ImportError:
    re2 = None  # type: ignore[assignment]

MOST_MEMORY = 1 << 20
"""Bytes that one pattern may use for its automaton: hostile text fills it, and there are hundreds of patterns."""


class Match(Protocol):
    """What a search found."""

    def groupdict(self) -> dict[str, str | Any]:
        """The named groups; ``None`` for those that did not take part."""


class Pattern(Protocol):
    """A pattern that can be searched."""

    def search(self, text: str, /) -> Match | None:
        """Find the first match."""


def linear(pattern: str) -> Pattern:
    """Compile a pattern with RE2 where RE2 can express it, with :mod:`re` otherwise.

    Raises:
        re.error: it is not a valid regular expression.
    """
    if re2 is None:
        return re.compile(pattern)
    try:
        compiled: Any = re2.compile(pattern.encode(), _options())  # type: ignore[no-untyped-call]
        return _LinearPattern(compiled)
    except re2.error:
        return re.compile(pattern)


def linear_bytes(pattern: bytes) -> re.Pattern[bytes]:
    """Compile a pattern of bytes, which RE2 can express, with RE2 if it is installed and with :mod:`re` otherwise. The
    patterns of both have the same methods."""
    if re2 is None:
        return re.compile(pattern)
    options = _options()
    options.encoding = re2.Options.Encoding.LATIN1
    compiled: re.Pattern[bytes] = re2.compile(pattern, options)  # type: ignore[no-untyped-call]
    return compiled


def _options() -> Any:
    options = re2.Options()
    options.log_errors = False
    options.max_mem = MOST_MEMORY
    return options


def loose(pattern: str) -> str:
    """A pattern without its lookarounds, as a group: it matches wherever the pattern does, and RE2 can express it."""
    flag, pattern = ("i", pattern[4:]) if pattern.startswith("(?i)") else ("", pattern)
    kept: list[str] = []
    depth = 0
    """Groups that are open, from the outermost lookaround on."""
    for part in _PARTS.findall(pattern):
        if depth or part in _LOOKAROUNDS:
            depth += part.startswith("(") - (part == ")")
        else:
            kept.append(part)
    return f"(?{flag}:{''.join(kept)})"


_LOOKAROUNDS = ("(?=", "(?!", "(?<=", "(?<!")
_PARTS = re.compile(r"(?s)\\.|\[\^?\]?(?:\\.|[^\]\\]){0,200}\]|\(\?<?[=!]|.")


class _LinearPattern:
    """A pattern of RE2. Text is handed over as bytes, so that no offsets have to be translated."""

    __slots__ = ("_names", "_regexp")

    def __init__(self, regexp: Any) -> None:
        self._regexp = regexp
        numbered = sorted((number, name.decode()) for name, number in regexp.groupindex.items())
        self._names: tuple[tuple[int, str], ...] = tuple(numbered)

    def search(self, text: str, /) -> Match | None:
        found = self._regexp.search(text.encode("utf-8", "replace"))
        return None if found is None else _LinearMatch(found, self._names)


class _LinearMatch(NamedTuple):
    found: Any
    names: tuple[tuple[int, str], ...]

    def groupdict(self) -> dict[str, str | Any]:
        values: dict[str, bytes | None] = {name: self.found.group(number) for number, name in self.names}
        return {name: None if value is None else value.decode("utf-8", "replace") for name, value in values.items()}
