"""Many small cases in one test: each failed case is reported by its name."""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Callable, Iterable, Sequence

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


def each_case(
    names: str | Sequence[str], cases: Iterable[object], ids: Iterable[str] | Callable[[object], object] | None = None
) -> Callable[[Callable[..., object]], Callable[..., None]]:
    """Like ``pytest.mark.parametrize``, but all cases are one test, which costs less than a test for each.

    All cases share the fixtures of the test: it may not change them.
    """
    names = tuple(name.strip() for name in names.split(",")) if isinstance(names, str) else tuple(names)
    values = [case if len(names) > 1 else (case,) for case in cases]
    labels = [_label(ids, case) for case in values] if ids is None or callable(ids) else [*ids]
    labeled = [*zip(labels, values, strict=True)]

    def wrap(test: Callable[..., object]) -> Callable[..., None]:
        signature = inspect.signature(test)

        @functools.wraps(test)
        def run(**fixtures: object) -> None:
            assert_each(lambda *case: test(**dict(zip(names, case, strict=True)), **fixtures), labeled)

        fixtures = [parameter for name, parameter in signature.parameters.items() if name not in names]
        run.__signature__ = signature.replace(parameters=fixtures)
        return run

    return wrap


def _label(name: Callable[[object], object] | None, case: Sequence[object]) -> str:
    """The name of a case, from its values if there is none."""
    return "-".join(str(name(value)) if name else repr(value)[:80] for value in case)


def _reason(error: BaseException) -> str:
    """The line that failed and what it says; the whole traceback of an exception that is not an assertion."""
    if not isinstance(error, AssertionError):
        return "".join(traceback.format_exception(type(error), error, error.__traceback__))
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{last.name}, line {last.lineno}: {str(error) or last.line}"
