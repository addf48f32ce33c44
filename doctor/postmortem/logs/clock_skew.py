"""Clocks of hosts against one another, by what several hosts say of the same moment; and the order of events."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping

import msgspec

from doctor.core.facts import Event

LEAST = 1.0
"""Seconds below which a difference is no shift: ranks do not leave a meeting at the same instant, and stamps of many
logs have whole seconds."""
MEETINGS = {"nccl.init": ("commid", "Init COMPLETE"), "pl.all_registered": ("", "")}
"""Messages that all ranks print when they leave a meeting of all: the field that names the meeting, and a word that the
line must hold."""


def clock_shifts(events: Iterable[Event]) -> dict[str, float]:
    """Seconds that the clock of a host is ahead of that of most, where meetings tell; hosts that are not ahead or
    behind are left out."""
    apart: dict[str, list[float]] = {}
    for times in _meetings(events).values():
        if len(times) > 1:
            middle = statistics.median_low(times.values())
            for host, at in times.items():
                apart.setdefault(host, []).append(at - middle)
    shifts = {host: statistics.median(values) for host, values in apart.items()}
    return {host: shift for host, shift in shifts.items() if abs(shift) > LEAST}


def _meetings(events: Iterable[Event]) -> Mapping[tuple[str, str], dict[str, float]]:
    """When each host left each meeting last."""
    left: dict[tuple[str, str], dict[str, float]] = {}
    for event in events:
        field, word = MEETINGS.get(event.kind, ("", "\n"))
        if word in event.text and event.host and event.at is not None:
            hosts = left.setdefault((event.kind, event.value(field) or ""), {})
            hosts[event.host] = max(event.at, hosts.get(event.host, -math.inf))
    return left


def in_order(events: Iterable[Event]) -> tuple[Event, ...]:
    """The events as they happened: by time. One without a stamp happened when the one before it in its file did; files
    without any stand behind, one after the other."""
    events = list(events)
    files = {name: number for number, name in enumerate(dict.fromkeys(event.file for event in events))}
    keyed: list[_Keyed] = []
    latest: dict[str, float] = {}
    for event in sorted(events, key=lambda event: (files[event.file], event.line)):
        if event.at is not None:
            latest[event.file] = event.at
        keyed.append((latest.get(event.file, math.nan), files[event.file], event.line, event))
    first = _first_times(keyed)
    keyed = [(first.get(file, math.inf) if math.isnan(at) else at, file, line, one) for at, file, line, one in keyed]
    return tuple(one for _, _, _, one in sorted(keyed, key=lambda entry: entry[:3]))


_Keyed = tuple[float, int, int, Event]


def _first_times(keyed: Iterable[_Keyed]) -> dict[int, float]:
    first: dict[int, float] = {}
    for at, file, _, _ in keyed:
        if not math.isnan(at):
            first.setdefault(file, at)
    return first


def shifted(event: Event, shifts: Mapping[str, float]) -> Event:
    """The event with its time by the clock of most hosts."""
    shift = shifts.get(event.host or "", 0.0)
    if not shift or event.at is None:
        return event
    last = event.last_at - shift if event.last_at is not None else None
    return msgspec.structs.replace(event, at=event.at - shift, last_at=last)
