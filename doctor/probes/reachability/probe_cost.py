"""The maximum cost of a plan, reported before anything is sent."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from doctor.probes.reachability.assignments import Assignment
from doctor.probes.reachability.light_probe import MOST_AT_ONCE
from doctor.probes.reachability.path_probe import ECHOES
from doctor.probes.responder.wire_format import GREETING_BYTES, LENGTH, TIMES, WELCOME_BYTES
from doctor.probes.runtime.cost_text import counted

LIMIT_SECONDS = 10.0
"""For all light probes of a job, from the first connection to the last answer."""

BURSTS = 3
"""Of one path: a second and a third only if the first did not arrive."""


def cost_text(assignments: Sequence[Assignment]) -> str:
    """Format as ``light probes: 8 hosts, 64 connections, at most 3.0 MB in all and 10 s; all hosts at once, up to 8
    connections each``. Connections are paths that are tried, again if one fails."""
    connections = [len(one.targets) + (one.master is not None) for one in assignments]
    each = counted(min(max(connections), MOST_AT_ONCE), "connection")
    return (
        f"light probes: {len(connections)} hosts, {sum(connections)} connections, "
        f"at most {most_bytes(assignments) / 1e6:.1f} MB in all and {LIMIT_SECONDS:g} s; "
        f"all hosts at once, up to {each} each"
    )


def most_bytes(assignments: Iterable[Assignment]) -> int:
    """Return the bytes of the data of all hosts, at most, without packet headers."""
    hello, message = GREETING_BYTES + WELCOME_BYTES, LENGTH.size + TIMES.size
    return sum(
        BURSTS * (hello + message + assignment.burst) + ECHOES * message if target.measured else hello
        for assignment in assignments
        for target in assignment.targets
    )
