"""The work ``estimate`` of :mod:`doctor.probes.runtime.torch_child_main`, and its messages: calls a factory once, and
traces plans with its output."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from doctor.core.decoding import prepared
from doctor.core.errors import UnusableError
from doctor.estimate.data_model import LoaderUse, ModelRecipe, TracedStep, TrainingPlan
from doctor.estimate.memory.non_torch import WORKSPACE

if TYPE_CHECKING:
    from doctor.estimate.tracing.step_tracer import StepTracer


class LoadFactory(msgspec.Struct, frozen=True, tag="Begin"):
    """Import the factory's module and call it. ``factory``: ``MODULE:FACTORY`` or ``FILE.py:FACTORY``."""

    factory: str
    directory: str


class LoadModel(msgspec.Struct, frozen=True, tag="Model"):
    """Build a model from a configuration."""

    recipe: ModelRecipe


class TracePlan(msgspec.Struct, frozen=True, tag="Step"):
    """Trace one plan with the factory's output. ``capability``: compute capability of the GPU, empty if unknown."""

    plan: TrainingPlan
    workspace: int = WORKSPACE
    capability: str = ""


TracerRequest = LoadFactory | LoadModel | TracePlan


class TracerReply(msgspec.Struct, frozen=True):
    """The reply to a :data:`TracerRequest`; ``unusable``: what is wrong with it."""

    loading: LoaderUse | None = None
    traced: TracedStep | None = None
    unusable: str = ""


_tracers: list[StepTracer] = []


def work(argument: bytes) -> TracerReply:
    """Run the :class:`TracerRequest` in ``argument``; the first one is not a :class:`TracePlan`."""
    request: TracerRequest = msgspec.json.decode(argument, type=prepared(TracerRequest))
    try:
        import torch  # noqa: F401 - so that this failure is not taken for one of the factory
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":
            return TracerReply(unusable="estimate needs torch, which is not installed: pip install torch")
        return TracerReply(unusable=f"cannot import torch, which estimate needs: {error}")
    try:
        if isinstance(request, TracePlan):
            return TracerReply(traced=_tracers[0].run(request.plan, request.workspace, request.capability))
        _tracers[:] = [_loaded(request)]
        return TracerReply(loading=_tracers[0].loading)
    except UnusableError as error:
        return TracerReply(unusable=str(error))


def _loaded(request: LoadFactory | LoadModel) -> StepTracer:
    try:
        from doctor.estimate.tracing.configured_model import ConfiguredModel
        from doctor.estimate.tracing.factory import find_factory
        from doctor.estimate.tracing.step_tracer import StepTracer
    except (ImportError, AttributeError) as error:  # torch's private names, which change between releases
        raise UnusableError(f"this PyTorch version lacks a feature that estimate needs: {error}") from None
    if isinstance(request, LoadModel):
        return StepTracer(request.recipe.name, partial(ConfiguredModel, request.recipe))
    return StepTracer(request.factory, partial(find_factory, request.factory, Path(request.directory)))
