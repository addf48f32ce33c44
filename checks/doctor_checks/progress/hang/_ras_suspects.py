"""Ranks that NCCL's RAS service reports as dead, unresponsive or behind the others.

Collective counts of a healthy job differ for moments. They count only if two reports show the same ones (``stuck``) and
no process is dead, which would be the cause.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from doctor.api import EventGroup, Finding, Job, event_groups, finding_from_logs, ranks_in_words
from doctor.facts import Event

State = Literal["dead", "silent", "behind"]

DEAD, SILENT, BEHIND = 0.85, 0.6, 0.75
"""Confidence. RAS reports a process as dead if it was unreachable for a minute; a process that did not answer one
request in time may be busy or frozen."""


class RasSuspect(msgspec.Struct, frozen=True):
    """Ranks in one state. ``ranks`` is empty if RAS gives only their numbers in a smaller communicator; ``claim`` names
    the processes then."""

    state: State
    ranks: tuple[int, ...]
    claim: str
    events: EventGroup
    confidence: float

    def finding(self, fix: str) -> Finding:
        """The finding about it. ``fix``: ``{who}`` is replaced by the ranks or processes."""
        fix = fix.format(who=_names(self.events))
        return finding_from_logs(self.events, self.claim, ranks=self.ranks, confidence=self.confidence, fix=fix)


def ras_suspects(job: Job) -> Iterator[RasSuspect]:
    """The dead ranks; if there are none, the unresponsive ones; if there are none, those that are behind."""
    states = (_unreachable(job, "ras.rank_dead"), _unreachable(job, "ras.rank_missing"), tuple(_behind(job)))
    yield from next((found for found in states if found), ())


def _unreachable(job: Job, kind: str) -> tuple[RasSuspect, ...]:
    """Processes that RAS does not reach. One that answered and has left a communicator is not among them."""
    found = []
    for group in event_groups(job, kind):
        events = tuple(event for event in group.events if event.value("why") != "left")
        if events:
            gone = EventGroup(kind, events)
            if kind == "ras.rank_dead":
                verb, them = ("are", "them") if _count(events) > 1 else ("is", "it")
                claim = f"{_names(gone)} {verb} dead: NCCL's RAS service can no longer reach {them}"
                found.append(RasSuspect("dead", gone.ranks, claim, gone, DEAD))
            else:
                claim = f"{_names(gone)} did not respond to NCCL's RAS service in time"
                found.append(RasSuspect("silent", gone.ranks, claim, gone, SILENT))
    return tuple(found)


def _behind(job: Job) -> Iterator[RasSuspect]:
    """The ranks with the lowest launch count of an operation, if counts do not advance; only if they are a minority."""
    for group in event_groups(job, "ras.counts_differ", by=("communicator", "operation")):
        stuck = [event for event in group.events if event.value("stuck") == "yes"]
        if not stuck:
            continue
        least = min(_number(event, "launched") for event in stuck)
        last = EventGroup(group.kind, tuple(event for event in stuck if _number(event, "launched") == least))
        size, behind = _number(last.first, "size"), sum(_number(event, "ranks") for event in last.events)
        if size and 2 * behind >= size:
            continue
        operation, most = last.value("operation"), last.value("most")
        claim = f"{_names(last)} launched {least} of {most} {operation}, with no progress between two RAS reports"
        yield RasSuspect("behind", last.ranks, claim, last, BEHIND)


def _names(group: EventGroup) -> str:
    if group.ranks and len(group.ranks) == _count(group.events):
        return ranks_in_words(group.ranks)
    processes = {(event.pid, event.value("node")) for event in group.events if event.pid is not None}
    if processes:
        return " and ".join(f"process {pid} on {node}" for pid, node in sorted(processes, key=str)[:4])
    return f"{_count(group.events)} ranks of a communicator of {group.value('size') or 'unknown size'}"


def _count(events: tuple[Event, ...]) -> int:
    """The number of ranks; one that several communicators name counts once."""
    known = {(event.rank, event.pid, event.value("node")) for event in events if event.pid is not None}
    return len(known) + sum(_number(event, "ranks") or 1 for event in events if event.pid is None)


def _number(event: Event, name: str) -> int:
    value = event.value(name) or ""
    return int(value) if value.isdecimal() and len(value) < 20 else 0
