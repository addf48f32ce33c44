"""Causes of a hang or of diverging replicas that the ranks themselves recorded: settings, and parameters left out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from doctor.analysis.call_sites import is_below_backward
from doctor.analysis.hang.diagnosis import Diagnosis
from doctor.analysis.hang.rank_state import RankState
from doctor.analysis.stats.rank_roles import uses_lightning
from doctor.analysis.stats.setting_differences import SettingDifference, setting_differences
from doctor.api import Finding, Job, Rank, ranks_in_words
from doctor.facts import Frame, ReplicaFacts, TrainingFacts

_SHOWN = 3
"""Settings that a claim names, and parameters."""
_EVALUATES = frozenset({"validate", "test", "predict", "sanity"})


class NamedCause(msgspec.Struct, frozen=True):
    """A cause as a ``claim``, its ``ranks`` (``None``: they do not follow from it), and how to fix it."""

    claim: str
    ranks: tuple[int, ...] | None
    fix: str
    evidence: Mapping[str, object]


def with_cause(finding: Finding, cause: NamedCause | None) -> Finding:
    """The finding of the cause, with its fix; what was observed becomes evidence."""
    if cause is None:
        return finding
    return Finding(
        cause.claim,
        ranks=cause.ranks or finding.ranks,
        evidence={"observed": finding.summary, **finding.evidence, **cause.evidence},
        effect=finding.effect,
        fix=cause.fix,
        severity=finding.severity,
        confidence=finding.confidence,
        explains=(*finding.explains, "RUN020"),
        source=finding.source,
    )


def cause_of_calls(job: Job, found: Diagnosis) -> NamedCause | None:
    """Why ranks make different collectives; ``None`` if nothing that was recorded shows it."""
    differences = [one for one in setting_differences(job) if one.changes_calls]
    if differences:
        return _of_settings(differences)
    return _unused_parameters(job, found) or _evaluation_apart(found)


def cause_of_values(job: Job) -> NamedCause | None:
    """Why parameters differ between replicas; ``None`` if nothing that was recorded shows it."""
    differences = [one for one in setting_differences(job) if one.changes_values]
    return _of_settings(differences) if differences else _unfrozen(job)


def _of_settings(differences: list[SettingDifference]) -> NamedCause:
    ranks = tuple(sorted({rank for one in differences for rank in one.ranks}))
    return NamedCause(
        "; ".join(one.text for one in differences[:_SHOWN]),
        ranks if all(one.has_majority for one in differences) else None,
        differences[0].fix,
        {"settings_that_differ": [one.text for one in differences[:16]]} if len(differences) > _SHOWN else {},
    )


def _unused_parameters(job: Job, found: Diagnosis) -> NamedCause | None:
    """Parameters that a rank left out of its loss, while the others wait in backward for their gradients."""
    without = {rank.number: set(_without_gradient(rank)) for rank in job.ranks}
    is_ddp = any("ddp" in (one.strategy or "").lower() or _is_wrapped(one) for one, _ in job.facts(TrainingFacts))
    inside = {rank for rank, one in found.states.ranks.items() if _is_in_backward(one)}
    if not is_ddp or not inside:
        return None
    elsewhere = set[str]().union(*(without.get(rank, set()) for rank in inside))
    # A rank in a hook of the user, within its backward pass, has gradients yet to compute.
    partly = {rank for rank, one in found.states.ranks.items() if is_below_backward(_last_stack(one))}
    left_out = {rank: sorted(names - elsewhere) for rank, names in without.items() if rank not in inside | partly}
    odd = tuple(sorted(rank for rank, names in left_out.items() if names))
    if not odd:
        return None
    names = left_out[odd[0]]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    switch = (
        '`Trainer(strategy="ddp_find_unused_parameters_true")`'
        if uses_lightning(job)
        else "`DistributedDataParallel(model, find_unused_parameters=True)`"
    )
    several = len(odd) > 1
    return NamedCause(
        f"The loss{'es' if several else ''} of {ranks_in_words(odd)} {'do' if several else 'does'} not use "
        f"{', '.join(names[:_SHOWN])}{more}, so DDP waits for {'their' if len(names) > 1 else 'its'} gradient"
        f"{'s' if len(names) > 1 else ''}",
        odd,
        f"Use {switch}, or add the output of the modules of {', '.join(names[:_SHOWN])}{more}, multiplied by 0, to the "
        f"loss on {ranks_in_words(odd)}.",
        {"without_gradient": {str(rank): one[:16] for rank, one in left_out.items()}},
    )


def _last_stack(one: RankState) -> tuple[Frame, ...]:
    return one.failure.frames if one.failure is not None else one.stack


def _without_gradient(rank: Rank) -> tuple[str, ...]:
    facts = rank.find(ReplicaFacts)
    return facts.without_gradient if facts is not None else ()


def _is_wrapped(training: TrainingFacts) -> bool:
    return training.strategy == "DistributedDataParallel"


def _is_in_backward(one: RankState) -> bool:
    return one.may_wait_in_backward or (one.site is not None and one.site.words == "backward")


def _evaluation_apart(found: Diagnosis) -> NamedCause | None:
    """Some ranks evaluate while others train."""
    stages = {rank: one.progress.stage for rank, one in found.states.ranks.items() if one.progress is not None}
    evaluating = tuple(sorted(rank for rank, stage in stages.items() if stage in _EVALUATES))
    training = tuple(sorted(rank for rank, stage in stages.items() if stage == "train"))
    if not evaluating or not training:
        return None
    odd = None if len(evaluating) == len(training) else min(evaluating, training, key=len)
    return NamedCause(
        f"{ranks_in_words(evaluating)} {_be(evaluating)} in evaluation, {ranks_in_words(training)} {_be(training)} in "
        "training",
        odd,
        "Evaluate on all ranks after the same step, or on one rank with `model.module` instead of the wrapped model "
        "and without collectives.",
        {"stages": {str(rank): stage for rank, stage in list(stages.items())[:64]}},
    )


def _be(ranks: Iterable[int]) -> str:
    return "are" if len(tuple(ranks)) > 1 else "is"


def _unfrozen(job: Job) -> NamedCause | None:
    """Parameters that DDP never reduces, because they were frozen when it wrapped the model."""
    names = {rank.number: facts.unfrozen for rank in job.ranks if (facts := rank.find(ReplicaFacts)) is not None}
    known = next((one for one in names.values() if one), ())
    if not known:
        return None
    more = f" and {len(known) - _SHOWN} more" if len(known) > _SHOWN else ""
    was = "were" if len(known) > 1 else "was"
    return NamedCause(
        f"{', '.join(known[:_SHOWN])}{more} {was} frozen when DDP wrapped the model: gradients are not reduced",
        None,
        "Freeze parameters only after DDP has wrapped the model with `find_unused_parameters=True`, or wrap the model "
        "again after they are unfrozen."
        if not uses_lightning(job)
        else "Freeze parameters in `on_fit_start`, which runs after DDP has wrapped the model, and use "
        '`strategy="ddp_find_unused_parameters_true"`.',
        {"unfrozen": list(known[:16])},
    )
