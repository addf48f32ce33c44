"""How long it takes to look up the names of other hosts, and backwards the addresses that they are reached at."""

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
"""A name server's answer may get lost once in a while; twice in a row it is no chance."""

AT_ONCE = 4
"""Look-ups under way at the same time: all hosts of a job ask the same name server now."""

Answer = TypeVar("Answer")


@dataclass
class Lookups:
    """Seconds of the look-ups that belong to one peer; an error where there was no answer, or none that names it."""

    forward: float | None = None
    forward_error: str | None = None
    reverse: float | None = None
    reverse_error: str | None = None
    reverse_address: str | None = None


class NameProbe:
    """Looks up peers one after another. Once one look-up got no answer at all the others are spared the same wait."""

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
        """Seconds and error of a look-up; without any answer the seconds waited. ``None`` where it was not made."""
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
