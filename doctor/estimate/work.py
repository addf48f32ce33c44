"""The work ``estimate`` of :mod:`doctor.probes.torch_work`: calls a factory once and traces plans with what it made."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from doctor.errors import UnusableError
from doctor.estimate.questions import Answer, Begin, Question

if TYPE_CHECKING:
    from doctor.estimate.tracing import Bench

_benches: list[Bench] = []


def work(argument: bytes) -> Answer:
    """Do what the :class:`Question` in ``argument`` asks; a :class:`Begin` comes first."""
    question: Question = msgspec.json.decode(argument, type=Question)
    try:
        import torch  # noqa: F401 - told apart from what the factory fails to import
    except ImportError as error:
        return Answer(unusable=f"torch can't be imported, and an estimate runs on it: {error}")
    try:
        return _answer(question)
    except UnusableError as error:
        return Answer(unusable=str(error))


def _answer(question: Question) -> Answer:
    try:
        from doctor.estimate.tracing import Bench
    except (ImportError, AttributeError) as error:  # names that are private to torch, and move
        raise UnusableError(f"this torch lacks what an estimate runs on: {error}") from None
    if isinstance(question, Begin):
        _benches[:] = [Bench(question.factory, question.directory)]
        return Answer(loading=_benches[0].loading)
    return Answer(traced=_benches[0].run(question.plan, question.workspace))
