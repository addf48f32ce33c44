"""NCCL012: the process group's timeout exceeds the job's time limit."""

from __future__ import annotations

import re
from collections.abc import Iterator

from doctor.analysis.effective_settings import group_by_value
from doctor.analysis.visible_devices import uses_nccl
from doctor.api import Finding, Job, Severity, Verdict, check
from doctor.facts import LaunchFacts, SlurmFacts, SoftwareFacts, TrainerFacts, Variable
from doctor.knowledge.releases import within
from doctor.testing import Fails, Passes, healthy


def _hours(limit: float | None) -> SlurmFacts:
    return SlurmFacts(job_id="4711", state="RUNNING", time_limit=None if limit is None else int(limit * 3600))


def _trainer(timeout: str) -> TrainerFacts:
    return TrainerFacts(source="LT_*", arguments=(Variable("timeout", timeout),))


@check(
    id="NCCL012",
    severity=Severity.INFO,
    needs=(SlurmFacts,),
    cases=lambda: (
        Passes("outside SLURM", healthy(2, 2)),
        Passes("a day", healthy(2, 2).put(_hours(24))),
        Passes("no limit", healthy(2, 2).put(_hours(None))),
        Passes("one process", healthy(1, 1).put(_hours(0.1))),
        Passes("a long time-out in a longer job", healthy(2, 2).put(_hours(4)).put(_trainer("7200"))),
        Fails("ten minutes of time-out in a job of five", healthy(2, 2).put(_hours(5 / 60)), ranks=(0, 1, 2, 3)),
        Fails("half an hour over Gloo in a job of a quarter", healthy(2, 1, gpus=0).put(_hours(0.25)), ranks=(0, 1)),
        Fails(
            "a time-out of two hours in a job of one",
            healthy(2, 2).put(_hours(1)).put(_trainer("02:00:00")),
            ranks=(0, 1, 2, 3),
        ),
    ),
)
def timeout_unfit(job: Job) -> Iterator[Verdict]:
    """Ask whether a hang would be detected before the job reaches its time limit.

    Why it hurts: the scheduler ends the job before the process group times out, so a hang looks like a job that took
    too long, and no dump shows where the ranks were blocked.
    Fix: Pass a timeout below the job's time limit to init_process_group().
    """
    key = group_by_value(
        job,
        SlurmFacts,
        lambda slurm, identical: (
            slurm.time_limit,
            _together(identical.find(LaunchFacts)),
            *_timeout(identical.find(TrainerFacts), identical.find(SoftwareFacts), nccl=uses_nccl(identical)),
        ),
        also=(LaunchFacts, TrainerFacts, SoftwareFacts),
    )
    for (limit, together, timeout, origin), ranks in key:
        if limit is not None and together and timeout > limit > 0:
            call = "DDPStrategy" if origin.endswith("strategy") else "init_process_group"
            yield Finding(
                f"Process-group timeout ({timeout} s, {origin}) exceeds the job's time limit ({limit} s)",
                ranks=ranks,
                fix=f"Pass a timeout below {limit} s, for example `{call}(timeout=timedelta(seconds={limit // 2}))`.",
            )


def _together(launch: LaunchFacts | None) -> bool:
    return bool(launch and launch.running_together and (launch.world_size or 1) > 1)


def _timeout(trainer: TrainerFacts | None, software: SoftwareFacts | None, *, nccl: bool) -> tuple[int, str]:
    """Seconds, and their origin. torch/distributed/constants.py: 1,800 s by default; 600 s for NCCL since torch 2.2."""
    stated = (
        next((argument.value for argument in trainer.arguments if argument.name == "timeout"), None)
        if trainer
        else None
    )
    seconds = _seconds(stated or "")
    if seconds is not None:
        return seconds, "argument of the strategy"
    torch = software.torch.version if software and software.torch else ""
    short = nccl and not within(torch, before="2.2")
    return (600, "PyTorch's default for NCCL") if short else (1800, "PyTorch's default")


def _seconds(text: str) -> int | None:
    if re.fullmatch(r"\d+(\.\d*)?", text):
        return int(float(text))
    match = re.fullmatch(r"(?:(\d+) days?, )?(\d+):(\d\d):(\d\d)(?:\.\d+)?", text)
    if not match:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
