"""Ranks that do the same work."""

from __future__ import annotations

from doctor.core.facts import ModelFacts, TrainingFacts
from doctor.core.job import Job, Rank


def same_role(job: Job) -> tuple[tuple[Rank, ...], ...]:
    """Groups of two or more ranks with the same part of a model and kind of device, which need the same resources."""
    roles: dict[tuple[str, str], list[Rank]] = {}
    for rank in job.ranks:
        model, training = rank.find(ModelFacts), rank.find(TrainingFacts)
        kind = (training.device or "").partition(":")[0] if training else ""
        roles.setdefault((model.digest if model else "", kind), []).append(rank)
    return tuple(tuple(members) for members in roles.values() if len(members) > 1)


def replicas_in(job: Job) -> tuple[tuple[Rank, ...], ...]:
    """Groups of two or more ranks that train one model or shards of it, each on its own data.

    In a plain training loop these are the ranks that one wrapper joins; under a Trainer all ranks, unless it divides
    the model between some of them."""
    groups: dict[int, list[Rank]] = {}
    for rank in job.ranks:
        training = rank.find(TrainingFacts)
        group: int | None = 0
        if training and (training.data_parallel_root is not None or training.framework == "plain"):
            group = training.data_parallel_root
        elif training and training.data_parallel_size not in (None, training.world_size):
            group = None
        if group is not None:
            groups.setdefault(group, []).append(rank)
    return tuple(tuple(members) for members in groups.values() if len(members) > 1)


def uses_lightning(job: Job) -> bool:
    """Whether a Lightning Trainer runs the loop, so that advice can name its hooks."""
    return any("lightning" in training.framework for training, _ in job.facts(TrainingFacts))
