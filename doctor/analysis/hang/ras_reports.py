"""Whom NCCL's RAS service accuses, where somebody asked it: ranks that are dead, silent, or do not go on.

Counts of collectives differ for moments in every healthy job; they accuse somebody only where two answers show the
same ones (``stuck``), and nobody is dead who would be the reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from doctor.core.facts import Event
from doctor.core.job import Job
from doctor.core.logs.event_groups import EventGroup, event_groups

Charge = Literal["dead", "silent", "behind", "error"]

DEAD, SILENT, BEHIND, ERROR = 0.85, 0.6, 0.75, 0.4
"""Confidence. RAS calls a process dead that it has not reached for a minute; one that did not answer a question in time
may be busy or frozen; an error is most often that of another rank ("Remote process error")."""
OWN_ERROR = 0.6
"""Of an error that is a rank's own."""
_OTHERS_ERROR = "Remote process error"


class RasSuspects(NamedTuple):
    """Ranks, and what RAS says of them. ``ranks`` is empty where it tells their numbers in a smaller communicator
    alone; ``words`` name them then, too."""

    charge: Charge
    ranks: tuple[int, ...]
    words: str
    said: EventGroup
    confidence: float


def suspects_by_ras(job: Job) -> Iterator[RasSuspects]:
    """The gravest charge: who is dead, else who is silent, else who stays behind, else who reports an error."""
    charges = (_gone(job, "ras.rank_dead"), _gone(job, "ras.rank_missing"), tuple(_behind(job)), _errors(job))
    yield from next((found for found in charges if found), ())


def _gone(job: Job, kind: str) -> tuple[RasSuspects, ...]:
    """Processes that RAS does not reach. One that answered and has left a communicator is not among them."""
    found = []
    for told in event_groups(job, kind):
        events = tuple(event for event in told.events if event.value("why") != "left")
        if events:
            gone = EventGroup(kind, events)
            is_dead = kind == "ras.rank_dead"
            state = "dead: it is not reached any more" if is_dead else "silent: it did not answer in time"
            words = f"{_names(gone)} {'are' if _count(events) > 1 else 'is'} {state}"
            found.append(
                RasSuspects("dead" if is_dead else "silent", gone.ranks, words, gone, DEAD if is_dead else SILENT)
            )
    return tuple(found)


def _behind(job: Job) -> Iterator[RasSuspects]:
    """The ranks that launched least of an operation, where the counts stand still; the smaller part of them."""
    for told in event_groups(job, "ras.counts_differ", by=("communicator", "operation")):
        stuck = [event for event in told.events if event.value("stuck") == "yes"]
        if not stuck:
            continue
        least = min(_number(event, "launched") for event in stuck)
        last = EventGroup(told.kind, tuple(event for event in stuck if _number(event, "launched") == least))
        size, behind = _number(last.first, "size"), sum(_number(event, "ranks") for event in last.events)
        if size and 2 * behind >= size:
            continue
        operation, most = last.value("operation"), last.value("most")
        words = f"{_names(last)} launched {least} of {most} {operation}, and no more between two answers"
        yield RasSuspects("behind", last.ranks, words, last, BEHIND)


def _errors(job: Job) -> tuple[RasSuspects, ...]:
    """Errors of ranks, their own before those that come from others."""
    by_error = {told.value("error"): told for told in event_groups(job, "ras.async_error", by=("error",))}
    own = [told for error, told in by_error.items() if error != _OTHERS_ERROR]
    return tuple(
        RasSuspects(
            "error",
            told.ranks,
            f"{_names(told)} reported: {told.value('error')}",
            told,
            OWN_ERROR if told in own else ERROR,
        )
        for told in own or by_error.values()
    )


def _names(told: EventGroup) -> str:
    """``rank 3``, ``ranks 3, 5``, or where their ranks are not known ``process 4242 on 10.0.0.2``."""
    if told.ranks and len(told.ranks) == _count(told.events):
        shown = ", ".join(map(str, told.ranks[:8]))
        return f"rank{'s' if len(told.ranks) > 1 else ''} {shown}{' …' if len(told.ranks) > 8 else ''}"
    processes = {(event.pid, event.value("node")) for event in told.events if event.pid is not None}
    if processes:
        return " and ".join(f"process {pid} on {node}" for pid, node in sorted(processes, key=str)[:4])
    return f"{_count(told.events)} ranks of a communicator of {told.value('size') or 'unknown size'}"


def _count(events: tuple[Event, ...]) -> int:
    """How many ranks: one that several communicators name is one."""
    known = {(event.rank, event.pid, event.value("node")) for event in events if event.pid is not None}
    return len(known) + sum(_number(event, "ranks") or 1 for event in events if event.pid is None)


def _number(event: Event, name: str) -> int:
    value = event.value(name) or ""
    return int(value) if value.isdecimal() and len(value) < 20 else 0
