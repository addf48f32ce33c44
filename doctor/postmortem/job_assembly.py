"""Everything that was read, as one job."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import msgspec

from doctor.analysis.hang.exits import nature_of
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
from doctor.postmortem.logs.rank_sections import sections_of, world_size_of
from doctor.postmortem.logs.scanner import read_lines

NO_EVIDENCE = Missing(MissingReason.UNMEASURED, "no such evidence")
"""Stands where neither a log nor a dump can tell."""
MOST_RANKS = 1 << 17
"""Ranks that logs may tell of: a number in a garbled line is no rank."""

_HOST_FIELDS = frozenset({"host", "hostname", "node", "peer", "remote", "addr", "local_host", "remote_host"})
"""Fields of messages that name hosts or their addresses."""


def sketch_of_lines(lines: Iterable[str], name: str) -> tuple[tuple[Member, ...], LogEvidence, int | None]:
    """The processes, the evidence and the world size that lines of one log tell of."""
    events, file = read_lines(lines, name)
    evidence = weigh(events, (file,))
    return members_of(evidence), evidence, world_size_of(evidence)


def weigh(events: Iterable[Event], files: Iterable[LogFile]) -> LogEvidence:
    """The events of all logs in their order, by one clock, without secrets."""
    everything = [mask_record(event) for event in events]
    events = [event for event in everything if not event.kind.startswith(MARK)]
    marks = (event for event in everything if event.kind.startswith(MARK))
    shifts = clock_shifts(events)
    return LogEvidence(
        events=in_order(shifted(event, shifts) for event in events),
        files=tuple(map(mask_record, files)),
        shifts=tuple(ClockShift(host, seconds) for host, seconds in sorted(shifts.items())),
        hosts=tuple(dict.fromkeys(_hosts_in(events))),
        marks=in_order(shifted(mark, shifts) for mark in marks),
    )


def _hosts_in(events: Iterable[Event]) -> Iterator[str]:
    for event in events:
        if event.host:
            yield event.host
        yield from (value for name, value in event.values if name in _HOST_FIELDS and _NAME.fullmatch(value))


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")


class HostSections(NamedTuple):
    """What was read of a host, and the ``name`` of the file that holds it."""

    name: str
    sections: tuple[Section, ...]


class ParsedInputs(NamedTuple):
    """What else was left: sections of ranks, the hosts of some (``homes``), sections of hosts, and how many ranks the
    groups of dumps tell of."""

    ranks: dict[int, dict[str, Section]]
    homes: dict[int, str]
    hosts: list[HostSections]
    world_size: int | None = None

    def of_rank(self, rank: int) -> dict[str, Section]:
        """What was left of that rank, to be added to."""
        return self.ranks.setdefault(rank, {})


def members_of(evidence: LogEvidence, remains: ParsedInputs | None = None) -> tuple[Member, ...]:
    """The processes that logs tell of, and those of which something else was left, by rank. What was left of a rank is
    nearer to it than what a log says. What was read of a host goes to the ranks of the host that its file is named
    after, else to those whose host is not told."""
    remains = remains or ParsedInputs({}, {}, [])
    told = sections_of(evidence)
    homes = {event.rank: event.host for event in evidence.events if event.rank is not None and event.host}
    homes = {**homes, **remains.homes}
    ranks = _ranks(evidence, [*told, *remains.ranks]) or ([0] if remains.hosts else [])
    names = {rank: homes.get(rank) or UNKNOWN_HOST for rank in ranks}
    of_host = _by_host(remains.hosts, set(names.values()))
    return tuple(
        Member(rank, {**_UNSEEN, **of_host.get(name, {}), **told.get(rank, {}), **remains.ranks.get(rank, {})}, host)
        for rank, name in names.items()
        for host in [(None, None, name)]
    )


def _ranks(evidence: LogEvidence, others: Iterable[int]) -> list[int]:
    speak = (event.rank for event in evidence.events if event.rank is not None)
    return sorted({rank for rank in (*speak, *others) if 0 <= rank < MOST_RANKS})


def _by_host(homes: Iterable[HostSections], hosts: set[str]) -> dict[str, dict[str, Section]]:
    found: dict[str, dict[str, Section]] = {}
    for home in homes:
        found.setdefault(_host_named(home.name, hosts), {}).update({one.key: one for one in home.sections})
    return found


def _host_named(file: str, hosts: set[str]) -> str:
    """The host that a file is named after; where there is only one, that."""
    words = [re.escape(host.partition(".")[0]) for host in hosts]
    named = [host for host, word in zip(hosts, words, strict=True) if re.search(_A_WORD.format(word), file)]
    return named[0] if len(named) == 1 else next(iter(hosts)) if len(hosts) == 1 else UNKNOWN_HOST


_A_WORD = r"(?<![A-Za-z0-9]){}(?![A-Za-z0-9])"

_UNSEEN: Mapping[str, Missing] = dict.fromkeys(SECTIONS, NO_EVIDENCE)


def with_evidence(
    captured: Job | None, members: Iterable[Member], evidence: LogEvidence | None, world: int | None
) -> Job:
    """One job of what captures and records hold, what else was left of its ranks, and what logs say.

    ``captured``: their job, if there are any; a section that they hold goes before one read from a log, but for the
    failure of a rank, which comes after the last record of it.
    """
    told = {member.rank: member for member in members}
    known = [] if captured is None else [_joined(member, told.pop(member.rank, None)) for member in _members(captured)]
    everyone = [*known, *told.values()]
    return build_job(
        everyone,
        world_size=max(filter(None, (world, captured.world_size if captured else None)), default=len(everyone)),
        launcher=captured.launcher if captured else None,
        absent=captured.absent if captured else (),
        last_seen=captured.last_seen if captured else (),
        captured=captured.captured if captured else "",
        evidence=evidence,
    )


def _members(job: Job) -> Iterator[Member]:
    for rank in job.ranks:
        host = rank.host
        yield Member(rank.number, {**host.sections, **rank.sections}, (host.boot_id, host.machine_id, host.name))


def _joined(known: Member, told: Member | None) -> Member:
    """A rank that was captured, with what else was left of it."""
    if told is None:
        return known
    read = {key: value for key, value in told.sections.items() if isinstance(value, Section)}
    own = {key: value for key, value in known.sections.items() if isinstance(value, Section)}
    progress = _latest(own.get(ProgressFacts.key), read.get(ProgressFacts.key))
    late = {ProgressFacts.key: progress} if progress is not None else {}
    return known._replace(sections={**known.sections, **read, **own, **late})


def _latest(record: Section | None, log: Section | None) -> Section | None:
    """Where a rank was by its record, and how it failed by the log, which was written until its end; that others ended
    it tells nothing of where it was."""
    if not isinstance(record, ProgressFacts) or not isinstance(log, ProgressFacts):
        return record or log
    if record.failure is not None or log.failure is None or nature_of(log.failure) == "outside":
        return record
    return msgspec.structs.replace(record, state="failed", failure=log.failure)
