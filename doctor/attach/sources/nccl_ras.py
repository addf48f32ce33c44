"""What NCCL's RAS service reports of a job: processes that it lost, errors, and ranks with fewer launched collectives.

A thread of every process with NCCL 2.24 or later listens on localhost:28028, or NCCL_RAS_ADDR, and gathers the state
of the whole job for a client. The protocol is lines of text (src/ras/client_support.cc of NCCL,
``rasClientEventLoop``)::

    client protocol 2      SERVER PROTOCOL 2
    timeout 2              OK
    set format json        OK                         (since 2.28.7; earlier: ERROR: Unknown command ...)
    verbose status         the report, then the service closes the connection

On the same host only a service of a user whose processes are read is asked, and an address in the environment of a
process is used only if it is a loopback address. Counts of a healthy job differ for moments, so it is asked twice.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from doctor.attach.processes import Process
from doctor.collectors.base import link_target, parse_int, read_text
from doctor.core.background import BackgroundCall
from doctor.core.errors import UnusableError
from doctor.core.facts import Event
from doctor.core.text import counted
from doctor.postmortem.ras.events import looks_like_ras, read_ras
from doctor.postmortem.ras.responses import RasResponse, read_responses

PORT = 28028
"""NCCL_RAS_CLIENT_PORT of src/ras/ras_internal.h."""
VARIABLE = "NCCL_RAS_ADDR"
LEG_SECONDS = 2
"""Seconds that the service waits for other processes; it gives up entirely 5 s later."""
BETWEEN = 3.0
"""Seconds between two reports, in which a rank that moves launches collectives."""
PARSE_SECONDS = 2.0
LARGEST = 8 << 20
"""Maximum bytes of a report."""
LONGEST_LINE = 1024
MOST_RANKS = 1024
"""Ranks up to which every rank is listed: about 0.6 KB for each in each communicator."""
MOST_EVENTS = 512
_LISTEN = "0A"
"""TCP_LISTEN of include/net/tcp_states.h."""
_LARGEST_TABLE = 8 << 20


class RasAddress(NamedTuple):
    """Host and port of a RAS service."""

    host: str
    port: int = PORT

    @property
    def text(self) -> str:
        """``HOST:PORT``."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether no other host can be meant."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def ras_address(text: str) -> RasAddress:
    """Return the address in ``HOST``, ``HOST:PORT`` or ``[HOST]:PORT``.

    Raises:
        UnusableError: it is none of these.
    """
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or parts.path or parts.query or parts.fragment or parts.username is not None:
        raise UnusableError("Expected the address of NCCL's RAS service as HOST:PORT, for example node1:28028.")
    return RasAddress(host, port or PORT)


class RasReport(NamedTuple):
    """The events of one or two reports, and sentences for the user."""

    events: tuple[Event, ...] = ()
    notes: tuple[str, ...] = ()


class RasService(NamedTuple):
    """The service to ask; without an ``address`` none is, for the reason in ``note`` if there is one worth telling."""

    address: RasAddress | None = None
    note: str = ""


def find_service(ranks: Sequence[Process], proc: Path = Path("/proc")) -> RasService:
    """Return the service of these ranks on this host."""
    wanted = RasAddress("localhost")
    stated = next((text for rank in ranks if (text := (rank.environ or {}).get(VARIABLE))), None)
    if stated is not None:
        try:
            wanted = ras_address(stated)
        except UnusableError:
            return RasService(note=f"NCCL RAS was not queried: {VARIABLE} of a rank is not a valid address")
        if not wanted.is_loopback:
            return RasService(note=f"NCCL RAS was not queried: {VARIABLE} is {wanted.text} (--nccl-ras queries it)")
    if any(rank.network and rank.network != link_target(proc / "self" / "ns" / "net") for rank in ranks):
        return RasService(note="NCCL RAS was not queried: the ranks are in another network namespace")
    listeners = list(_listeners(wanted.port, proc))
    if not listeners:
        why = "NCCL before 2.24, no communicator yet, or NCCL_RAS_ENABLE=0"
        return RasService(note=f"NCCL RAS does not listen on port {wanted.port} ({why})")
    users = {rank.user for rank in ranks}
    host = next((host for host, user in listeners if user in users), None)
    if host is None:
        return RasService(note=f"NCCL RAS was not queried: another user listens on port {wanted.port}")
    return RasService(RasAddress(host, wanted.port))


def _listeners(port: int, proc: Path) -> Iterator[tuple[str, int]]:
    """Yield the loopback address and the user of each socket that listens on a port for this host."""
    for name, words, loopback in (("tcp", 1, "127.0.0.1"), ("tcp6", 4, "::1")):
        for row in (read_text(proc / "net" / name, limit=_LARGEST_TABLE) or "").splitlines()[1:]:
            fields = row.split(None, 8)
            if len(fields) < 9 or fields[3] != _LISTEN:
                continue
            address, _, number = fields[1].partition(":")
            user = parse_int(fields[7])
            if user is None or number != f"{port:04X}" or len(address) != 8 * words:
                continue
            with contextlib.suppress(ValueError):
                own = _address_of(address)
                if own.is_loopback or own.is_unspecified:
                    yield (str(own) if own.is_loopback else loopback), user


def _address_of(digits: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return the address that the kernel prints as words of the byte order of this host.

    Raises:
        ValueError: it is none.
    """
    raw = bytes.fromhex(digits)
    words = (raw[at : at + 4] for at in range(0, len(raw), 4))
    return ipaddress.ip_address(b"".join(word[::-1] if sys.byteorder == "little" else word for word in words))


class RasReader:
    """Asks a service in a thread of its own, from now on. ``pids``: the ranks of this host; ``world_size``: of their
    job; ``twice``: ask again after :data:`BETWEEN`."""

    def __init__(
        self, service: RasService, pids: Collection[int], world_size: int | None, seconds: float, *, twice: bool = True
    ) -> None:
        self._service = service
        self._pids = frozenset(pids)
        self._world_size = world_size
        self._until = time.monotonic() + seconds
        self._twice = twice
        self._texts: list[str] = []
        self._call = BackgroundCall(self._read)

    def _read(self) -> None:
        address, start = self._service.address, time.monotonic()
        if address is None:
            return
        in_json = self._world_size is None or self._world_size <= MOST_RANKS
        self._texts.append(ask_service(address, self._until, in_json=in_json))
        if self._twice:
            time.sleep(max(0.0, start + BETWEEN - time.monotonic()))
            self._texts.append(ask_service(address, self._until, in_json=in_json))

    def result(self) -> RasReport:
        """Return what the service reported until the deadline."""
        if self._service.address is None:
            return RasReport(notes=(self._service.note,) if self._service.note else ())
        name, problem = f"NCCL RAS at {self._service.address.text}", ""
        try:
            self._call.result(max(0.0, self._until - time.monotonic()))
        except TimeoutError:
            problem = "does not respond in time"
        except OSError as error:
            problem = f"does not respond ({error.strerror or error})"
        texts = list(self._texts)
        if not texts:
            return RasReport(notes=(f"{name} {problem}",))
        try:
            return BackgroundCall(lambda: self._parsed(name, texts)).result(PARSE_SECONDS)
        except TimeoutError:
            return RasReport(notes=(f"the report of {name} takes too long to parse",))

    def _parsed(self, name: str, texts: Sequence[str]) -> RasReport:
        if not all(map(looks_like_ras, texts)):
            return RasReport(notes=(f"{name}: what listens there is not NCCL RAS",))
        if other := self._other_job(texts[-1]):
            return RasReport(notes=(f"{name} reports another job: {other}",))
        events = tuple(read_ras("\n".join(texts), "NCCL RAS"))[:MOST_EVENTS]
        nothing = f"{name} reports no lost process, no error and no rank that is behind"
        return RasReport(events, () if events else (nothing,))

    def _other_job(self, text: str) -> str:
        """In what a report differs from this job; empty if it may be of this job."""
        response: RasResponse | None = next(iter(read_responses(text)), None)
        if response is None:
            return ""
        listed = {process.pid for one in response.communicators for process in one.members.values()}
        missing = [*response.missing, *(rank for one in response.communicators for rank in one.missing)]
        whole = text.lstrip()[:1] == "{" and bool(listed)
        if whole and self._pids.isdisjoint(listed | {one.process.pid for one in missing}):
            return "it lists none of the ranks of this host"
        if not whole and response.gpus and self._world_size and response.gpus != self._world_size:
            return f"it has {counted(response.gpus, 'GPU')}, and this job {counted(self._world_size, 'rank')}"
        return ""


def ask_service(address: RasAddress, until: float, *, in_json: bool = True) -> str:
    """Return a report; ``until``: deadline by :func:`time.monotonic`.

    Raises:
        OSError: it does not respond until then, is not a RAS service, or sends more than :data:`LARGEST` bytes.
    """
    with socket.create_connection(address, timeout=_left(until)) as connection:
        lines = _Conversation(connection, until)
        if not lines.ask("client protocol 2").upper().startswith("SERVER PROTOCOL "):
            raise ConnectionError("it is not NCCL RAS")
        lines.ask(f"timeout {LEG_SECONDS}")
        if in_json:
            lines.ask("set format json")
        return lines.ask_for_all("verbose status")


class _Conversation:
    """Lines to and from a service. ``_rest``: what it sent beyond the last line."""

    def __init__(self, connection: socket.socket, until: float) -> None:
        self._connection = connection
        self._until = until
        self._rest = b""

    def ask(self, command: str) -> str:
        """Return the line that answers a command."""
        self._send(command)
        while b"\n" not in self._rest:
            part = self._receive()
            if not part or len(self._rest) > LONGEST_LINE:
                raise ConnectionError("it is not NCCL RAS")
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode("utf-8", "replace")

    def ask_for_all(self, command: str) -> str:
        """Return all that the service sends after a command, until it closes the connection."""
        self._send(command)
        parts, size = [self._rest], len(self._rest)
        while part := self._receive():
            parts.append(part)
            size += len(part)
            if size > LARGEST:
                raise ConnectionError(f"its report has more than {LARGEST >> 20} MiB")
        return b"".join(parts).decode("utf-8", "replace")

    def _send(self, command: str) -> None:
        self._connection.settimeout(_left(self._until))
        self._connection.sendall(f"{command}\n".encode())

    def _receive(self) -> bytes:
        self._connection.settimeout(_left(self._until))
        return self._connection.recv(1 << 16)


def _left(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError("it takes too long")
    return left
