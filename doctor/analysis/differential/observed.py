"""What the evidence of a job shows of the observations that :mod:`doctor.knowledge.candidate_causes` knows."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from doctor.core.facts import Event, LogEvidence
from doctor.core.job import Job
from doctor.knowledge.candidate_causes import Observation, Symptom, known_observations

FIRST_COLLECTIVES = 5
"""Sequence numbers up to which a collective is one of the first of its group: DDP broadcasts a few at its setup."""
LATER_COLLECTIVES = 500
"""Sequence numbers from which a collective belongs to training."""
_STEP = "mark.step"
_EXITS = ("elastic.failed", "pl.child", "launch.exit_code", "elastic.entry", "launch.spawn_died")


class Observed(NamedTuple):
    """An observation in words, its location if it is a line, and its factors by name of the cause."""

    text: str
    factors: Mapping[str, float]


def observed(job: Job, symptom: Symptom) -> Iterator[Observed]:
    """The observations that the evidence of ``job`` contains, in the order of the data."""
    evidence = job.evidence or LogEvidence()
    by_kind: dict[str, list[Event]] = {}
    for event in (*evidence.events, *evidence.marks):
        by_kind.setdefault(event.kind, []).append(event)
    for one in known_observations():
        if one.absent:
            if by_kind.keys().isdisjoint(one.absent):
                yield Observed(one.says, one.factors)
        elif one.structure:
            if _STRUCTURES[one.structure](job, evidence, symptom):
                yield Observed(one.says, one.factors)
        elif (line := _line(by_kind, one)) is not None:
            yield Observed(f"{one.says} ({line.file}:{line.line})", one.factors)


def _line(by_kind: Mapping[str, Sequence[Event]], observation: Observation) -> Event | None:
    wanted = _beginnings(observation.contains)
    lines = (line for kind in observation.kinds for line in by_kind.get(kind, ()))
    return next((line for line in lines if wanted.search(line.text.lower())), None)


@functools.cache
def _beginnings(words: tuple[str, ...]) -> re.Pattern[str]:
    """A pattern that finds words that begin with one of ``words``, or that finds anything if there is none."""
    return re.compile(f"(?<![a-z0-9])(?:{'|'.join(map(re.escape, words))})" if words else "")


def _after_steps(job: Job, evidence: LogEvidence, symptom: Symptom) -> bool:
    return any(mark.kind == _STEP for mark in evidence.marks)


def _numbers(events: Iterable[Event], name: str) -> list[int]:
    values = (one.value(name) for one in events)
    return [int(value) for value in values if value and value.isascii() and value.isdigit() and len(value) < 12]


def _first_collective(job: Job, evidence: LogEvidence, symptom: Symptom) -> bool:
    numbers = _numbers(evidence.of(*symptom.kinds), "seq")
    return bool(numbers) and min(numbers) <= FIRST_COLLECTIVES


def _later_collective(job: Job, evidence: LogEvidence, symptom: Symptom) -> bool:
    numbers = _numbers(evidence.of(*symptom.kinds), "seq")
    return bool(numbers) and min(numbers) >= LATER_COLLECTIVES


def _one_element(job: Job, evidence: LogEvidence, symptom: Symptom) -> bool:
    return 1 in _numbers(evidence.of(*symptom.kinds)[:1], "nin")


def _all_ranks_report(job: Job, evidence: LogEvidence, symptom: Symptom) -> bool:
    reporting = {one.rank for one in evidence.of(*symptom.kinds) if one.rank is not None}
    return job.world_size > 1 and len(reporting) == job.world_size


def _hosts(evidence: LogEvidence) -> int:
    named = {one.host for one in evidence.events if one.host} | set(evidence.hosts)
    return max([len(named), *_numbers(evidence.of("nccl.nodes"), "nodes")])


def _several_hosts(job: Job, evidence: LogEvidence, symptom: Symptom) -> bool:
    return _hosts(evidence) > 1


def _one_host(job: Job, evidence: LogEvidence, symptom: Symptom) -> bool:
    ranks = {one.rank for one in evidence.events if one.rank is not None}
    return _hosts(evidence) == 1 and 1 < job.world_size == len(ranks)


def _signals(evidence: LogEvidence) -> set[int]:
    """The exit codes of processes; a signal as a negative number."""
    codes = set()
    for one in evidence.of(*_EXITS):
        text = next((value for name in ("code", "exitcode", "code2", "code3") if (value := one.value(name))), "")
        if text.lstrip("-").isdecimal() and len(text) < 6:
            code = int(text)
            codes.add(-code if one.value("sig") else 128 - code if code > 128 else code)
    if evidence.of("exit.killed"):
        codes.add(-9)
    if evidence.of("exit.bus_error"):
        codes.add(-7)
    return codes


def _ended_with(*codes: int) -> Callable[[Job, LogEvidence, Symptom], bool]:
    return lambda job, evidence, symptom: not _signals(evidence).isdisjoint(codes)


def _crashed(job: Job, evidence: LogEvidence, symptom: Symptom) -> bool:
    natives = evidence.of("end.signal", "end.terminate", "end.assertion", "end.heap", "host.segfault")
    return bool(natives) or not _signals(evidence).isdisjoint((-11, -6, -4, -8))


_STRUCTURES: dict[str, Callable[[Job, LogEvidence, Symptom], bool]] = {
    "after-steps": _after_steps,
    "all-ranks-report": _all_ranks_report,
    "bus-error": _ended_with(-7),
    "crashed": _crashed,
    "exit-code-1": _ended_with(1),
    "first-collective": _first_collective,
    "killed": _ended_with(-9),
    "later-collective": _later_collective,
    "one-element": _one_element,
    "one-host": _one_host,
    "several-hosts": _several_hosts,
    "terminated": _ended_with(-15, -1),
}
"""Properties of the evidence as a whole, by name."""
