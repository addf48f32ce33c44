"""MASTER_ADDR as this process resolves it, the route to it, and the listener on MASTER_PORT of this host."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from typing import NamedTuple

from doctor.collectors.base import Machine, NotPresent, collector
from doctor.collectors.launch.launcher import PORTS
from doctor.collectors.launch.rank_variables import whole_number
from doctor.collectors.network.dns import TimedLookup
from doctor.collectors.network.interface_addresses import listed_addresses
from doctor.collectors.network.listeners import listener_on, listening
from doctor.core.facts import HiddenField, Listener, MasterFacts
from doctor.core.masking import mask_text, readable

LIMIT = 3.0
"""Seconds for the lookup. The resolver itself waits longer: 5 s per attempt and server (resolv.conf(5))."""

Addresses = dict[str, str]
"""Interface of each address of this host."""


class SelectedRoute(NamedTuple):
    """The choice of the kernel: interface and source address, or why there is none."""

    interface: str | None = None
    source: str | None = None
    trouble: str | None = None


@collector(MasterFacts)
def collect_master(machine: Machine) -> MasterFacts:
    """Look up MASTER_ADDR and inspect MASTER_PORT. Raises ``NotPresent`` if MASTER_ADDR is not set.

    Nothing is sent to the master: the route is determined with an unused UDP socket.
    """
    address = machine.environ.get("MASTER_ADDR")
    if address is None:
        raise NotPresent("MASTER_ADDR is not set")
    port = whole_number(machine.environ, "MASTER_PORT")
    resolved, error, seconds = resolve(address)
    own = own_addresses()
    is_local = any(belongs_here(found, own) for found in resolved) if resolved else None
    route = route_to(resolved, own) if resolved else SelectedRoute()
    trouble = route.trouble and f"no route to MASTER_ADDR: {route.trouble}"
    unrouted = (HiddenField("interface", trouble),) if trouble else ()
    listener, notes = inspect_port(machine, port) if is_local and port in PORTS else (None, ())
    return MasterFacts(
        address=readable(mask_text(address)),
        port=port,
        resolved=resolved,
        error=error,
        seconds=seconds,
        is_local=is_local,
        interface=route.interface,
        source_address=route.source,
        listener=listener,
        hidden=(*unrouted, *notes),
    )


def resolve(name: str, limit: float = LIMIT) -> tuple[tuple[str, ...], str | None, float]:
    """Return the addresses of ``name`` in the order of the resolver without repeats, or an error; and the seconds."""
    if not name.strip() or "\0" in name:
        return (), "MASTER_ADDR is empty" if not name.strip() else "MASTER_ADDR is not a valid name", 0.0
    with contextlib.suppress(OSError, UnicodeError):
        # An address needs no name server, so no thread that a busy host may schedule after the limit.
        if numeric := _addresses_of(name, socket.AI_NUMERICHOST):
            return numeric, None, 0.0
    found, error, seconds = TimedLookup(lambda: _addresses_of(name)).wait(limit)
    return found or (), error, round(seconds, 4)


def _addresses_of(name: str, flags: int = 0) -> tuple[str, ...]:
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM, flags=flags)
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in found))


def own_addresses() -> Addresses:
    """Return the addresses of this host and their interfaces; empty if they cannot be listed."""
    try:
        return {_plain(one.address): one.interface for one in listed_addresses() if one.address}
    except OSError:
        return {}


def address_elsewhere(name: str, limit: float, own: Addresses) -> str | None:
    """Return an address of ``name`` that does not lead back to this host, whose addresses are ``own``."""
    addresses, _, _ = resolve(name, limit)
    return next((address for address in addresses if not belongs_here(address, own)), None)


def belongs_here(address: str, own: Addresses) -> bool:
    """Return whether an address is loopback, the wildcard (which connects to this host) or one of this host."""
    plain = _plain(address)
    try:
        parsed = ipaddress.ip_address(plain)
    except ValueError:
        return False
    return parsed.is_loopback or parsed.is_unspecified or plain in own


def _plain(address: str) -> str:
    """An address without its zone, and the IPv4 address of a mapped one (RFC 4291, section 2.5.5.2)."""
    address = address.partition("%")[0]
    try:
        mapped = ipaddress.IPv6Address(address).ipv4_mapped
    except ValueError:
        return address
    return str(mapped or address)


def route_to(addresses: tuple[str, ...], own: Addresses) -> SelectedRoute:
    """Return the route to the first address that has one. Interface: the one that has the source address."""
    troubles = []
    for address in addresses:
        source, trouble = _source_towards(address)
        if source is not None:
            return SelectedRoute(own.get(source), source)
        troubles.append(f"{address}: {trouble}")
    return SelectedRoute(trouble="; ".join(troubles))


def _source_towards(address: str) -> tuple[str | None, str | None]:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.setblocking(False)
            # A connected UDP socket only looks up the route; port 9 is "discard" and nothing is ever sent.
            probe.connect((address, 9))
            return _plain(str(probe.getsockname()[0])), None
    except OSError as error:
        return None, error.strerror or str(error)


def inspect_port(machine: Machine, port: int | None) -> tuple[Listener | None, tuple[HiddenField, ...]]:
    """Return the listener on ``port`` of this host, with a note if it is unknown."""
    if port is None:
        return None, ()
    if listening(machine.proc, port) is None:
        return None, (HiddenField("listener", "/proc/net/tcp can't be read", "mount /proc in the container"),)
    listener = listener_on(machine.proc, port, commands=machine.commands)
    if listener is None or listener.pid is not None:
        return listener, ()
    reason = f"a process that may not be seen from here listens on port {port}"
    unhide = f"as root, outside the container: ss -tlnp 'sport = :{port}'"
    return listener, (HiddenField("listener", reason, unhide),)
