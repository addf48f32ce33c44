"""VER006: the Trainer gets an argument that the installed Lightning does not accept."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from doctor.api import (
    EventGroup,
    Finding,
    Job,
    Scope,
    Severity,
    Unknown,
    Verdict,
    check,
    event_groups,
    finding_from_logs,
    is_logged,
)
from doctor.facts import Package, SoftwareFacts, TrainerFacts, Variable
from doctor.knowledge.lightning_api import argument as trainer_argument
from doctor.knowledge.lightning_api import hook as trainer_hook
from doctor.knowledge.lightning_api import imported as trainer_import
from doctor.knowledge.lightning_api import method as trainer_method
from doctor.knowledge.lightning_api import qualified
from doctor.knowledge.lightning_api import strategy as trainer_strategy
from doctor.testing import Fails, JobBuilder, Passes, healthy, logged


def _with_arguments(lightning: str = "2.6.1", source: str = "PL_TRAINER", **arguments: str) -> JobBuilder:
    trainer = TrainerFacts(
        source=source,
        strategy=arguments.get("strategy"),
        arguments=tuple(Variable(name, value) for name, value in arguments.items()),
    )
    return healthy().put(trainer, ranks=(0, 1)).alter(SoftwareFacts, packages=(Package("lightning", lightning),))


def _from_logs(job: Job) -> Iterator[Finding]:
    for group in event_groups(job, "trainer.strategy_invalid", by=("strategy", "strategy2")):
        name = group.value("strategy", "strategy2") or ""
        known = trainer_strategy(name)
        instead = known.replacement if known else ""
        what = "accelerator" if "accelerator name" in group.first.text else "strategy"
        yield finding_from_logs(
            group,
            f"The installed Lightning does not have the {what} {name}",
            evidence={what: name},
            fix=_fix_of_name(what, name, instead),
            confidence=0.95,
        )


def _fix_of_name(what: str, name: str, instead: str) -> str:
    if what == "accelerator" and name.startswith(("ddp", "dp", "fsdp", "deepspeed")):
        return f'Pass `strategy="{name}"` instead of `accelerator="{name}"`.'
    if what == "accelerator":
        return "Use one of the accelerators that the message lists."
    return _replaced(instead, name) if instead else ""


def _removed_arguments(job: Job) -> Iterator[Finding]:
    for group in event_groups(job, "trainer.unexpected_argument", by=("argument",)):
        name = group.value("argument") or ""
        known = trainer_argument(name)
        is_current = known is not None and not (known.removed or known.since)
        of_lightning = _is_of_lightning(job, group)
        if (
            is_current
            or (group.value("class") or "Trainer") not in ("Trainer", "LightningTrainer")
            or not (known or of_lightning)
        ):
            continue
        replacement = known.replacement if known else ""
        yield finding_from_logs(
            group,
            f"The installed Lightning does not accept the Trainer argument `{name}`",
            evidence={"argument": name, "removed": known.removed if known else None},
            fix=_replaced(replacement, name) if replacement else "",
            confidence=0.95 if of_lightning or group.value("class") else 0.7,
        )


def _removed_names(job: Job) -> Iterator[Finding]:
    """Hooks, methods and imports, which the table of the rule CODE022 has too."""
    for kind, confidence in (("trainer.interface_removed", 0.85), ("trainer.module_removed", 0.7)):
        for group in event_groups(job, kind, by=_NAMES):
            name = group.value(*_NAMES) or ""
            path = ".".join(filter(None, (group.value("package"), name))).removeprefix("pytorch_lightning.")
            known = trainer_hook(name) or trainer_method(name) or trainer_import(path)
            words = qualified(known.replacement, "pytorch_lightning") if known else ""
            when = f"removed in {known.removed}" if known else "has removed"
            yield finding_from_logs(
                group,
                f"The program uses {name}, which Lightning {when}",
                evidence={"name": name},
                fix=f"Instead of `{name}`, use {words}."
                if words
                else f"Replace {name} as Lightning's upgrade guide describes ({_GUIDE}).",
                confidence=confidence,
            )


_NAMES = ("hook", "attribute", "module", "name")
_GUIDE = "https://lightning.ai/docs/pytorch/stable/upgrade/migration_guide.html"


def _is_of_lightning(job: Job, group: EventGroup) -> bool:
    """Whether Lightning's Trainer rejects the argument.

    Lightning is named, or the traceback ends where Lightning passes on the arguments.
    """
    if is_logged(job, "trainer.named") and (group.value("class") or trainer_argument(group.value("argument") or "")):
        return True
    quoted = f"'{group.value('argument')}'"
    ended = [event for one in event_groups(job, "python.exception") for event in one.events if quoted in event.text]
    return any(event.frames and event.frames[0].file.endswith(_HANDS_ON) for event in ended)


_HANDS_ON = ("utilities/argparse.py", "connectors/env_vars_connector.py")
"""Files in which Lightning adds environment variables to a Trainer's arguments."""


@check(
    id="VER006",
    severity=Severity.ERROR,
    scope=Scope.RANK,
    when="PM",
    needs=(TrainerFacts, SoftwareFacts),
    from_logs=(_removed_arguments, _removed_names, _from_logs),
    impacts={
        r"^The program uses": "Every rank fails when it runs this code, and the job ends.",
        r"does not accept the Trainer argument": (
            "The Trainer raises TypeError when it is created, and every rank ends at startup."
        ),
        r"strategy|does not have the accelerator": (
            "The Trainer raises ValueError when it is created, and every rank ends at startup."
        ),
    },
    cases=lambda: (
        Passes("arguments of today", _with_arguments(devices="4", strategy="fsdp", precision="bf16-mixed")),
        Passes("an old argument under an old Lightning", _with_arguments("1.9.5", gpus="4")),
        Passes("a strategy that a plug-in registered", _with_arguments(strategy="my_strategy")),
        Fails("gpus=4 under Lightning 2", _with_arguments(gpus="4"), ranks=(0, 1)),
        Fails("strategy ddp_sharded under Lightning 2", _with_arguments(strategy="ddp_sharded"), ranks=(0, 1)),
        Fails(
            "a checkpoint to resume from, which is ignored",
            _with_arguments(resume_from_checkpoint="/c/last.ckpt"),
            ranks=(0, 1),
        ),
        Fails("an argument of a newer release", _with_arguments("1.9.5", barebones="1"), ranks=(0, 1)),
        Passes(
            "log of an argument of another library",
            logged("TypeError: TrainingArguments.__init__() got an unexpected keyword argument 'evaluation_strategy'"),
        ),
        Passes(
            "log of an argument of the user's own module",
            logged("import pytorch_lightning as pl", "TypeError: __init__() got an unexpected keyword argument 'lr'"),
        ),
        Passes(
            "log of a Trainer of another library",
            logged("TypeError: Trainer.__init__() got an unexpected keyword argument 'tokenizer'"),
        ),
        Fails(
            "logged by an older Python",
            logged(
                "    trainer = pl.Trainer(**arguments)",
                "TypeError: __init__() got an unexpected keyword argument 'progress_bar_refresh_rate'",
            ),
        ),
    ),
)
def trainer_argument_removed(job: Job) -> Iterator[Verdict]:
    """Ask whether the installed Lightning accepts all Trainer arguments and strategy names that are set.

    Why it hurts: in code, a removed argument raises TypeError or ValueError. As a PL_TRAINER_ variable it is silently
    ignored, so the run uses other devices, another strategy or no checkpoint.
    Fix: Use the replacement from Lightning's upgrade guide.
    """
    found: dict[_Fault, list[int]] = {}
    for trainer, software, identical in job.each(TrainerFacts, SoftwareFacts):
        release = software.version("lightning") or software.version("pytorch-lightning")
        if release is None:
            yield Unknown("the release of Lightning could not be read", identical.ranks, "pip show lightning")
            continue
        for fault in _faults(trainer, release):
            found.setdefault(fault, []).extend(identical.ranks)
    for fault, ranks in found.items():
        yield _finding(fault, tuple(ranks))


class _Fault(NamedTuple):
    """``removed`` is ``None`` if the release is older than the argument, which was added in ``since``."""

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
    old = fault.value if fault.name == "strategy" else fault.name
    what = f"the strategy {old}" if fault.name == "strategy" else f"the Trainer argument {old}"
    when = f"removed in {fault.removed}" if fault.removed else f"added in {fault.since}"
    summary, variable = f"Lightning {fault.release} does not accept {what} ({when})", _variable(fault)
    if variable and fault.name != "strategy":
        summary = f"Lightning {fault.release} ignores {variable} (Trainer argument {when})"
    return Finding(
        summary,
        ranks=ranks,
        evidence={
            "argument": fault.name,
            "value": fault.value,
            "set_by": variable or fault.source,
            "lightning": fault.release,
        },
        effect=_IGNORED if variable and fault.name != "strategy" else "",
        fix=_fix(fault, old),
    )


def _variable(fault: _Fault) -> str:
    """``PL_TRAINER_GPUS``; empty for an argument in the program."""
    return f"PL_TRAINER_{fault.name.upper()}" if fault.source.startswith("PL_TRAINER") else ""


def _fix(fault: _Fault, old: str) -> str:
    variable = _variable(fault)
    if variable and fault.name == "strategy" and re.fullmatch(r"\w+", fault.replacement):
        return f"export {variable}={fault.replacement}"
    unset = f"run `unset {variable}`" if variable and fault.name != "strategy" else ""
    if fault.replacement and unset:
        is_kept = fault.name in _SAME_VALUE and fault.value.isalnum()
        new = fault.replacement.replace("=…", f"={fault.value}") if is_kept else fault.replacement
        if fault.name == "resume_from_checkpoint" and _PATH.fullmatch(fault.value):
            new = fault.replacement.replace("=…", f'="{fault.value}"')
        return f"Use {_as_code(new)} in the program, and {unset}."
    if fault.replacement:
        return _replaced(fault.replacement, old)
    if fault.removed is None:
        return f"Install Lightning {fault.since} or newer{f', or {unset}' if unset else ''}."
    return f"{unset[:1].upper()}{unset[1:]}." if unset else ""


def _replaced(replacement: str, old: str) -> str:
    return f"Use {_as_code(replacement)} instead of `{old}`."


def _as_code(replacement: str) -> str:
    """The replacement with its code in backticks: names, calls and arguments, not words between them."""
    words, _, alternative = replacement.partition(", or ")
    code, space, note = words.partition(" (")
    shown = f"`{code}`{space}{note}" if _CODE.fullmatch(code) else words
    return f"{shown} or {_as_code(alternative)}" if alternative else shown


_CODE = re.compile(r"(?:\.?\w+(?:\([^()]*\))?)+|\w+=\S+(?:, \w+=(?:…|\w+))?")


_PATH = re.compile(r"[\w./-]{1,200}")
_SAME_VALUE = frozenset({"checkpoint_callback", "gpus", "num_processes", "replace_sampler_ddp", "tpu_cores"})
"""Arguments whose replacement takes the same number or flag."""
_IGNORED = "Lightning reports no error, and the Trainer uses its default instead of the value."
