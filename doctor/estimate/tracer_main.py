"""The work ``estimate`` of :mod:`doctor.probes.runtime.torch_child_main`: calls a factory once and traces plans with
what it made."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from doctor.core.decoding import prepared
from doctor.core.errors import UnusableError
from doctor.estimate.tracer_protocol import LoadFactory, TracerReply, TracerRequest

if TYPE_CHECKING:
    from doctor.estimate.tracing.step_tracer import StepTracer

_benches: list[StepTracer] = []


def work(argument: bytes) -> TracerReply:
    """Do what the :class:`TracerRequest` in ``argument`` asks; a :class:`LoadFactory` comes first."""
    question: TracerRequest = msgspec.json.decode(argument, type=prepared(TracerRequest))
    try:
        import torch  # noqa: F401 - told apart from what the factory fails to import
    except ImportError as error:
        return TracerReply(unusable=f"torch can't be imported, and an estimate runs on it: {error}")
    try:
        return _answer(question)
    except UnusableError as error:
        return TracerReply(unusable=str(error))


def _answer(question: TracerRequest) -> TracerReply:
    try:
        from doctor.estimate.tracing.step_tracer import StepTracer
    except (ImportError, AttributeError) as error:  # names that are private to torch, and move
        raise UnusableError(f"this torch lacks what an estimate runs on: {error}") from None
    if isinstance(question, LoadFactory):
        _benches[:] = [StepTracer(question.factory, question.directory)]
        return TracerReply(loading=_benches[0].loading)
    return TracerReply(traced=_benches[0].run(question.plan, question.workspace))
