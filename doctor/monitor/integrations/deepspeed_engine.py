"""What an engine of DeepSpeed tells about the ranks that train with it.

An engine is the model that ``deepspeed.initialize`` returns (deepspeed/runtime/engine.py, ``DeepSpeedEngine``). Its
names have been the same since 0.3; one that a release lacks leaves the fact unknown.
"""

from __future__ import annotations

import sys
from typing import Any

from doctor.core.facts import TrainingFacts, Variable
from doctor.monitor.integrations.hook_guard import value_or_default

PARTED = 3
"""The stage of ZeRO from which on every rank holds only a part of the parameters."""
LOCAL_STEPS = ("zerooneadam",)
"""Optimizers that step several times before ranks are equal again (deepspeed/runtime/fp16/onebit/zoadam.py)."""


def is_engine(module: object) -> bool:
    """Return whether ``module`` is an engine of DeepSpeed."""
    return any(kind.__name__ == "DeepSpeedEngine" for kind in type(module).__mro__)


def zero_stage(engine: Any) -> int | None:
    """Return the stage of ZeRO, 0 to 3; ``None`` if it can't be read."""
    return value_or_default(lambda: int(engine.zero_optimization_stage()), None)


def holds_equal_parameters(engine: Any) -> bool | None:
    """Return whether all ranks of a data-parallel group hold the same parameters; ``None`` if that is unknown.

    Stages 1 and 2 divide states of the optimizer and gradients, and gather the parameters in every step.
    """
    stage = zero_stage(engine)
    if stage is None:
        return None
    optimizer = value_or_default(lambda: str(engine.optimizer_name() or "").lower(), "")
    differs = getattr(engine, "has_moe_layers", False) or getattr(engine, "zenflow", False) or optimizer in LOCAL_STEPS
    return stage < PARTED and not differs


def engine_steps(engine: Any) -> int | None:
    """Return its optimizer steps so far, which it takes after the last of the batches that it accumulates."""
    return value_or_default(lambda: int(engine.global_steps), None)


def with_engine_facts(facts: TrainingFacts, engine: Any) -> TrainingFacts:
    """Return ``facts`` with those of the engine."""
    import msgspec

    stage = zero_stage(engine)
    module = sys.modules.get("deepspeed")
    settings = {
        "deepspeed": value_or_default(lambda: module.__version__, None) if module is not None else None,
        "micro batch size": value_or_default(lambda: engine.train_micro_batch_size_per_gpu(), None),
        "clipping by DeepSpeed": value_or_default(lambda: engine.gradient_clipping(), None),
    }
    return msgspec.structs.replace(
        facts,
        strategy=facts.strategy if stage is None else f"deepspeed_stage_{stage}",
        accumulate=value_or_default(lambda: int(engine.gradient_accumulation_steps()), 1),
        precision=value_or_default(lambda: _precision(engine), None),
        arguments=(
            *facts.arguments,
            *(Variable(name, str(value)) for name, value in settings.items() if value is not None),
        ),
    )


def _precision(engine: Any) -> str:
    return "bf16" if engine.bfloat16_enabled() else "fp16" if engine.fp16_enabled() else "fp32"
