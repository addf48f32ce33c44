"""Error counters of the interfaces that probes use."""

from __future__ import annotations

from collections.abc import Iterable

from doctor.collectors.base import Machine, parse_int, read_text

_RECEIVE_ERRORS, _TRANSMIT_ERRORS = 2, 10
"""Columns of /proc/net/dev: eight of what was received, then eight of what was sent."""


def read_interface_errors(surroundings: Machine, names: Iterable[str]) -> int | None:
    """Errors of receiving and sending that the interfaces called ``names`` counted; ``None`` where none can be read."""
    wanted = set(names)
    counts = [
        count
        for line in (read_text(surroundings.proc / "net" / "dev") or "").splitlines()
        if line.partition(":")[0].strip() in wanted
        for column in (_RECEIVE_ERRORS, _TRANSMIT_ERRORS)
        if (count := _column(line.partition(":")[2].split(), column)) is not None
    ]
    return sum(counts) if counts else None


def _column(columns: list[str], number: int) -> int | None:
    return parse_int(columns[number]) if number < len(columns) else None
