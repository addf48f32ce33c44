"""What would help, and by how much: each way is traced as the job itself was, none is guessed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from msgspec.structs import replace

from doctor.estimate.data_model import Precision, Strategy, Suggestion, TrainingPlan

REPLICATED: tuple[Strategy, ...] = ("none", "ddp")
LEANER: dict[Strategy, Strategy] = {"ddp": "fsdp2", "none": "fsdp2", "deepspeed-1": "deepspeed-3"}
LEANER["deepspeed-2"] = "deepspeed-3"
"""The strategy that shards parameters, gradients and optimizer state, by the one that does not."""

LOWER: dict[Precision, tuple[Precision, str]] = {
    "32-true": ("bf16-mixed", "mixed precision in bf16"),
    "bf16-mixed": ("bf16-true", "weights and optimizer state in bf16, too (small updates get lost)"),
    "16-mixed": ("bf16-true", "weights and optimizer state in bf16 (small updates get lost)"),
}
LEAN_OPTIMIZER = "adafactor"
"""Keeps a row and a column of the second moment in place of Adam's two (arXiv:1804.04235); from torch 2.5 on."""

LEAST_SAVED, LEAST_GAINED = 0.005, 0.05
"""A way that saves a smaller share of the peak, and makes the largest batch larger by a smaller one, is not worth a
line."""


class Candidate(NamedTuple):
    """A way before it was traced."""

    name: str
    words: str
    plan: TrainingPlan


def candidates(plan: TrainingPlan, batch: int, largest: int | None = None) -> Iterator[Candidate]:
    """What could be tried, the cheapest change first. ``batch``: samples of a micro-batch of ``plan``; ``largest``: the
    largest that fits, where it is known."""
    if plan.ranks_per_device > 1:
        share = plan.ranks_per_device
        yield Candidate("fewer ranks", f"one rank a device in place of {share}", replace(plan, ranks_per_device=1))
    if batch > 1:
        yield _accumulation(plan, batch, largest)
    if plan.precision in LOWER:
        precision, words = LOWER[plan.precision]
        yield Candidate(precision, words, replace(plan, precision=precision))
    if not plan.checkpointing:
        words = "activation checkpointing (about a third more compute)"
        yield Candidate("checkpointing", words, replace(plan, checkpointing=True))
    if plan.strategy in LEANER and plan.world_size > 1 and plan.ranks_per_device == 1:
        strategy = LEANER[plan.strategy]
        words = f"{strategy} in place of {plan.strategy}: shards over {plan.world_size} ranks"
        yield Candidate(strategy, words, replace(plan, strategy=strategy))
    if (plan.optimizer or "").lower() not in (LEAN_OPTIMIZER, "sgd"):
        words = f"{LEAN_OPTIMIZER} in place of {plan.optimizer or 'the optimizer'} (to be tuned anew)"
        yield Candidate(LEAN_OPTIMIZER, words, replace(plan, optimizer=LEAN_OPTIMIZER))


def _accumulation(plan: TrainingPlan, batch: int, largest: int | None) -> Candidate:
    """The same samples a step in micro-batches that fit; of half the size where the batch fits already."""
    parts = 2
    while largest and batch // parts > largest:
        parts *= 2
    times = plan.accumulate * parts
    words = f"{batch // parts} samples at a time, {times} times a step"
    return Candidate("accumulation", words, replace(plan, batch_size=batch // parts, accumulate=times))


def traced_suggestion(
    found: list[Candidate], plan: TrainingPlan, before: int, peak: Callable[[TrainingPlan], int | None]
) -> tuple[tuple[Suggestion, ...], tuple[str, ...]]:
    """All that could be traced, those that save the most first, and the names of the others.

    ``before``: the peak of a rank of ``plan``, bytes; ``peak``: that of another plan, ``None`` where it can't be had.
    What is saved is counted on a device, by all ranks that share it; it is negative where the peak rises.
    """
    ways, untried = [], []
    for one in found:
        with_it = peak(one.plan)
        if with_it is None:
            untried.append(one.name)
            continue
        saved = before * plan.ranks_per_device - with_it * one.plan.ranks_per_device
        ways.append(Suggestion(name=one.name, words=one.words, plan=one.plan, peak_bytes=with_it, saved_bytes=saved))
    return tuple(sorted(ways, key=lambda way: -way.saved_bytes)), tuple(untried)


def helps(way: Suggestion, before: int, largest: int | None) -> bool:
    """Whether it saves memory, or lets a larger batch in than the ``largest`` without it. ``before``: bytes on a device
    without it."""
    if way.saved_bytes >= LEAST_SAVED * before:
        return True
    return bool(largest and way.largest_batch and way.largest_batch > (1 + LEAST_GAINED) * largest)
