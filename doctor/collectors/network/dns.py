"""Name lookups with a time limit, each in its own thread, so that a silent name server cannot block.

The calls are those of torch and Gloo: ``getaddrinfo`` of the host name, ``socket.getfqdn`` for the address that
torchrun advertises (torch/distributed/elastic/rendezvous/api.py), and ``getnameinfo`` for the peers of a store.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Generic, TypeVar

import msgspec

from doctor.core.background import start_thread
from doctor.core.clock import monotonic
from doctor.core.facts import HiddenField, NameLookup, ReverseLookup

LIMIT = 2.5
"""Seconds for an answer. The resolver itself waits 5 s per attempt and server (resolv.conf(5))."""

TOTAL = 3.0
"""Seconds for everything, including the lookup of a full name after it was found."""

SURPRISING = 0.5
"""Seconds after which a lookup is repeated: a slow name server is slow again, but a busy processor, or a thread that
holds the interpreter while it loads a library, is slow only once."""

Answer = TypeVar("Answer")


class TimedLookup(msgspec.Struct, Generic[Answer], dict=True):
    """A call in a thread, repeated if it took long: the shorter time counts."""

    call: Callable[[], Answer]
    started: float = msgspec.field(default_factory=monotonic)
    seconds: float | None = None
    answer: Answer | None = None
    error: str | None = None

    def __post_init__(self) -> None:
        """Start the lookup."""
        self._thread = start_thread("doctor-look-up", self._ask)

    def _ask(self) -> None:
        try:
            self.answer = self.call()
        except (OSError, UnicodeError) as error:
            self.error = getattr(error, "strerror", None) or str(error) or type(error).__name__
        self.seconds = monotonic() - self.started
        if self.seconds >= SURPRISING:
            began = monotonic()
            with contextlib.suppress(OSError, UnicodeError):
                self.call()
            self.seconds = min(self.seconds, monotonic() - began)

    def wait(self, limit: float) -> tuple[Answer | None, str | None, float]:
        """Return answer, error, seconds; without an answer ``limit`` seconds after the start that is the error."""
        self._thread.join(max(0.0, self.started + limit - monotonic()))
        if self.seconds is None:
            return None, f"no answer within {limit:.1f} s", limit
        return self.answer, self.error, self.seconds


class OwnNames(msgspec.Struct, frozen=True):
    """Results of the lookups of one host. ``fqdn`` is ``None`` if it was not found in time."""

    fqdn: str | None
    names: tuple[NameLookup, ...]
    reverse: tuple[ReverseLookup, ...]
    hidden: tuple[HiddenField, ...] = ()


def look_up(hostname: str, addresses: Iterable[str], limit: float = LIMIT, total: float = TOTAL) -> OwnNames:
    """Look up ``hostname``, its full name, and the names of ``addresses`` as the store of torch does, concurrently.

    Takes at most ``limit`` seconds, or ``total`` if the full name was found late.
    """
    started = monotonic()
    own = TimedLookup(lambda: _forward(hostname))
    full = TimedLookup(lambda: socket.getfqdn(hostname))
    backwards = [(peer, TimedLookup(partial(_peer_host, peer))) for peer in map(peer_name_of, addresses)]
    fqdn, error, _ = full.wait(limit)
    names = [_name(hostname, "hostname", own, limit)]
    if fqdn and fqdn != hostname:
        left = max(0.5, min(limit, started + total - monotonic()))
        names.append(_name(fqdn, "fqdn", TimedLookup(lambda: _forward(fqdn)), left))
    hidden = (HiddenField("fqdn", error, "make the name server in /etc/resolv.conf answer"),) if error else ()
    reverse = []
    for address, question in backwards:
        name, trouble, seconds = question.wait(limit)
        reverse.append(ReverseLookup(address, name, trouble, round(seconds, 4)))
    return OwnNames(fqdn, tuple(names), tuple(reverse), hidden)


def _name(name: str, role: str, question: TimedLookup[tuple[str, ...]], limit: float) -> NameLookup:
    addresses, error, seconds = question.wait(limit)
    return NameLookup(name, role, addresses or (), error, round(seconds, 4))


def _forward(name: str) -> tuple[str, ...]:
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return tuple(dict.fromkeys(str(entry[4][0]).partition("%")[0] for entry in found))


def peer_name_of(address: str) -> str:
    """Return the address as the store of torch sees a client.

    Its socket serves both families, so an IPv4 address is mapped into IPv6 (torch/csrc/distributed/c10d/socket.cpp),
    which /etc/hosts seldom contains.
    """
    return f"::ffff:{address}" if ":" not in address and _has_both_families() else address


@cache
def _has_both_families() -> bool:
    return socket.has_dualstack_ipv6()


def _peer_host(address: str) -> str:
    return socket.getnameinfo((address, 0), socket.NI_NAMEREQD)[0]
