"""Error counters of the interfaces that probes use."""

from __future__ import annotations

from collections.abc import Iterable

from doctor.collectors.base import Machine, parse_int, read_pairs

_ERRORS = (2, 10)
"""Columns of /proc/net/dev after the name: errors of receiving and of sending."""


def read_interface_errors(machine: Machine, names: Iterable[str]) -> int | None:
    """Return the errors that the interfaces called ``names`` counted; ``None`` if none can be read."""
    table = read_pairs(machine.proc / "net" / "dev", ":")
    rows = [table[name].split() for name in set(names) if name in table]
    counts = [parse_int(row[column]) for row in rows for column in _ERRORS if column < len(row)]
    known = [count for count in counts if count is not None]
    return sum(known) if known else None
