"""Suggests changes that save memory; each is traced as the job itself was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from msgspec.structs import replace

from doctor.core.text import counted
from doctor.estimate.data_model import Precision, Strategy, Suggestion, TrainingPlan

LEANER: dict[Strategy, Strategy] = {
    "ddp": "fsdp2",
    "none": "fsdp2",
    "deepspeed-1": "deepspeed-3",
    "deepspeed-2": "deepspeed-3",
}
"""The strategy that shards parameters, gradients and optimizer state, by the one that does not."""

LOWER: dict[Precision, tuple[Precision, str]] = {
    "32-true": ("bf16-mixed", "mixed precision in bf16"),
    "bf16-mixed": ("bf16-true", "weights and optimizer state also in bf16 (small updates are lost)"),
    "16-mixed": ("bf16-true", "weights and optimizer state in bf16 (small updates are lost)"),
}
LEAN_OPTIMIZER = "adafactor"
"""Keeps a row and a column of the second moment instead of Adam's two states (arXiv:1804.04235); from torch 2.5 on."""

LEAST_SAVED, LEAST_GAINED = 0.005, 0.05
"""A suggestion must save at least this share of the peak, or increase the largest batch by more than this share."""


class Candidate(NamedTuple):
    """A change that has not been traced yet."""

    name: str
    words: str
    plan: TrainingPlan


def candidates(plan: TrainingPlan, batch: int, largest: int | None = None) -> Iterator[Candidate]:
    """Return the changes to try, the cheapest first. ``largest``: the largest batch that fits, if known."""
    if plan.ranks_per_device > 1:
        words = f"one rank per device instead of {plan.ranks_per_device}"
        yield Candidate("fewer ranks", words, replace(plan, ranks_per_device=1))
    if batch > 1:
        # Micro-batches that fit; of half the size if the batch fits already.
        parts = 2
        while largest and batch // parts > largest:
            parts *= 2
        times = plan.accumulate * parts
        words = f"{counted(batch // parts, 'sample')} per micro-batch, {times} micro-batches per step"
        yield Candidate("accumulation", words, replace(plan, batch_size=batch // parts, accumulate=times))
    if plan.precision in LOWER:
        precision, words = LOWER[plan.precision]
        yield Candidate(precision, words, replace(plan, precision=precision))
    if not plan.checkpointing:
        words = "activation checkpointing (about a third more compute)"
        yield Candidate("checkpointing", words, replace(plan, checkpointing=True))
    if plan.strategy in LEANER and plan.world_size > 1 and plan.ranks_per_device == 1:
        strategy = LEANER[plan.strategy]
        words = f"{strategy} instead of {plan.strategy}: shards over {plan.world_size} ranks"
        yield Candidate(strategy, words, replace(plan, strategy=strategy))
    if (plan.optimizer or "").lower() not in (LEAN_OPTIMIZER, "sgd"):
        words = f"{LEAN_OPTIMIZER} instead of {plan.optimizer or 'the optimizer'} (needs new tuning)"
        yield Candidate(LEAN_OPTIMIZER, words, replace(plan, optimizer=LEAN_OPTIMIZER))


def traced_suggestion(
    found: list[Candidate], plan: TrainingPlan, before: int, peak: Callable[[TrainingPlan], int | None]
) -> tuple[tuple[Suggestion, ...], tuple[str, ...]]:
    """Return the changes that could be traced, those that save most first, and the names of the others.

    ``before``: the peak of a rank of ``plan`` in bytes. Savings are per device, and negative if the peak rises."""
    suggestions, untried = [], []
    for one in found:
        with_it = peak(one.plan)
        if with_it is None:
            untried.append(one.name)
            continue
        saved = before * plan.ranks_per_device - with_it * one.plan.ranks_per_device
        suggestions.append(
            Suggestion(name=one.name, words=one.words, plan=one.plan, peak_bytes=with_it, saved_bytes=saved)
        )
    return tuple(sorted(suggestions, key=lambda one: -one.saved_bytes)), tuple(untried)


def helps(one: Suggestion, before: int, largest: int | None) -> bool:
    """Whether the change saves memory of ``before`` bytes on a device, or allows a larger batch than ``largest``."""
    if one.saved_bytes >= LEAST_SAVED * before:
        return True
    return bool(largest and one.largest_batch and one.largest_batch > (1 + LEAST_GAINED) * largest)
