"""Measure forward lookups of the names of other hosts, and reverse lookups of their addresses."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from doctor.collectors.network.dns import TimedLookup, peer_name_of
from doctor.probes.runtime.deadline import ProbeDeadline

LIMIT = 2.5
"""Seconds for an answer. A resolver waits 5 s before it asks again or asks the next server (resolv.conf(5))."""

TRIES = 2
"""One lost answer of a name server is normal, two in a row are not."""

AT_ONCE = 4
"""Concurrent lookups: all hosts of a job ask the same name server at this time."""

Answer = TypeVar("Answer")


@dataclass
class Lookups:
    """Seconds of the lookups for one peer; an error if there was no answer, or none with a name."""

    forward: float | None = None
    forward_error: str | None = None
    reverse: float | None = None
    reverse_error: str | None = None
    reverse_address: str | None = None


class NameProbe:
    """Looks up peers one by one. After one lookup without any answer the rest is skipped."""

    def __init__(self, deadline: ProbeDeadline) -> None:
        self._deadline = deadline
        self._unanswered = threading.Event()

    def look_up(self, name: str, address: str | None, found: Lookups) -> None:
        """Fill ``found`` for the host called ``name`` and reached at ``address``."""
        if name.strip() and "\0" not in name:
            forward = self._asked(lambda: socket.getaddrinfo(name, None, type=socket.SOCK_STREAM))
            found.forward, found.forward_error = forward or (None, None)
        if address is not None:
            text = peer_name_of(address)
            backward = self._asked(lambda: socket.getnameinfo((text, 0), socket.NI_NAMEREQD))
            if backward is not None:
                found.reverse, found.reverse_error = backward
                found.reverse_address = text if text != address else None

    def _asked(self, call: Callable[[], Answer]) -> tuple[float, str | None] | None:
        """Return seconds and error of a lookup, the waiting time without an answer; ``None`` if it was not made."""
        waited = 0.0
        for _ in range(TRIES):
            if self._unanswered.is_set() or self._deadline.left() < LIMIT:
                return None
            try:
                question = TimedLookup(call)
            except RuntimeError:  # No more threads are to be had.
                return None
            _, error, seconds = question.wait(LIMIT)
            if question.seconds is not None:
                return round(seconds, 4), error
            waited += seconds
        self._unanswered.set()
        return waited, f"no answer within {LIMIT:g} s, {TRIES} times"
