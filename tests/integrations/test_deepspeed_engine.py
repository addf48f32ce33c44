"""What an engine of DeepSpeed tells: which ranks hold equal parameters, and how it trains."""

from __future__ import annotations

from typing import Any

import pytest

from doctor.core.facts import TrainingFacts
from doctor.monitor.integrations.deepspeed_engine import (
    engine_steps,
    holds_equal_parameters,
    is_engine,
    with_engine_facts,
)


class DeepSpeedEngine:
    """The methods that are read."""

    has_moe_layers = zenflow = False
    global_steps = 7

    def __init__(self, stage: int = 0, optimizer: str = "adam", **changes: Any) -> None:
        self.stage, self.optimizer = stage, optimizer
        vars(self).update(changes)

    def zero_optimization_stage(self) -> int:
        return self.stage

    def optimizer_name(self) -> str:
        return self.optimizer

    def gradient_accumulation_steps(self) -> int:
        return 4

    def train_micro_batch_size_per_gpu(self) -> int:
        return 2

    def bfloat16_enabled(self) -> bool:
        return True


class PipelineEngine(DeepSpeedEngine):
    """As DeepSpeed's own is derived."""


@pytest.mark.parametrize(
    ("engine", "equal"),
    [
        (DeepSpeedEngine(0), True),
        (DeepSpeedEngine(1), True),
        (PipelineEngine(1), True),
        (DeepSpeedEngine(2), True),
        (DeepSpeedEngine(3), False),
        (DeepSpeedEngine(1, "ZeroOneAdam"), False),
        (DeepSpeedEngine(1, has_moe_layers=True), False),
        (DeepSpeedEngine(2, zenflow=True), False),
        (DeepSpeedEngine("unreadable"), None),  # type: ignore[arg-type]
    ],
)
def test_which_ranks_hold_equal_parameters(engine: Any, equal: bool | None) -> None:
    assert is_engine(engine)
    assert holds_equal_parameters(engine) is equal


def test_facts_of_an_engine_and_of_one_without_these_methods() -> None:
    facts = with_engine_facts(TrainingFacts(), DeepSpeedEngine(3))
    assert (facts.strategy, facts.accumulate, facts.precision) == ("deepspeed_stage_3", 4, "bf16")
    assert facts.argument("micro batch size") == "2"
    assert engine_steps(DeepSpeedEngine()) == 7
    assert with_engine_facts(TrainingFacts(strategy="DeepSpeedEngine"), object()).strategy == "DeepSpeedEngine"
    assert not is_engine(object())
