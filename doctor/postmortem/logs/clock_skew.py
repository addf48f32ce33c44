"""Clock offsets between hosts, from messages logged at the same moment; order of events."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping

import msgspec

from doctor.core.facts import Event

LEAST = 1.0
"""Minimum seconds of a clock offset: ranks do not leave a barrier at the same instant, and the timestamps of many logs
have a resolution of one second."""
BARRIERS = {"nccl.init": ("commid", "Init COMPLETE"), "pl.all_registered": ("", "")}
"""Messages that all ranks log when they leave a barrier: the field that identifies it, and a word in the line."""


def clock_shifts(events: Iterable[Event]) -> dict[str, float]:
    """Return by how many seconds the clocks of hosts are ahead of most; other hosts are omitted."""
    apart: dict[str, list[float]] = {}
    for times in _barriers(events).values():
        if len(times) > 1:
            middle = statistics.median_low(times.values())
            for host, at in times.items():
                apart.setdefault(host, []).append(at - middle)
    shifts = {host: statistics.median(values) for host, values in apart.items()}
    return {host: shift for host, shift in shifts.items() if abs(shift) > LEAST}


def _barriers(events: Iterable[Event]) -> Mapping[tuple[str, str], dict[str, float]]:
    """Return the time at which each host last left each barrier."""
    left: dict[tuple[str, str], dict[str, float]] = {}
    for event in events:
        field, word = BARRIERS.get(event.kind, ("", "\n"))
        if word in event.text and event.host and event.at is not None:
            hosts = left.setdefault((event.kind, event.value(field) or ""), {})
            hosts[event.host] = max(event.at, hosts.get(event.host, -math.inf))
    return left


def in_order(events: Iterable[Event]) -> tuple[Event, ...]:
    """Sort events by time.

    An event without a timestamp has that of the event before it in its file, or else of the first one after it. Files
    without any timestamp come last, one after the other.
    """
    events = list(events)
    files = {name: number for number, name in enumerate(dict.fromkeys(event.file for event in events))}
    by_line = sorted(events, key=lambda event: (files[event.file], event.line))
    latest = {event.file: event.at for event in reversed(by_line) if event.at is not None}
    keyed: list[tuple[float, int, int, Event]] = []
    for event in by_line:
        if event.at is not None:
            latest[event.file] = event.at
        keyed.append((latest.get(event.file, math.inf), files[event.file], event.line, event))
    return tuple(event for *_, event in sorted(keyed, key=lambda entry: entry[:3]))


def shifted(event: Event, shifts: Mapping[str, float]) -> Event:
    """Return the event with its time by the clock of most hosts."""
    shift = shifts.get(event.host or "", 0.0)
    if not shift or event.at is None:
        return event
    last = event.last_at - shift if event.last_at is not None else None
    return msgspec.structs.replace(event, at=event.at - shift, last_at=last)
