"""VER006: the Trainer is told something that this Lightning no longer takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from doctor.api import (
    Finding,
    Job,
    Package,
    Scope,
    Severity,
    Sick,
    Sketch,
    SoftwareFacts,
    TrainerFacts,
    Unknown,
    Variable,
    Verdict,
    Well,
    check,
    healthy,
    trainer_argument,
    trainer_strategy,
)


def _told(lightning: str = "2.6.1", source: str = "PL_TRAINER", **arguments: str) -> Sketch:
    trainer = TrainerFacts(
        source=source,
        strategy=arguments.get("strategy"),
        arguments=tuple(Variable(name, value) for name, value in arguments.items()),
    )
    return healthy().put(trainer, ranks=(0, 1)).alter(SoftwareFacts, packages=(Package("lightning", lightning),))


@check(
    id="VER006",
    severity=Severity.ERROR,
    scope=Scope.RANK,
    when="PM",
    needs=(TrainerFacts, SoftwareFacts),
    cases=lambda: (
        Well("arguments of today", _told(devices="4", strategy="fsdp", precision="bf16-mixed")),
        Well("an old argument under an old Lightning", _told("1.9.5", gpus="4")),
        Well("a strategy that a plug-in registered", _told(strategy="my_strategy")),
        Sick("gpus=4 under Lightning 2", _told(gpus="4"), ranks=(0, 1)),
        Sick("strategy ddp_sharded under Lightning 2", _told(strategy="ddp_sharded"), ranks=(0, 1)),
        Sick(
            "a checkpoint to resume from, which is ignored", _told(resume_from_checkpoint="/c/last.ckpt"), ranks=(0, 1)
        ),
        Sick("an argument of a newer release", _told("1.9.5", barebones="1"), ranks=(0, 1)),
    ),
)
def trainer_argument_removed(job: Job) -> Iterator[Verdict]:
    """Ask whether the installed Lightning still takes every Trainer argument and strategy name that is set.

    Why it hurts: as an argument in code a removed name raises TypeError or ValueError; as a PL_TRAINER_ variable it is
    ignored without a word, so the run uses other devices, another strategy or an empty checkpoint than was meant.
    Fix: write the replacement that the finding names, and unset the old variable.
    """
    found: dict[_Fault, list[int]] = {}
    for trainer, software, alike in job.each(TrainerFacts, SoftwareFacts):
        release = software.version("lightning") or software.version("pytorch-lightning")
        if release is None:
            yield Unknown("which Lightning is installed could not be seen", alike.ranks, "pip show lightning")
            continue
        for fault in _faults(trainer, release):
            found.setdefault(fault, []).extend(alike.ranks)
    for fault, ranks in found.items():
        yield _finding(fault, tuple(ranks))


class _Fault(NamedTuple):
    """``removed`` is ``None`` where the release is older than the argument, which came with ``since``."""

    source: str
    name: str
    value: str
    release: str
    removed: str | None
    since: str | None
    replacement: str


def _faults(trainer: TrainerFacts, release: str) -> Iterator[_Fault]:
    for argument in trainer.arguments:
        known = trainer_argument(argument.name)
        if known and not known.is_taken_by(release):
            value = argument.value
            yield _Fault(trainer.source, argument.name, value, release, known.removed, known.since, known.replacement)
    named = trainer_strategy(trainer.strategy) if trainer.strategy else None
    if named and not named.is_taken_by(release):
        value = trainer.strategy or ""
        yield _Fault(trainer.source, "strategy", value, release, named.removed, named.since, named.replacement)


def _finding(fault: _Fault, ranks: tuple[int, ...]) -> Finding:
    what = f"strategy {fault.value}" if fault.name == "strategy" else f"Trainer argument {fault.name}"
    when = f"was removed in {fault.removed}" if fault.removed else f"came with {fault.since}"
    instead = f"; instead: {fault.replacement}" if fault.replacement else ""
    return Finding(
        f"{what} {when}; Lightning {fault.release} does not take it{instead}",
        ranks=ranks,
        evidence={"argument": fault.name, "value": fault.value, "set_by": fault.source, "lightning": fault.release},
        fix=f"use {fault.replacement}" if fault.replacement else "",
    )
