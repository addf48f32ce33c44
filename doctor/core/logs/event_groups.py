"""Groups of log events as checks read them, and findings with their lines as evidence."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from doctor.core.facts import Event
from doctor.core.finding import Finding, Severity, Source
from doctor.core.job import Job
from doctor.core.report_document import ReportFinding
from doctor.core.text import hosts_text, lazy_compile

SYMPTOMS = ("RUN001", "RUN004", "RUN010", "RUN012", "RUN016", "RUN018", "RUN019", "NCCL013")
"""Symptoms that nearly every fault causes: ranks that fail, wait for others, or lose them, libraries that fail, and
errors that no check knows. A message that identifies the fault itself explains these."""
SHOWN = 6
"""Maximum number of evidence lines in a finding."""


class EventGroup(NamedTuple):
    """Events with the same message, in the order in which they happened."""

    kind: str
    events: tuple[Event, ...]

    @property
    def first(self) -> Event:
        """The first event."""
        return self.events[0]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that logged the message, if known."""
        return tuple(sorted({one.rank for one in self.events if one.rank is not None}))

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts on which the message was logged, if known."""
        return tuple(dict.fromkeys(one.host for one in self.events if one.host))

    @property
    def on_hosts(self) -> str:
        """`` on node1`` for a summary or fix; empty if the hosts are unknown."""
        return f" on {hosts_text(self.hosts)}" if self.hosts else ""

    def value(self, *names: str) -> str | None:
        """The value of the first of these names that has one, from the first event that has it."""
        return next((value for name in names for one in self.events if (value := one.value(name)) is not None), None)

    def values(self, name: str) -> tuple[str, ...]:
        """All distinct values of ``name`` in the events."""
        named = (one.value(name) for one in self.events)
        return tuple(dict.fromkeys(value for value in named if value is not None))


def event_groups(job: Job, *kinds: str, by: tuple[str, ...] = ()) -> Iterator[EventGroup]:
    """Log events of these kinds (:meth:`LogEvidence.of`), grouped by kind and by the values of ``by``, in the order of
    the first event."""
    groups: dict[tuple[str, ...], list[Event]] = {}
    for event in job.evidence.of(*kinds) if job.evidence else ():
        named = event.named
        groups.setdefault((event.kind, *(named.get(name, "") for name in by)), []).append(event)
    for key, events in groups.items():
        yield EventGroup(key[0], tuple(events))


def is_logged(job: Job, *kinds: str) -> bool:
    """Whether any log contains such an event."""
    return bool(job.evidence and job.evidence.of(*kinds))


def finding_from_logs(
    group: EventGroup,
    summary: str,
    *,
    ranks: tuple[int, ...] | None = None,
    evidence: Mapping[str, object] | None = None,
    effect: str = "",
    fix: str = "",
    severity: Severity | None = None,
    confidence: float = 0.9,
    explains: tuple[str, ...] = (),
    symptoms: bool = True,
    hosts: tuple[str, ...] = (),
) -> Finding:
    """A finding with the lines of the events as its evidence.

    ``ranks``: by default those that logged the message. ``hosts``: those that the message names. ``symptoms``: it
    explains :data:`SYMPTOMS` too. A finding of severity info explains nothing, because the job can live with it."""
    consequences = () if severity is Severity.INFO else (*explains, *(SYMPTOMS if symptoms else ()))
    blamed = group.ranks if ranks is None else ranks
    shown = {**(evidence or {}), "said": list(dict.fromkeys(map(line_of, group.events)))[:SHOWN]}
    times = sum(event.count for event in group.events)
    if times > len(group.events) or times > SHOWN:
        shown["times"] = times
    return Finding(
        summary,
        ranks=blamed,
        hosts=hosts or (() if blamed else group.hosts),
        evidence=shown,
        effect=effect,
        fix=fix,
        severity=severity,
        confidence=confidence,
        explains=consequences,
        source=Source(group.first.file, group.first.line),
    )


def line_of(event: Event) -> str:
    """The line as evidence: its location, who logged it, and its text."""
    who = f" rank {event.rank}:" if event.rank is not None else f" {event.host}:" if event.host else ""
    return f"{event.file}:{event.line}:{who} {event.text}"


def quoted_places(findings: Iterable[Finding | ReportFinding]) -> frozenset[tuple[str, int]]:
    """The files and lines that findings quote or are located at."""
    places = set()
    for finding in findings:
        if finding.source and finding.source.line:
            places.add((finding.source.file, finding.source.line))
        said = finding.evidence.get("said")
        lines = said if isinstance(said, (list, tuple)) else ()
        places.update(place for line in lines if (place := place_of_line(str(line))))
    return frozenset(places)


_PLACE = lazy_compile(r"(?P<file>.+?):(?P<line>[0-9]{1,12}):(?: |$)")


def place_of_line(text: str) -> tuple[str, int] | None:
    """The file and the line number at the start of a :func:`line_of` text."""
    found = _PLACE.match(text)
    return (found["file"], int(found["line"])) if found else None
