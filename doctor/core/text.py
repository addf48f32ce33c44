"""Text for users, such as names in natural order (``node2`` before ``node10``), and lists of words from users."""

from __future__ import annotations

import re
from collections.abc import Iterable

_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_NUMBER = re.compile(r"(\d{1,9})", re.ASCII)


def natural_key(name: str) -> tuple[tuple[int, str], ...]:
    """Return the sort key of a name, which orders names by the numbers in them."""
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in _NUMBER.split(name))


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


def byte_size(count: float) -> str:
    """Return a count of bytes in binary units, with three significant digits."""
    unit = 0
    while abs(count) >= 1024 and unit < len(_BYTE_UNITS) - 1:
        count /= 1024
        unit += 1
    return f"{count:.3g} {_BYTE_UNITS[unit]}" if abs(count) < 1000 else f"{count:.0f} {_BYTE_UNITS[unit]}"
