"""Connects to the master step by step (name, address, route, port) to tell failures apart.

torch's own client reports ``The client socket has timed out`` for all of them.
"""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Sequence
from typing import Literal, NamedTuple

from doctor.collectors.network.master_address import Addresses, belongs_here, own_addresses, resolve, route_to
from doctor.core.clock import monotonic, sleep
from doctor.core.facts import Reach

ConnectOutcome = Literal["open", "refused", "silent", "unroutable", "unresolved"]

TRY_SECONDS = 3.0
"""Seconds for one connection; Linux sends its SYN again after 1 s and 3 s (tcp(7), tcp_syn_retries)."""
LOOK_UP_SECONDS = 5.0
PAUSES = (0.05, 0.1, 0.2, 0.4, 0.8)
"""Seconds between rounds; the last one repeats: rank 0 may still be starting."""


class ConnectAttempt(NamedTuple):
    """Result of connecting to a host and port. ``seconds``: since the first attempt."""

    names: tuple[str, ...]
    port: int
    resolved: tuple[str, ...]
    lookup_error: str | None

    attempts: tuple[Reach, ...]
    rounds: int
    seconds: float

    @property
    def open_at(self) -> str | None:
        """The address that answered."""
        return next((attempt.address for attempt in self.attempts if attempt.outcome == "open"), None)


def attempt_connect(names: Sequence[str], port: int, *, until: float) -> ConnectAttempt:
    """Try to connect until an address answers or the monotonic time ``until`` is reached."""
    started, rounds = monotonic(), 0
    while True:
        found = _attempt_once(names, port, until)
        rounds += 1
        now = monotonic()
        result = found._replace(rounds=rounds, seconds=round(now - started, 3))
        pause = PAUSES[min(rounds, len(PAUSES)) - 1]
        if result.open_at is not None or now + pause >= until:
            return result
        sleep(pause)


def names_this_host(names: Sequence[str], seconds: float = LOOK_UP_SECONDS) -> bool:
    """Return whether one of ``names`` is an address of this host, or loopback."""
    resolved, _ = _resolve(names, monotonic() + seconds)
    own = own_addresses()
    return any(belongs_here(address, own) for address in resolved)


def _resolve(names: Sequence[str], until: float) -> tuple[dict[str, str], str | None]:
    """Return addresses in the order of attempts, each with the name that resolved to it."""
    resolved: dict[str, str] = {}
    error: str | None = None
    for name in names:
        found, lookup_error, _ = resolve(name, max(0.1, min(LOOK_UP_SECONDS, until - monotonic())))
        for address in found:
            resolved.setdefault(address, name)
        error = error or lookup_error
    return resolved, error


def _attempt_once(names: Sequence[str], port: int, until: float) -> ConnectAttempt:
    resolved, error = _resolve(names, until)
    own = own_addresses()
    attempts: list[Reach] = []
    for address, name in resolved.items():
        attempts.append(_connect(name, address, port, own, until))
        if attempts[-1].outcome == "open":
            break
    if not resolved:
        attempts = [Reach(names[0], names[0], port, "unresolved", "master")]
    return ConnectAttempt(tuple(names), port, tuple(resolved), error, tuple(attempts), 1, 0.0)


def _connect(peer: str, address: str, port: int, own: Addresses, until: float) -> Reach:
    started = monotonic()
    outcome = try_connect(address, port, max(0.1, min(TRY_SECONDS, until - started)))
    seconds = round(monotonic() - started, 4)
    route = route_to((address,), own)
    return Reach(peer, address, port, outcome, "master", seconds, route.interface, route.source)


def try_connect(address: str, port: int, seconds: float) -> ConnectOutcome:
    """Open and close a connection; return the outcome."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with contextlib.closing(socket.socket(family, socket.SOCK_STREAM)) as attempt:
            attempt.settimeout(seconds)
            attempt.connect((address, port))
            return "open"
    except TimeoutError:
        return "silent"
    except OSError as error:
        return _OUTCOMES.get(error.errno or 0, "unroutable")


_OUTCOMES: dict[int, ConnectOutcome] = {
    errno.ECONNREFUSED: "refused",
    errno.ECONNRESET: "refused",
    errno.ETIMEDOUT: "silent",
    errno.EHOSTUNREACH: "unroutable",
    errno.ENETUNREACH: "unroutable",
    errno.EADDRNOTAVAIL: "unroutable",
}
