"""The maximum cost of a plan, reported before anything is sent."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from doctor.probes.reachability.assignments import Assignment
from doctor.probes.reachability.path_probe import ECHOES
from doctor.probes.responder.wire_format import GREETING_BYTES, LENGTH, TIMES, WELCOME_BYTES

LIMIT_SECONDS = 10.0
"""For all light probes of a job, from the first connection to the last answer."""

BURSTS = 3
"""Of one path: a second and a third only if the first did not arrive."""


class Budget(msgspec.Struct, frozen=True):
    """Maximum cost of the light probes.

    ``connections``: paths that are tried, again if one fails. ``most_bytes``: data of all hosts, without packet
    headers. ``seconds``: at most.
    """

    hosts: int
    connections: int
    most_bytes: int
    seconds: float

    def words(self) -> str:
        """Format as ``light probes: 8 hosts, 64 connections, at most 3.0 MB in all and 10 s``."""
        return (
            f"light probes: {self.hosts} hosts, {self.connections} connections, "
            f"at most {self.most_bytes / 1e6:.1f} MB in all and {self.seconds:g} s"
        )


def budget_of(assignments: Iterable[Assignment]) -> Budget:
    """Return the sum of all ``assignments``."""
    every = tuple(assignments)
    connections = sum(len(one.targets) + (one.master is not None) for one in every)
    return Budget(len(every), connections, sum(map(_most_bytes, every)), LIMIT_SECONDS)


def _most_bytes(assignment: Assignment) -> int:
    hello = GREETING_BYTES + WELCOME_BYTES
    message = LENGTH.size + TIMES.size
    measured = BURSTS * (hello + message + assignment.burst) + ECHOES * message
    return sum(measured if target.measured else hello for target in assignment.targets)
