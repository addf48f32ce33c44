"""What logs say, put together for checks: who said it, where it stands, and findings with these lines as evidence."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from doctor.core.facts import Event
from doctor.core.finding import Finding, Severity, Source
from doctor.core.job import Job

SYMPTOMS = ("RUN001", "RUN004", "RUN010", "RUN012", "RUN016", "NCCL013")
"""What a job shows of nearly every fault: ranks that end with some error, wait for others, or lose them. A message that
names the fault itself explains them."""
SHOWN = 6
"""Lines of evidence that a finding shows."""


class EventGroup(NamedTuple):
    """A message and all who said it: ``events`` in the order in which they happened."""

    kind: str
    events: tuple[Event, ...]

    @property
    def first(self) -> Event:
        """Who said it first."""
        return self.events[0]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that said it, as far as that is known."""
        return tuple(sorted({one.rank for one in self.events if one.rank is not None}))

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts on which it was said, as far as they are known."""
        return tuple(dict.fromkeys(one.host for one in self.events if one.host))

    def value(self, name: str) -> str | None:
        """What the message names as ``name``, where it was said first with it."""
        return next((value for one in self.events if (value := one.value(name)) is not None), None)

    def values(self, name: str) -> tuple[str, ...]:
        """All that the messages name as ``name``, each once."""
        named = (one.value(name) for one in self.events)
        return tuple(dict.fromkeys(value for value in named if value is not None))


def event_groups(job: Job, *kinds: str, by: tuple[str, ...] = ()) -> Iterator[EventGroup]:
    """What logs say of these kinds (one that ends in a dot: all that begin with it), messages of one kind together, and
    apart where they name other things as ``by``; in the order in which they were said first."""
    groups: dict[tuple[str, ...], list[Event]] = {}
    for event in job.evidence.of(*kinds) if job.evidence else ():
        named = event.named
        groups.setdefault((event.kind, *(named.get(name, "") for name in by)), []).append(event)
    for key, events in groups.items():
        yield EventGroup(key[0], tuple(events))


def is_logged(job: Job, *kinds: str) -> bool:
    """Whether anybody said it."""
    return bool(job.evidence and job.evidence.of(*kinds))


def finding_from_logs(
    told: EventGroup,
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
) -> Finding:
    """A finding with the lines as its evidence. ``ranks``: to blame; by default those that said it. ``symptoms``: it
    explains what nearly every fault looks like (:data:`SYMPTOMS`), beside ``explains``. A remark (info) explains
    nothing: it says itself that the job can live with it."""
    first = told.first
    consequences = () if severity is Severity.INFO else (*explains, *(SYMPTOMS if symptoms else ()))
    blamed = told.ranks if ranks is None else ranks
    return Finding(
        summary,
        ranks=blamed,
        hosts=() if blamed else told.hosts,
        evidence={**(evidence or {}), "said": [line_of(event) for event in told.events[:SHOWN]], **_times(told)},
        effect=effect,
        fix=fix,
        severity=severity,
        confidence=confidence,
        explains=consequences,
        source=Source(first.file, first.line),
    )


def line_of(event: Event) -> str:
    """The line as evidence: where it stands, who said it, its text."""
    who = f" rank {event.rank}:" if event.rank is not None else f" {event.host}:" if event.host else ""
    return f"{event.file}:{event.line}:{who} {event.text}"


_PLACE = re.compile(r"(?P<file>.+?):(?P<line>[0-9]{1,12}):(?: |$)")


def place_of_line(text: str) -> tuple[str, int] | None:
    """The file and the line that :func:`line_of` put first."""
    found = _PLACE.match(text)
    return (found["file"], int(found["line"])) if found else None


def _times(told: EventGroup) -> dict[str, object]:
    count = sum(event.count for event in told.events)
    return {"times": count} if count > len(told.events) or count > SHOWN else {}
