"""What is to be estimated: what was typed, over what the factory's Trainer says, over what is usual."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from doctor.core.errors import UnusableError
from doctor.estimate.data_model import TrainingPlan

MOST_RANKS = 1 << 20
"""Ranks of a job that are believed."""


def plan_of(typed: Mapping[str, Any], asked: TrainingPlan | None) -> TrainingPlan:
    """The plan; ``typed``: fields of :class:`TrainingPlan`, ``None`` where nothing was typed. Several ranks without a
    strategy train by ``ddp``, as Lightning's ``auto`` does.

    Raises:
        UnusableError: the parts contradict each other.
    """
    said = {name: value for name, value in typed.items() if value is not None}
    plan = msgspec.structs.replace(asked or TrainingPlan(), **said)
    if plan.world_size > MOST_RANKS:
        raise UnusableError(f"a job of {plan.world_size} ranks is beyond what can be estimated")
    if plan.world_size > 1 and plan.strategy == "none":
        if said.get("strategy") == "none":
            return plan
        return msgspec.structs.replace(plan, strategy="ddp")
    return plan
