"""The listener on a TCP port of this host, and whether it belongs to the launcher of this process."""

from __future__ import annotations

import ipaddress
import os
import struct
from collections.abc import Iterable
from pathlib import Path

import msgspec

from doctor.collectors.base import link_target, listed, read_text
from doctor.collectors.host.processes import ancestors_of, owner, process_folders, read_process
from doctor.core.clock import monotonic
from doctor.core.facts import Listener
from doctor.core.masking import mask_command, readable
from doctor.knowledge.launcher_index import PROCESSES

LISTEN = "0A"
"""TCP_LISTEN of include/net/tcp_states.h, as in /proc/net/tcp."""

SEARCH_SECONDS = 1.5
"""Seconds in which open files are searched for the owner of a socket."""


class ListeningSocket(msgspec.Struct, frozen=True):
    """A listening socket: its local address, and the inode that identifies its owner; 0 if hidden."""

    address: str
    inode: int


def listening(proc: Path, port: int) -> list[ListeningSocket] | None:
    """Return the sockets that listen on ``port`` in this network namespace, wildcard addresses first.

    Any address counts: a store binds the wildcard, which conflicts with each. ``None`` if no table can be read.
    """
    tables = [read_text(proc / "net" / name, limit=16 << 20) for name in ("tcp", "tcp6")]
    if tables == [None, None]:
        return None
    rows = (row.split() for table in tables if table for row in table.splitlines()[1:])
    found = [socket for row in rows if (socket := _listening_socket(row, port)) is not None]
    return sorted(found, key=lambda socket: socket.address not in ("0.0.0.0", "::"))  # noqa: S104 - compared, not bound


def _listening_socket(row: list[str], port: int) -> ListeningSocket | None:
    """Return the socket of a row of /proc/net/tcp (proc(5)) that listens on ``port``."""
    if len(row) < 10 or row[3] != LISTEN:
        return None
    host, _, number = row[1].partition(":")
    try:
        if int(number, 16) != port:
            return None
        return ListeningSocket(str(decode_address(host)), int(row[9]))
    except ValueError:
        return None


def decode_address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Decode an address of /proc/net/tcp: 32-bit words in hexadecimal and native byte order. ``ValueError``."""
    if len(text) not in (8, 32):
        raise ValueError(text)
    words = [int(text[start : start + 8], 16) for start in range(0, len(text), 8)]
    return ipaddress.ip_address(struct.pack(f"={len(words)}I", *words))


def listener_on(proc: Path, port: int, seconds: float = SEARCH_SECONDS, *, commands: bool = False) -> Listener | None:
    """Return the listener on ``port``, or ``None`` if there is none or no table can be read.

    Its process is ``None`` if it may not be seen: another user, another PID namespace, or not found within ``seconds``.
    Its arguments are included if it belongs to this user, and with ``commands``.
    """
    sockets = listening(proc, port)
    if not sockets:
        return None
    socket = sockets[0]
    pid = owner_of(proc, socket.inode, seconds) if socket.inode else None
    if pid is None:
        return Listener(socket.address, port)
    process = read_process(proc, pid)
    command = None
    if commands or owner(proc / str(pid)) == os.geteuid():
        raw = read_text(proc / str(pid) / "cmdline", limit=1 << 16)
        command = mask_command(raw.rstrip("\0").split("\0")) if raw else None
    return Listener(
        socket.address,
        port,
        pid,
        readable(process.name) if process else None,
        command,
        is_ancestor=pid in own_ancestry(proc),
        same_launcher=shares_launcher(proc, pid),
    )


def owner_of(proc: Path, inode: int, seconds: float = SEARCH_SECONDS) -> int | None:
    """Return the process that holds the socket ``inode``; this process and its parents are checked first."""
    wanted, until = f"socket:[{inode}]", monotonic() + seconds
    everyone = (int(folder.name) for folder in process_folders(proc))
    for pid in dict.fromkeys([*own_ancestry(proc), *everyone]):
        if _holds(proc / str(pid) / "fd", wanted, until):
            return pid
        if monotonic() > until:
            return None
    return None


def own_ancestry(proc: Path) -> list[int]:
    """Return this process and its parents, nearest first."""
    own = read_process(proc, "self")
    return [own.pid, *(parent.pid for parent in ancestors_of(proc))] if own else []


def shares_launcher(proc: Path, pid: int) -> bool:
    """Return whether one launcher, or this process, started ``pid``: the nearest common parent is one of them.

    Rank 0 of the same job, which opens the store, is thus not reported as an unrelated process.
    """
    ancestry = own_ancestry(proc)
    common = next((parent for parent in ancestors_of(proc, pid) if parent.pid in ancestry), None)
    return common is not None and (common.pid == ancestry[0] or common.name.startswith(PROCESSES))


def _holds(folder: Path, wanted: str, until: float) -> bool:
    handles: Iterable[str] = listed(folder) if os.access(folder, os.R_OK | os.X_OK) else ()
    for count, handle in enumerate(handles):
        if link_target(folder / handle) == wanted:
            return True
        if count % 512 == 511 and monotonic() > until:
            return False
    return False
