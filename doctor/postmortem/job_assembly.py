"""Assembly of a job from logs, dumps, snapshots and captures."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import msgspec

from doctor.analysis.hang.exits import nature_of
from doctor.analysis.logs.error_lines import END, STEP
from doctor.analysis.logs.root_event import OUTLIVED_LINES, LaterEvents
from doctor.core.facts import (
    SECTIONS,
    ClockShift,
    Event,
    LogEvidence,
    LogFile,
    Missing,
    MissingReason,
    ProgressFacts,
    Section,
)
from doctor.core.job import UNKNOWN_HOST, Job, Member, build_job
from doctor.core.masking import mask_record
from doctor.postmortem.logs.clock_skew import clock_shifts, in_order, shifted
from doctor.postmortem.logs.outcome_marks.marks import PREFIX as MARK
from doctor.postmortem.logs.rank_sections import MOST_RANKS, hosts_of_tasks, sections_of, world_size_of
from doctor.postmortem.logs.scanner import read_lines
from doctor.postmortem.logs.software_messages import KIND as SOFTWARE
from doctor.postmortem.rank_inference import with_inferred_ranks

NO_EVIDENCE = Missing(MissingReason.UNMEASURED, "no such evidence")
"""Replaces sections that neither a log nor a dump can contain."""
_HOST_FIELDS = frozenset({"host", "hostname", "node", "peer", "remote", "addr", "local_host", "remote_host"})
"""Fields of messages that hold host names or addresses."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")


def sketch_of_lines(lines: Iterable[str], name: str) -> tuple[tuple[Member, ...], LogEvidence, int | None]:
    """Return the processes, the evidence and the world size found in the lines of one log."""
    events, file = read_lines(lines, name)
    evidence = weigh(events, (file,))
    return members_of(evidence), evidence, world_size_of(evidence)


def weigh(events: Iterable[Event], files: Iterable[LogFile]) -> LogEvidence:
    """Combine the events of all logs: in order, by one clock, with inferred ranks and with secrets masked."""
    inferred, files = with_inferred_ranks(tuple(events), files)
    masked = [mask_record(event) for event in inferred]
    events = [event for event in masked if not event.kind.startswith(MARK)]
    marks = (event for event in masked if event.kind.startswith(MARK))
    shifts = clock_shifts(events)
    hosts: dict[str, None] = {}
    for event in events:
        named = [value for name, value in event.values if name in _HOST_FIELDS and _NAME.fullmatch(value)]
        hosts.update(dict.fromkeys([event.host, *named] if event.host else named))
    evidence = LogEvidence(
        events=in_order(shifted(event, shifts) for event in events),
        files=tuple(map(mask_record, files)),
        shifts=tuple(ClockShift(host, seconds) for host, seconds in sorted(shifts.items())),
        hosts=tuple(hosts),
        marks=in_order(shifted(mark, shifts) for mark in marks),
    )
    return msgspec.structs.replace(evidence, events=tuple(_without_survived(evidence)))


def _without_survived(evidence: LogEvidence) -> Iterator[Event]:
    """The events, without messages of other software after which the run went on: libraries log at their level of
    errors also what they handle themselves."""
    aftermath = LaterEvents(evidence)
    later: dict[str, int] = {}
    for mark in evidence.marks:
        if mark.kind in (STEP, END):
            reach = mark.line - (OUTLIVED_LINES if mark.kind == STEP else 0)
            later[mark.file] = max(reach, later.get(mark.file, 0))
    for event in evidence.events:
        is_software = event.kind.startswith(SOFTWARE)
        if not is_software or not (aftermath.outlived(event) or later.get(event.file, 0) > event.line):
            yield event


class ParsedInputs(NamedTuple):
    """Parsed inputs other than logs: sections of ranks, and those of hosts with the name of their file.

    ``homes``: hosts of ranks, as far as known; ``world_size``: lower bound from the process groups in dumps.
    """

    ranks: dict[int, dict[str, Section]]
    homes: dict[int, str]
    hosts: list[tuple[str, tuple[Section, ...]]]
    world_size: int | None = None

    def of_rank(self, rank: int) -> dict[str, Section]:
        """Return the sections of a rank, for adding more."""
        return self.ranks.setdefault(rank, {})


def members_of(evidence: LogEvidence, parsed: ParsedInputs | None = None) -> tuple[Member, ...]:
    """Return the processes found in logs and other inputs, by rank.

    Other inputs of a rank take precedence over logs. Sections of a host belong to the ranks of the host that their file
    is named after, else to the ranks whose host is unknown.
    """
    parsed = parsed or ParsedInputs({}, {}, [])
    logged = sections_of(evidence)
    named = [(event.rank, event.host) for event in evidence.events if event.rank is not None and event.host]
    # torchrun logs "localhost" where the host can't resolve its own name.
    homes = {
        **dict(one for one in named if one[1] == "localhost"),
        **dict(one for one in named if one[1] != "localhost"),
    }
    homes = {**hosts_of_tasks(evidence), **homes, **parsed.homes}
    numbers = (event.rank for event in evidence.events if event.rank is not None)
    ranks = sorted({rank for rank in (*numbers, *logged, *parsed.ranks) if 0 <= rank < MOST_RANKS})
    names = {rank: homes.get(rank) or UNKNOWN_HOST for rank in ranks or ([0] if parsed.hosts else [])}
    of_host: dict[str, dict[str, Section]] = {}
    for file, sections in parsed.hosts:
        of_host.setdefault(_host_named(file, set(names.values())), {}).update({one.key: one for one in sections})
    return tuple(
        Member(
            rank,
            {**_UNSEEN, **of_host.get(name, {}), **_united(logged.get(rank, {}), parsed.ranks.get(rank, {}))},
            (None, None, name),
        )
        for rank, name in names.items()
    )


def _united(logged: Mapping[str, Section], parsed: Mapping[str, Section]) -> dict[str, Section]:
    """The sections from logs and other inputs, with the failure of a rank that only its log shows."""
    progress = _latest(parsed.get(ProgressFacts.key), logged.get(ProgressFacts.key))
    own = {ProgressFacts.key: progress} if progress is not None else {}
    return {**logged, **parsed, **own}


def _host_named(file: str, hosts: set[str]) -> str:
    """Return the host that a file is named after, or the only host."""
    words = {host: re.escape(host.partition(".")[0]) for host in hosts}
    named = [host for host, word in words.items() if re.search(rf"(?<![A-Za-z0-9]){word}(?![A-Za-z0-9])", file)]
    return named[0] if len(named) == 1 else next(iter(hosts)) if len(hosts) == 1 else UNKNOWN_HOST


_UNSEEN: Mapping[str, Missing] = dict.fromkeys(SECTIONS, NO_EVIDENCE)


def with_evidence(
    captured: Job | None,
    members: Iterable[Member],
    evidence: LogEvidence | None,
    world: int | None,
    *,
    world_is_stated: bool = True,
) -> Job:
    """Combine captures and records, other inputs of the ranks, and logs into one job.

    ``captured``: the job of the captures and records, if any. Their sections take precedence over those read from logs,
    except for the failure of a rank, which happens after its last record. ``world_is_stated``: ``world`` is not only a
    lower bound.
    """
    found = {member.rank: member for member in members}
    known = []
    for rank in captured.ranks if captured else ():
        host = rank.host
        own = Member(rank.number, {**host.sections, **rank.sections}, (host.boot_id, host.machine_id, host.name))
        known.append(_joined(own, found.pop(rank.number, None)))
    everyone = [*known, *found.values()]
    return build_job(
        everyone,
        world_size=max(filter(None, (world, captured.world_size if captured else None)), default=len(everyone)),
        world_is_stated=world_is_stated or captured is not None,
        launcher=captured.launcher if captured else None,
        absent=captured.absent if captured else (),
        last_seen=captured.last_seen if captured else (),
        captured=captured.captured if captured else "",
        evidence=evidence,
    )


def _joined(known: Member, found: Member | None) -> Member:
    if found is None:
        return known
    read = {key: value for key, value in found.sections.items() if isinstance(value, Section)}
    own = {key: value for key, value in known.sections.items() if isinstance(value, Section)}
    progress = _latest(own.get(ProgressFacts.key), read.get(ProgressFacts.key))
    late = {ProgressFacts.key: progress} if progress is not None else {}
    return known._replace(sections={**known.sections, **read, **own, **late})


def _latest(record: Section | None, log: Section | None) -> Section | None:
    """Return the progress in the record, with the failure in the log, which is written last.

    A failure caused from outside, such as a signal, does not replace the recorded progress.
    """
    if not isinstance(record, ProgressFacts) or not isinstance(log, ProgressFacts):
        return record or log
    if log.stack and not record.stack:
        record = msgspec.structs.replace(record, stack=log.stack, stack_from=log.stack_from, pid=record.pid or log.pid)
    if record.failure is not None or log.failure is None or nature_of(log.failure) == "outside":
        return record
    return msgspec.structs.replace(record, state="failed", failure=log.failure)
