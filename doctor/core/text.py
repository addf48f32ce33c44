"""Text for users, such as names in natural order (``node2`` before ``node10``), counts, lists of words from users, and
patterns that are compiled when text is first searched."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, AnyStr, cast

HERE = "this host"
"""Words of a summary or fix that :func:`doctor.core.finding.merge` replaces with the names of the hosts."""

_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def natural_key(name: str) -> tuple[tuple[int, str], ...]:
    """Return the sort key of a name, which orders names by the numbers in them."""
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in _NUMBER.split(name))


def joined_lines(text: str) -> list[str]:
    """Return the lines of a text with commands, those that a backslash continues as one; not a comment that a command
    follows, as where an earlier launcher is left above it."""
    return _COMMENT_ABOVE_COMMAND.sub(r"\1\n", text).replace("\\\n", " ").splitlines()


def words(text: str) -> list[str]:
    """Return the words of a comma-separated list."""
    return [word.strip() for word in text.split(",") if word.strip()]


def number_runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """The first and last number of each run of consecutive ``numbers``, which ascend."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return runs


def ranges(numbers: Iterable[int]) -> str:
    """Return ``0-7,9`` for integers in any order."""
    runs = number_runs(sorted(set(numbers)))
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in runs)


def byte_size(count: float) -> str:
    """Return a count of bytes in binary units, with three significant digits."""
    unit = 0
    while abs(count) >= 1024 and unit < len(_BYTE_UNITS) - 1:
        count /= 1024
        unit += 1
    return f"{count:.3g} {_BYTE_UNITS[unit]}" if abs(count) < 1000 else f"{count:.0f} {_BYTE_UNITS[unit]}"


class LazyPattern:
    """Stands for a compiled pattern, which it becomes when one of its methods is first looked up."""

    def __init__(self, pattern: Any, flags: int) -> None:
        self._arguments = (pattern, flags)

    def __getattr__(self, name: str) -> Any:
        """Compile the pattern and return an attribute of it."""
        compiled = re.compile(*self._arguments)
        # Later uses find them without a call of this method.
        self.__dict__.update({method: getattr(compiled, method) for method in _PATTERN_METHODS})
        return getattr(compiled, name)


_PATTERN_METHODS = ("search", "match", "fullmatch", "finditer", "findall", "split", "sub", "subn")


def conjunction(words: Sequence[str]) -> str:
    """Words as a list in a sentence: ``a``, ``a and b``, ``a, b and c``."""
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def hosts_text(names: Iterable[str]) -> str:
    """``node1``, ``node1 and node2``, or ``node1 and 3 more hosts``."""
    first, *others = dict.fromkeys(names)
    return f"{first} and {others[0] if len(others) == 1 else f'{len(others)} more hosts'}" if others else first


def ranks_in_words(ranks: tuple[int, ...], most: int = 8) -> str:
    """Ranks as text with folded ranges: ``rank 3``, ``ranks 0 and 2``, ``ranks 0-7, 9 and 4 more``."""
    ordered = sorted(set(ranks))
    runs = number_runs(ordered)
    parts = [word for first, last in runs[:most] for word in _words_of_run(first, last)]
    left = sum(last - first + 1 for first, last in runs[most:])
    return f"rank{'' if len(ordered) == 1 else 's'} " + conjunction([*parts, f"{left} more"] if left else parts)


def _words_of_run(first: int, last: int) -> list[str]:
    """The words of consecutive numbers: two of them are no range."""
    return [f"{first}-{last}"] if last > first + 1 else [str(number) for number in range(first, last + 1)]


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, whose plural ends in ``s``: ``1 host``, ``1,200 hosts``."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def lazy_compile(pattern: AnyStr, flags: int = 0) -> re.Pattern[AnyStr]:
    """Return ``re.compile(pattern, flags)`` for calls of its methods; a malformed pattern raises at the first one.

    For patterns that a healthy run never uses: compiling all of them takes as long as everything else at the import of
    their modules.
    """
    return cast("re.Pattern[AnyStr]", LazyPattern(pattern, flags))


_NUMBER = lazy_compile(r"(\d{1,9})", re.ASCII)
_COMMENT_ABOVE_COMMAND = lazy_compile(
    r"^([ \t]*#[^\n]*)\\\n(?=(?:\w+=\S*[ \t]+)*(?:python3?|accelerate|torchrun|deepspeed|srun|mpirun|bash|sh)[ \t])",
    re.MULTILINE,
)
