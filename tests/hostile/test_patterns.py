"""No pattern takes long on any line: each is tried on lines that are made of its own parts.

Work is compared with that of a reference search in the same process, in seconds of this thread's CPU."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import pkgutil
import re
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

import doctor
import doctor_checks
from doctor.knowledge.log_patterns import known_patterns
from tests.hostile.adversarial import adversarial_lines
from tests.lab.sample import ALL, ONE_OF_PATTERNS

SIZE = 8192
"""Characters of a line."""
REFERENCE = "a" * 4000
"""A search that backtracks over these takes 5 ms on the machine on which the limits were set."""
LIMIT, TOGETHER = 1.6, 20
"""References that one pattern may take on one line, and all messages together."""
PLAIN = 0.25
"""Seconds that are far over the limit on any machine: they need no second measurement."""
_BACKTRACKING = re.compile("a*b")
_ANCHORED = frozenset({"match", "fullmatch"})
_METHODS = _ANCHORED | {"search", "sub", "subn", "finditer", "findall", "split"}

Search = Callable[[Any], object]


def seconds(search: Search, line: str | bytes, little: float = 1e-3) -> float:
    """CPU seconds that a search takes; the best of few, unless one is ``little`` already or far too much."""
    best = float("inf")
    for _ in range(4):
        started = time.thread_time()
        search(line)
        best = min(best, time.thread_time() - started)
        if best < little or best > PLAIN:
            break
    return best


def references(search: Search, line: str | bytes) -> float:
    """Times that a search takes of the reference's work, which is measured anew where it matters."""
    little = _reference() * LIMIT / 4
    taken = seconds(search, line, little)
    if taken < little:
        return taken / _reference()
    return taken / seconds(_BACKTRACKING.search, REFERENCE)


@functools.cache
def _reference() -> float:
    return seconds(_BACKTRACKING.search, REFERENCE)


def worst(search: Search, pattern: str | bytes, flags: int) -> tuple[float, str]:
    """The cost of the first line that is over the limit, or of the costliest. Short lines come first: what is worse
    than linear on them would not end soon on longer ones."""
    found = (0.0, "")
    text = pattern if isinstance(pattern, str) else pattern.decode("latin-1")
    for size in (40, 400, 1600, SIZE):
        for line in adversarial_lines(text, flags, size):
            cost = references(search, line if isinstance(pattern, str) else line.encode("latin-1", "replace"))
            found = max(found, (cost, line[:100]))
            if cost * SIZE / size > 5 * LIMIT and cost > LIMIT / 4:
                return cost * SIZE / size, line[:100]
    return found


def test_lines_made_for_a_slow_pattern_are_slow() -> None:
    for slow in (r"x\S+ y", r"\w+:", r"a.*b.*c", r"\s*=\s*\d"):
        assert worst(re.compile(slow).search, slow, 0)[0] > LIMIT, slow


def test_no_message_takes_long_on_any_line() -> None:
    slow = {}
    for message in known_patterns():
        cost, line = worst(message.compiled.search, message.pattern, 0)
        if cost > LIMIT:
            slow[message.kind, line] = cost
    assert not slow


def test_all_messages_together_take_little_on_one_line() -> None:
    """Lines that nearly fit the slowest messages, each handed to all of them."""
    messages = known_patterns()
    lines = {worst(message.compiled.search, message.pattern, 0)[1] for message in messages[:: 9 if ALL else 27]}
    for line in lines:
        long = (line * SIZE)[:SIZE]
        assert references(lambda text: [message.compiled.search(text) for message in messages], long) < TOGETHER, line


def _modules() -> Iterator[ModuleType]:
    for package in (doctor, doctor_checks):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not found.name.endswith("__main__"):
                try:
                    yield importlib.import_module(found.name)
                except ImportError:  # an optional library is not installed
                    continue


def _patterns_in(value: object, depth: int = 0) -> Iterator[re.Pattern[Any]]:
    if isinstance(value, re.Pattern):
        yield value
    elif isinstance(value, dict) and depth < 5:
        for pair in value.items():
            yield from _patterns_in(pair, depth + 1)
    elif isinstance(value, (tuple, list, set, frozenset)) and depth < 5:
        for one in value:
            yield from _patterns_in(one, depth + 1)


def _called(module: ModuleType) -> dict[str, set[str]]:
    """Methods by the name that they are called on; under "" those that are called on anything else."""
    found: dict[str, set[str]] = {}
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.Attribute) and node.attr in _METHODS:
            on = node.value.id if isinstance(node.value, ast.Name) else ""
            if on != "re":
                found.setdefault(on if hasattr(module, on) else "", set()).add(node.attr)
    return found


def _searched() -> dict[re.Pattern[Any], tuple[str, Search]]:
    """All patterns of modules with what is called on them: a search where it is not certain that it is less."""
    methods: dict[re.Pattern[Any], set[str]] = {}
    names: dict[re.Pattern[Any], str] = {}
    for module in _modules():
        called = _called(module)
        for name, value in vars(module).items():
            for pattern in () if name.startswith("__") else _patterns_in(value):
                names.setdefault(pattern, f"{module.__name__}.{name}")
                methods.setdefault(pattern, set()).update(called.get(name) or called.get("", ()))
    return {
        pattern: (names[pattern], pattern.match if called and called <= _ANCHORED else pattern.search)
        for pattern, called in methods.items()
    }


@pytest.mark.timeout(600)
def test_no_pattern_of_a_module_takes_long_on_any_line() -> None:
    slow = {}
    searched = _searched()
    assert len(searched) > 300
    for pattern, (name, search) in [*searched.items()][::ONE_OF_PATTERNS]:
        cost, line = worst(search, pattern.pattern, pattern.flags & ~(re.UNICODE | re.ASCII))
        if cost > LIMIT:
            slow[name, search.__name__, pattern.pattern] = (round(cost, 1), line)
    assert not slow, "\n".join(f"{cost} {name} {line!r}" for name, (cost, line) in slow.items())
