"""Test whether the port of the master is open: a connection without data."""

from __future__ import annotations

import time

from doctor.core.facts.probe_results import ReachOutcome
from doctor.probes.runtime.deadline import ProbeDeadline
from doctor.probes.runtime.tcp_connect import connect_tcp

PATIENCE = 2.0
"""Seconds for the listener to start: all agents begin at about the same time."""

PAUSE = 0.1


def try_master_port(
    address: str, port: int, deadline: ProbeDeadline, *, patient: bool
) -> tuple[ReachOutcome | None, float]:
    """Return the outcome of a connection to ``port``, and the seconds that it took to open.

    ``patient``: a listener is expected, so a refusal counts only if it lasts. Otherwise a refusal is no outcome: the
    address was reached, and no listener was required.
    """
    patience = deadline.within(PATIENCE)
    while True:
        outcome, connection, seconds = connect_tcp(address, port, deadline)
        if connection is not None:
            # A farewell, and no reset as elsewhere: of a reset torch's store would complain.
            connection.close()
        if outcome == "stranger":
            # Accepted and then cut off: there is a listener, which is all that matters here.
            outcome = "open"
        if outcome != "refused":
            return outcome, seconds
        if not patient:
            return None, seconds
        if patience.left() <= PAUSE:
            return "refused", seconds
        time.sleep(PAUSE)
