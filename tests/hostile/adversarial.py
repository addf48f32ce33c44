"""Lines on which a pattern does the most work: made of the pattern's own parts, so that every repetition in it gets
what it takes, many times, and then what it can't go on with."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any, cast

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    try:
        from re import _constants as sre  # type: ignore[attr-defined]
        from re import _parser as parser
    except ImportError:  # Python 3.10
        import sre_constants as sre  # type: ignore[no-redef]
        import sre_parse as parser  # type: ignore[no-redef]

ENDS = ("", "\x01", "!", " ~")
"""What no repetition takes, so that it gives back piece by piece."""
_REPEATS = tuple(getattr(sre, name) for name in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT") if hasattr(sre, name))
_MANY = 16
_SAMPLES = "0a A.:/_-[(x'\"=,;>{\t"
_OF_CATEGORY = {
    "CATEGORY_DIGIT": str.isdigit,
    "CATEGORY_SPACE": str.isspace,
    "CATEGORY_WORD": lambda char: char.isalnum() or char == "_",
}


def adversarial_lines(pattern: str, flags: int, size: int) -> Iterator[str]:
    """Lines of ``size`` characters for a regular expression of Python."""
    tree = list(cast(Any, parser.parse(pattern, flags & ~4096)))
    seen: set[str] = set()
    for head, unit in _units(tree, ""):
        for first, again in ((head, unit), ("", head + unit), ("", unit)):
            if again and (first, again) not in seen:
                seen.add((first, again))  # type: ignore[arg-type]
                body = first + again * max((size - len(first)) // len(again), 1)
                yield from (body[: size - len(end)] + end for end in ENDS[: 2 if first else 1])


def _units(tree: list[Any], head: str) -> Iterator[tuple[str, str]]:
    """What stands before each repetition, and what it repeats; at the end the whole."""
    for place, (kind, value) in enumerate(tree):
        before = head + _sample(tree[:place])
        if kind in _REPEATS:
            _, high, inner = value
            body = _sample(inner)
            if high >= _MANY:
                yield before, body
            yield from _units(list(inner), before)
        elif kind is sre.SUBPATTERN:
            yield from _units(list(value[-1]), before)
        elif kind is sre.BRANCH:
            for branch in value[1]:
                yield from _units(list(branch), before)
                yield before + _sample(list(branch)), " "
        elif kind in (sre.ASSERT, sre.ASSERT_NOT):
            yield from _units(list(value[1]), before)
        elif str(kind) == "ATOMIC_GROUP":
            yield from _units(list(value), before)
    yield head + _sample(tree), " "
    yield "", head + _sample(tree[:-1])


def _sample(tree: Any) -> str:
    """A text that the nodes match, as far as can be seen at once."""
    return "".join(_of(kind, value) for kind, value in tree)


def _of(kind: Any, value: Any) -> str:
    if kind is sre.LITERAL:
        return chr(value)
    if kind is sre.NOT_LITERAL:
        return next(char for char in _SAMPLES if ord(char) != value)
    if kind is sre.ANY:
        return "a"
    if kind is sre.IN:
        return next((char for char in _SAMPLES if _holds(value, char)), _first(value))
    if kind in _REPEATS:
        return _sample(value[2]) * min(max(value[0], 1), 64)
    if kind is sre.SUBPATTERN:
        return _sample(value[-1])
    if kind is sre.BRANCH:
        return _sample(value[1][0])
    if str(kind) == "ATOMIC_GROUP":
        return _sample(value)
    return ""


def _holds(items: Any, char: str) -> bool:
    negated = items[0][0] is sre.NEGATE
    return any(_is(item, char) for item in items[negated:]) != negated


def _is(item: Any, char: str) -> bool:
    kind, value = item
    if kind is sre.LITERAL:
        return ord(char) == value
    if kind is sre.RANGE:
        return bool(value[0] <= ord(char) <= value[1])
    name = str(value)
    known = _OF_CATEGORY.get(name.replace("NOT_", ""))
    return known is not None and known(char) != ("NOT_" in name)


def _first(items: Any) -> str:
    kind, value = items[0]
    return chr(value if kind is sre.LITERAL else value[0]) if kind in (sre.LITERAL, sre.RANGE) else "~"
