"""Many small cases in one test: each failed case is reported by its name."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable

import pytest

SHOWN = 40
"""Failed cases that are reported in full; further ones are counted."""


def assert_each(judge: Callable[..., object], cases: Iterable[tuple[str, tuple[object, ...]]]) -> None:
    """Call ``judge`` with the arguments of every case; fail with the names and reasons of all cases that failed.

    A case that skips fails the test, as does an empty list of cases: otherwise neither would be noticed.
    """
    count, failures = 0, []
    for name, arguments in cases:
        count += 1
        try:
            judge(*arguments)
        except (Exception, pytest.fail.Exception, pytest.skip.Exception) as error:
            failures.append(f"{name}: {_reason(error)}")
    if not count:
        pytest.fail("there are no cases", pytrace=False)
    if failures:
        more = [f"... and {len(failures) - SHOWN} more"] if len(failures) > SHOWN else []
        lines = "\n\n".join([*failures[:SHOWN], *more])
        pytest.fail(f"{len(failures)} of {count} cases failed:\n\n{lines}", pytrace=False)


def _reason(error: BaseException) -> str:
    """The line that failed and what it says; the whole traceback of an exception that is not an assertion."""
    if not isinstance(error, AssertionError):
        return "".join(traceback.format_exception(type(error), error, error.__traceback__))
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{last.name}, line {last.lineno}: {str(error) or last.line}"
