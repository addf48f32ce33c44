"""Ranks that do the same work."""

from __future__ import annotations

from doctor.core.facts import ModelFacts, TrainingFacts
from doctor.core.job import Job, Rank


def same_role(job: Job) -> tuple[tuple[Rank, ...], ...]:
    """Groups of two or more ranks that hold the same part of a model on the same kind of device.

    The ranks of a group need the same resources. Stages of a pipeline hold different tensors and are in different
    groups.
    """
    roles: dict[tuple[str, str], list[Rank]] = {}
    for rank in job.ranks:
        model, training = rank.find(ModelFacts), rank.find(TrainingFacts)
        kind = (training.device or "").partition(":")[0] if training else ""
        roles.setdefault((model.digest if model else "", kind), []).append(rank)
    return tuple(tuple(members) for members in roles.values() if len(members) > 1)


def replicas_in(job: Job) -> tuple[tuple[Rank, ...], ...]:
    """Groups of two or more ranks that train one model, each on its own data.

    Each rank holds a whole copy or a shard of the whole model. In a plain training loop these are the ranks that
    one wrapper joins; under a Trainer all ranks, unless it divides the model between some of them.
    """
    groups: dict[int, list[Rank]] = {}
    for rank in job.ranks:
        training = rank.find(TrainingFacts)
        group = 0 if training is None else _group(training)
        if group is not None:
            groups.setdefault(group, []).append(rank)
    return tuple(tuple(members) for members in groups.values() if len(members) > 1)


def _group(training: TrainingFacts) -> int | None:
    if training.data_parallel_root is not None or training.framework == "plain":
        return training.data_parallel_root
    return 0 if training.data_parallel_size in (None, training.world_size) else None


def uses_lightning(job: Job) -> bool:
    """Whether a Lightning Trainer runs the loop, so that advice can name its hooks."""
    return any("lightning" in training.framework for training, _ in job.facts(TrainingFacts))
