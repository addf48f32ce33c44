"""Limits of what an order may make this process do: anyone who can write to the store can give orders.

A well-formed order may still name a target that no peer of this job has. Each process checks it against its own
environment and directories, and against the addresses that a peer can have: what is required here and is not met
raises :class:`Forbidden`.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Collection, Iterable

from doctor.collectors.base import Machine
from doctor.collectors.launch.rank_variables import whole_number
from doctor.collectors.storage.directories import directories_of
from doctor.core.masking import readable

LEAST_PORT = 1024
"""Responders and stores of probes use any free port; lower ones belong to services (RFC 6335, section 6)."""
PROBE_FILE = re.compile(r"\.rankdoctor-probe-[0-9a-f]{8}-\d{1,7}-[A-Za-z0-9._-]{0,64}", re.ASCII)
"""Names of the files of the storage probe (:mod:`doctor.probes.storage.stage`)."""


class Forbidden(Exception):
    """The order asks for an action that no process of this job would request; the message names it."""


def is_address(text: str) -> bool:
    """Return whether ``text`` is an IP address rather than a name."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def require_peer(address: str | None, port: int, *, same_host: bool = False) -> None:
    """Require that a process of this job may be at that address.

    ``None`` stands for a host name that is looked up. ``same_host``: loopback is allowed.
    """
    if port < LEAST_PORT:
        raise Forbidden(f"a connection to port {port}, which is below {LEAST_PORT}")
    if address is None:
        return
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        raise Forbidden(f"a connection to {address[:64]!r}, which is not an IP address") from None
    is_not_a_host = found.is_multicast or found.is_unspecified or str(found) == "255.255.255.255"
    if is_not_a_host or (found.is_loopback and not same_host):
        raise Forbidden(f"a connection to {address}, which is not another host of the job")


def require_peers(ends: Iterable[tuple[str | None, int]], *, same_host: bool = False) -> None:
    """Apply :func:`require_peer` to several addresses and ports."""
    for address, port in ends:
        require_peer(address, port, same_host=same_host)


def require_own_master(address: str, port: int, machine: Machine) -> None:
    """Require the MASTER_ADDR and MASTER_PORT that this process was started with."""
    own = machine.environ.get("MASTER_ADDR", "")
    if address not in (own, readable(own)):
        raise Forbidden("a connection to a MASTER_ADDR that is not set on this host")
    require_own_port(port, machine)


def require_own_port(port: int, machine: Machine) -> None:
    """Require the MASTER_PORT that this process was started with."""
    if port != whole_number(machine.environ, "MASTER_PORT"):
        raise Forbidden(f"port {port}, which is not the MASTER_PORT set here")


def require_own_directory(path: str, role: str, name: str, machine: Machine) -> None:
    """Require a directory that this process uses in that role, and the name of a probe file."""
    if (path, role) not in directories_of(machine):
        raise Forbidden(f"a file in {path[:200]!r}, which this process does not use as {role}")
    if PROBE_FILE.fullmatch(name) is None:
        raise Forbidden(f"a file called {name[:80]!r}")


def require_own_interfaces(names: Iterable[str]) -> None:
    """Require that this host has network interfaces of these names."""
    own: Collection[str] = {name for _, name in socket.if_nameindex()}
    for name in names:
        if name not in own:
            raise Forbidden(f"the network interface {name[:32]!r}, which this host does not have")
