"""Main routing tables of IPv4 and IPv6, and counters of interfaces and TCP."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_network

from doctor.collectors.base import Machine, parse_int, read_pairs, read_rows
from doctor.core.facts import Route

# Flags of include/uapi/linux/route.h and ipv6_route.h.
_UP = 0x0001
_GATEWAY = 0x0002
_REJECT = 0x0200
_ANYCAST = 0x00100000
_CACHE = 0x01000000
_LOCAL = 0x80000000

_METRIC_MAX = 0xFFFFFFFF
_TABLE = 8 << 20

_ERRORS = (2, 10)
"""Columns of /proc/net/dev after the name: errors of receiving and of sending."""

LIMIT = 1000
"""Routes that are kept per family; a host with BGP can have a million."""


def read_routes(machine: Machine) -> tuple[Route, ...]:
    """Return usable routes, IPv4 first; without rejecting, multicast and local ones."""
    folder = machine.proc / "net"
    routes = [*_routes4(read_rows(folder / "route", _TABLE))][:LIMIT]
    routes += [*_routes6(read_rows(folder / "ipv6_route", _TABLE))][:LIMIT]
    return tuple(routes)


def _routes4(rows: list[list[str]]) -> Iterator[Route]:
    """Yield rows of /proc/net/route: interface, destination, gateway, flags, references, use, metric, mask."""
    for row in rows:
        try:
            flags, metric = int(row[3], 16), int(row[6])
            destination, gateway, mask = (_address4(row[column]) for column in (1, 2, 7))
            network = ip_network(f"{destination}/{mask}", strict=False)
        except (IndexError, ValueError):
            continue
        if flags & _UP and not flags & _REJECT and 0 <= metric <= _METRIC_MAX:
            yield Route(str(network), row[0], str(gateway) if flags & _GATEWAY else None, metric)


def _address4(text: str) -> IPv4Address:
    """Return an address as printed by the kernel: the number in native byte order."""
    return IPv4Address(int(text, 16).to_bytes(4, sys.byteorder) if len(text) == 8 else text)


def _routes6(rows: list[list[str]]) -> Iterator[Route]:
    """Yield rows of /proc/net/ipv6_route: destination, length, source, length, gateway, metric, two counts, flags,
    name."""
    for row in rows:
        try:
            network = IPv6Network((int(row[0], 16), int(row[1], 16)))
            gateway, metric, flags = IPv6Address(int(row[4], 16)), int(row[5], 16), int(row[8], 16)
            interface = row[9]
        except (IndexError, ValueError):
            continue
        usable = flags & _UP and not flags & (_REJECT | _ANYCAST | _CACHE | _LOCAL) and not network.is_multicast
        if usable and metric <= _METRIC_MAX:
            yield Route(str(network), interface, str(gateway) if flags & _GATEWAY else None, metric)


def read_interface_errors(machine: Machine, names: Iterable[str]) -> int | None:
    """Return the errors that the interfaces called ``names`` counted; ``None`` if none can be read."""
    table = read_pairs(machine.proc / "net" / "dev", ":")
    rows = [table[name].split() for name in set(names) if name in table]
    counts = [parse_int(row[column]) for row in rows for column in _ERRORS if column < len(row)]
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def read_segments(machine: Machine) -> tuple[int | None, int | None]:
    """Return TCP segments sent and retransmitted since boot in this network namespace, from /proc/net/snmp."""
    rows = [row for row in read_rows(machine.proc / "net" / "snmp") if row and row[0] == "Tcp:"]
    if len(rows) != 2:
        return None, None
    counts = dict(zip(rows[0], rows[1], strict=False))
    return parse_int(counts.get("OutSegs")), parse_int(counts.get("RetransSegs"))
