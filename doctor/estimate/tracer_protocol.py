"""What the process with torch is asked, and what it answers besides :class:`TracedStep`."""

from __future__ import annotations

import msgspec

from doctor.estimate.data_model import LoaderUse, TracedStep, TrainingPlan

WORKSPACE = 32 << 20
"""Bytes of cuBLAS's workspace on GPUs of compute capability 9.0 and later, twice in a process: one for the thread of
the forward and one for that of the backward pass. 8.125 MiB before 9.0 (aten/src/ATen/cuda/CublasHandlePool.cpp)."""


class LoadFactory(msgspec.Struct, frozen=True, tag="Begin"):
    """Import the factory's module and call it. ``factory``: ``MODULE:FACTORY`` or ``FILE.py:FACTORY``."""

    factory: str
    directory: str


class TracePlan(msgspec.Struct, frozen=True, tag="Step"):
    """Trace one plan with what the factory made."""

    plan: TrainingPlan
    workspace: int = WORKSPACE


TracerRequest = LoadFactory | TracePlan


class TracerReply(msgspec.Struct, frozen=True):
    """``loading`` of a :class:`LoadFactory`, ``traced`` of a :class:`TracePlan`; ``unusable``: what is wrong with the
    factory or the plan, in one sentence."""

    loading: LoaderUse | None = None
    traced: TracedStep | None = None
    unusable: str = ""
