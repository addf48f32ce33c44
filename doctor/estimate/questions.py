"""What the process with torch is asked, and what it answers besides :class:`Traced`."""

from __future__ import annotations

import msgspec

from doctor.estimate.plan import Loading, Plan, Traced

WORKSPACE = 32 << 20
"""Bytes of cuBLAS's workspace on GPUs of compute capability 9.0 and later, twice in a process: one for the thread of
the forward and one for that of the backward pass. 8.125 MiB before 9.0 (aten/src/ATen/cuda/CublasHandlePool.cpp)."""


class Begin(msgspec.Struct, frozen=True, tag=True):
    """Import the factory's module and call it. ``factory``: ``MODULE:FACTORY`` or ``FILE.py:FACTORY``."""

    factory: str
    directory: str


class Step(msgspec.Struct, frozen=True, tag=True):
    """Trace one plan with what the factory made."""

    plan: Plan
    workspace: int = WORKSPACE


Question = Begin | Step


class Answer(msgspec.Struct, frozen=True):
    """``loading`` of a :class:`Begin`, ``traced`` of a :class:`Step`; ``unusable``: what is wrong with the factory or
    the plan, in one sentence."""

    loading: Loading | None = None
    traced: Traced | None = None
    unusable: str = ""
