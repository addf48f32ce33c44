"""Findings that :mod:`doctor.knowledge.log_patterns` declares, where the message itself is the finding."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator

from doctor.core.finding import Finding, Severity
from doctor.core.job import Job
from doctor.core.logs.event_groups import EventGroup, event_groups, finding_from_logs, is_logged
from doctor.core.message_bounds import MOST_RANKS
from doctor.core.text import lazy_compile, ranks_in_words
from doctor.knowledge.log_patterns import LogFinding, known_patterns

_OPTIONAL = lazy_compile(r"\[([^][]*\{[^][]*)\]")
_NUMBER = lazy_compile(r"\b\d{1,7}\b")
_PLACE = lazy_compile(r"\{([\w|]+)(?:\?([^{}]*))?\}")


def declared_findings(job: Job, check_id: str) -> Iterator[Finding]:
    """The findings that log patterns declare for a check, in the order of the patterns."""
    for kind, declared in _by_check().get(check_id, ()):
        if not (declared.unless and is_logged(job, *declared.unless)):
            for group in event_groups(job, kind, by=declared.by):
                yield _finding(group, declared)


@functools.cache
def _by_check() -> dict[str, list[tuple[str, LogFinding]]]:
    found: dict[str, list[tuple[str, LogFinding]]] = {}
    for pattern in known_patterns():
        if pattern.finding is not None:
            found.setdefault(pattern.check, []).append((pattern.kind, pattern.finding))
    return found


def _finding(group: EventGroup, declared: LogFinding) -> Finding:
    values = {key: group.value(*names.split("|")) for key, names in declared.evidence.items()}
    ranks = _blamed(group, declared)
    return finding_from_logs(
        group,
        _filled(declared.summary, group, ranks or ()).rstrip(" .:"),
        ranks=ranks,
        evidence={key: value for key, value in values.items() if value is not None},
        fix=_filled(declared.fix, group, ranks or ()),
        severity=Severity(declared.severity) if declared.severity else None,
        confidence=declared.confidence,
        explains=declared.explains,
        symptoms=declared.symptoms,
    )


def _blamed(group: EventGroup, declared: LogFinding) -> tuple[int, ...] | None:
    """The ranks that the message blames; ``None`` for those that logged it."""
    if not declared.blames:
        return None if declared.names_ranks else ()
    numbers = {int(word) for word in _NUMBER.findall(group.value(*declared.blames) or "")}
    return tuple(sorted(number for number in numbers if number < MOST_RANKS))


def _filled(template: str, group: EventGroup, blamed: tuple[int, ...]) -> str:
    """The template with the values of the events filled in."""

    def value(place: re.Match[str]) -> str:
        if place[1] == "on_hosts":
            return group.on_hosts
        if place[1] == "blamed":
            return ranks_in_words(blamed) if blamed else ""
        if place[2] is not None:
            values = {found for name in place[1].split("|") for found in group.values(name)}
            return values.pop() if len(values) == 1 else place[2]
        return group.value(*place[1].split("|")) or ""

    def optional(part: re.Match[str]) -> str:
        return part[1] if all(map(value, _PLACE.finditer(part[1]))) else ""

    return _PLACE.sub(value, _OPTIONAL.sub(optional, template))
