"""How a run ended, with the evidence for or against calling it healthy.

A log without findings is not proof of health. A run is healthy only if a normal end was logged, or if steps still
advance now. Facts of hosts (captures, tables of nvidia-smi) have no end: checks alone evaluate them.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator

from doctor.analysis.logs.error_lines import NAN, STEP, Place, is_strong, orderly_ends, unexplained_lines
from doctor.analysis.logs.root_event import CRASH, EXCEPTION, nature_of_exception
from doctor.core.facts import Event, LogEvidence, ProgressFacts, RecorderFacts
from doctor.core.job import Job
from doctor.core.report_document import Kind, LastStep, QuotedLine, RunOutcome
from doctor.core.text import ranks_in_words

MOST_LINES = 10
"""The maximum number of quoted lines that look like errors."""
MOST_STEPS = 8
"""The maximum number of processes whose last step is shown."""
LIVE_SECONDS = 120.0
"""Seconds since the last step within which a run counts as running, or the duration of :data:`LIVE_STEPS` steps."""
LIVE_STEPS = 5
_SIGNALLED = ("elastic.sigrecv", "elastic.sigexc", "pl.sigterm", "launch.hangup")
"""Messages of processes that received a signal to end."""


def outcome_of(job: Job, quoted: Collection[Place], now: float) -> RunOutcome | None:
    """How the run of ``job`` ended at ``now`` (seconds since the epoch); ``None`` if there are only facts of hosts.

    ``quoted``: places that findings quote, and so explain."""
    evidence = job.evidence if job.evidence is not None and job.evidence.files else None
    # Logs, which only record failures, have no stage.
    progress = ((rank.number, rank.find(ProgressFacts)) for rank in job.ranks)
    records = {number: facts for number, facts in progress if facts is not None and facts.stage}
    if evidence is None and not records:
        if (stacks := _outcome_of_stacks(job)) is not None:
            return stacks
        if not any(rank.find(RecorderFacts) is not None for rank in job.ranks):
            return None
        reason = "dumps of the flight recorder show one moment, and not how the run ended"
        return RunOutcome("unknown", reason, collect=tuple(_collect(job, "unknown")))
    evidence = evidence or LogEvidence()
    errors = unexplained_lines(evidence, quoted)
    kind, reason, proof = _judged(evidence, records, errors, now)
    return RunOutcome(
        kind,
        reason,
        lines=sum(file.lines for file in evidence.files),
        recognized=sum(file.recognized for file in evidence.files),
        evidence=tuple(map(_quoted, proof)),
        last_steps=_last_steps(evidence, records),
        unexplained=_shown(errors),
        unexplained_lines=len(errors),
        collect=tuple(_collect(job, kind)) if kind in ("interrupted", "unknown") else (),
    )


def _outcome_of_stacks(job: Job) -> RunOutcome | None:
    """What the stacks of ranks that were collected from outside show; ``None`` without any."""
    found = {rank.number: facts for rank in job.ranks if (facts := rank.find(ProgressFacts)) is not None}
    sampled = {rank: facts for rank, facts in found.items() if facts.sampled}
    if not sampled:
        return None
    moving = tuple(sorted(rank for rank, facts in sampled.items() if facts.state == "running"))
    if all(facts.idle is None for facts in sampled.values()):
        reason = "one stack of each rank does not show whether the ranks move"
        return RunOutcome("unknown", reason, collect=(_COLLECT_STACKS,))
    if len(moving) == len(sampled):
        return RunOutcome("running", "the stacks of all ranks changed between the dumps")
    if moving:
        return RunOutcome("running", f"{ranks_in_words(moving)} made progress between the dumps")
    return RunOutcome("unknown", "no stack changed between the dumps", collect=(_COLLECT_STACKS,))


_COLLECT_STACKS = (
    "Collect the stacks of all ranks twice, a minute apart, and give both to `doctor diagnose`: on each host "
    "`py-spy dump --pid PID` for each rank, or `doctor attach -o FOLDER`"
)

Judged = tuple[Kind, str, tuple[Event, ...]]


def _judged(evidence: LogEvidence, records: dict[int, ProgressFacts], errors: list[Event], now: float) -> Judged:
    if records:
        by_records = _by_records(records, now)
        if by_records[0] != "unknown" or not evidence.files:
            return by_records
    # A finding explains a loss of NaN, and does not make the run healthy.
    spoilt = [one for one in evidence.marks if one.kind == NAN]
    ends = orderly_ends(evidence, errors)
    if ends and not spoilt:
        return "ended", "an orderly end was seen", tuple(ends[-2:])
    live = _live_step(evidence, now)
    if live is not None and not any(is_strong(one) for one in errors):
        return "running", "steps still advance", (live,)
    raised = [one for one in evidence.of(EXCEPTION, CRASH) if nature_of_exception(one) == "outside"]
    if interrupted := raised or list(evidence.of(*_SIGNALLED)):
        return "interrupted", f"the run was interrupted: {interrupted[0].text}", tuple(interrupted[:2])
    return "unknown", _why_unknown(evidence, errors), ()


def _by_records(records: dict[int, ProgressFacts], now: float) -> Judged:
    states = {rank: facts.state for rank, facts in records.items()}
    if set(states.values()) == {"ended"}:
        return "ended", "every record shows a normal end", ()
    if set(states.values()) <= {"running", "ended"} and all(_is_live(one, now) for one in records.values()):
        return "running", "steps still advance", ()
    open_ones = sorted(rank for rank, state in states.items() if state != "ended")
    first = open_ones[0]
    return "unknown", f"the record of rank {first} does not show an orderly end (last state: {states[first]})", ()


def _is_live(facts: ProgressFacts, now: float) -> bool:
    if facts.state == "ended":
        return True
    return facts.at is not None and abs(now - facts.at) <= max(LIVE_SECONDS, facts.limit or 0.0)


def _live_step(evidence: LogEvidence, now: float) -> Event | None:
    """The newest step, if it is about as old as a step takes, by its own timestamp because copies have new dates."""
    steps = [one for one in evidence.marks if one.kind == STEP and one.at is not None and one.count > 1]
    newest = max(steps, key=lambda one: one.at or 0.0, default=None)
    if newest is None or newest.at is None:
        return None
    pace = newest.at - float(newest.value("earlier_at") or newest.at)
    # A timestamp without a time zone is read as UTC, but it is in the zone of its host, which mostly is the local one.
    ages = (abs(now - newest.at), abs(now - newest.at + time.localtime(now).tm_gmtoff))
    return newest if pace > 0 and min(ages) <= max(LIVE_SECONDS, LIVE_STEPS * pace) else None


def _why_unknown(evidence: LogEvidence, errors: list[Event]) -> str:
    lines = sum(file.lines for file in evidence.files)
    strong = [one for one in errors if is_strong(one)]
    if strong:
        several = f"{len(strong)} lines look like errors" if len(strong) > 1 else "a line looks like an error"
        return f"{several}, and no check explains {'them' if len(strong) > 1 else 'it'}"
    steps = [one for one in evidence.marks if one.kind == STEP]
    if steps:
        last = max(steps, key=lambda one: (one.at or 0.0, one.line))
        return f"the log stops at {step_in_words(last)}, without an error and without an orderly end"
    is_training = any(file.recognized for file in evidence.files)
    missing = "no training step and no orderly end" if is_training else "no training output was recognized"
    return f"{missing} in {lines} line{'' if lines == 1 else 's'}"


def _shown(errors: list[Event]) -> tuple[QuotedLine, ...]:
    chosen = [one for one in errors if is_strong(one)] or errors
    seen: dict[object, int] = {}
    turns: list[tuple[int, int]] = []
    for number, one in enumerate(chosen):
        who = one.rank if one.rank is not None else one.file
        turns.append((seen.get(who, 0), number))
        seen[who] = seen.get(who, 0) + 1
    first = sorted(number for _, number in sorted(turns)[:MOST_LINES])
    return tuple(_quoted(chosen[number]) for number in first)


def _quoted(event: Event) -> QuotedLine:
    return QuotedLine(event.file, event.line, event.text, event.rank, event.host)


def step_in_words(step: Event) -> str:
    """``epoch 0, batch 37/370``."""
    words = [f"{name} {value}" for name in ("epoch", "batch", "step") if (value := step.value(name))]
    return ", ".join(words) or "a step"


def _last_steps(evidence: LogEvidence, records: dict[int, ProgressFacts]) -> tuple[LastStep, ...]:
    steps: dict[object, LastStep] = {}
    for one in sorted((one for one in evidence.marks if one.kind == STEP), key=lambda one: one.line):
        who = one.rank if one.rank is not None else one.file
        steps[who] = LastStep(step_in_words(one), one.file, one.line, one.rank, one.at)
    for rank, facts in records.items():
        places = (("epoch", facts.epoch), ("batch", facts.batch), ("step", facts.step))
        words = ", ".join(f"{name} {value}" for name, value in places if value is not None)
        if words:
            steps[rank] = LastStep(words, f"rank-{rank}.json", 1, rank, facts.at)
    return tuple(steps.values())[:MOST_STEPS]


def _collect(job: Job, kind: Kind) -> Iterator[str]:
    seen = {event.rank for event in job.evidence.events if event.rank is not None} if job.evidence else set()
    if len(seen) < max(job.world_size, 2):
        yield (
            "The logs of all ranks to their end: `torchrun --tee 3 --log-dir logs train.py`, or "
            "`srun --label python train.py`."
        )
    yield "How the processes ended: `sacct -j JOB --format=JobID,State,ExitCode`, or `dmesg -T | tail -n 50` on a host."
    if kind == "unknown":
        yield "While it hangs: `py-spy dump --pid PID` on each rank."
        yield "For the next run: `export NCCL_DEBUG=INFO PYTHONFAULTHANDLER=1 TORCH_NCCL_DUMP_ON_TIMEOUT=1`."
        # Since torch 2.9 the flight recorder has another variable; each release ignores the other one.
        yield "Flight recorder: `export TORCH_FR_BUFFER_SIZE=2000 TORCH_NCCL_TRACE_BUFFER_SIZE=2000`."
        yield "In the script: `Trainer(callbacks=[DoctorCallback()])` records every rank and reports a hang itself."
