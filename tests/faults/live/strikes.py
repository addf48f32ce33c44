"""What may happen to a rank while all of them gather: a signal at a given moment, or the loss of its host."""

from __future__ import annotations

import functools
import hashlib
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from doctor.cluster.membership.protocol import JoinRequest
from doctor.cluster.transport.codec import MalformedMessage, decode
from doctor.cluster.transport.signing import SIGNED
from tests.faults.live.stage import Stage
from tests.lab.hosts import LabHost

STEADY = 0.3
"""Seconds after which a connection is more than a knock."""


@dataclass(frozen=True)
class Strike:
    """``signum`` for the doctor of ``rank``, as soon as ``when(stage, rank)`` holds."""

    rank: int
    signum: int
    when: Callable[[Stage, int], bool]


@dataclass(frozen=True)
class Strikes:
    """For :attr:`Play.during`: signals to ranks, in turn. Those that were stopped are killed when the others have
    ended, so that the play ends too."""

    strikes: tuple[Strike, ...]

    def __call__(self, stage: Stage) -> None:
        """Wait for the moment of each, and strike."""
        for strike in self.strikes:
            stage.until(functools.partial(strike.when, stage, strike.rank))
            _send(stage, strike.rank, strike.signum)
        stopped = {strike.rank for strike in self.strikes if strike.signum == signal.SIGSTOP}
        others = {rank for rank, _, _ in stage.play.started} - stopped
        stage.until(lambda: others <= stage.ended(), stage.play.seconds)
        for rank in stopped:
            _send(stage, rank, signal.SIGKILL)


@dataclass(frozen=True)
class Loss:
    """For :attr:`Play.during`: the host of ``rank`` is lost when that one has said hello. Nothing is left of it."""

    rank: int

    def __call__(self, stage: Stage) -> None:
        """Wait for the moment, and strike."""
        stage.until(lambda: has_arrived(stage, self.rank))
        [host] = {host for host in stage.hosts if _processes_on(host, stage, self.rank)}
        host.kill()


def has_started(stage: Stage, rank: int) -> bool:
    """The doctor of ``rank`` runs, and has said nothing yet."""
    return bool(_processes(stage, rank))


def has_arrived(stage: Stage, rank: int) -> bool:
    """``rank`` has said hello to the others: seen in the folder; at a store it does so as soon as it is connected and
    somebody calls, who then says whom he waits for."""
    if stage.play.way == "share":
        return _has_greeted(stage, rank)
    called = any("ranks joined" in one.stderr for one in stage.said())
    return called and _is_connected(stage, rank)


def others_have_arrived(stage: Stage, rank: int) -> bool:
    """All but ``rank`` have said hello to it."""
    return all(has_arrived(stage, other) for other, _, _ in stage.play.started if other != rank)


def is_measured(stage: Stage, rank: int) -> bool:
    """Everybody has brought facts, ``rank`` too, and the probes begin."""
    return any("light probes" in one.stderr for one in stage.said())


def _has_greeted(stage: Stage, rank: int) -> bool:
    for path in stage.share.glob(".rankdoctor-*/*/hello/[!.]*"):
        try:
            if decode(_unsigned(path.read_bytes()), JoinRequest).number == rank:
                return True
        except (OSError, MalformedMessage):
            continue
    return False


def _unsigned(data: bytes) -> bytes:
    """A message without the signature that it begins with where the job has a key, as one that meets in a folder."""
    return data[len(SIGNED) + hashlib.sha256().digest_size :] if data.startswith(SIGNED) else data


def _is_connected(stage: Stage, rank: int) -> bool:
    """Whether ``rank`` has a connection to the store that lasts."""
    if not _connections(stage, rank):
        return False
    time.sleep(STEADY)
    return _connections(stage, rank) > 0


def _connections(stage: Stage, rank: int) -> int:
    """How many connections to the master's port the processes of ``rank`` have. See proc_net_tcp(5): every line has the
    addresses in the second and third column, the state in the fourth and the socket's inode in the tenth."""
    count = 0
    for process in _processes(stage, rank):
        with suppress(OSError):
            folder = Path(f"/proc/{process.pid}")
            own = {link.readlink().name for link in (folder / "fd").iterdir()}
            tables = ((folder / "net" / name).read_text() for name in ("tcp", "tcp6"))
            rows = [line.split() for table in tables for line in table.splitlines()]
            remote, state = f":{stage.play.port:04X}", "01"
            count += sum(row[2].endswith(remote) and row[3] == state and f"socket:[{row[9]}]" in own for row in rows)
    return count


def _processes(stage: Stage, rank: int) -> list[psutil.Process]:
    return [process for host in stage.hosts for process in _processes_on(host, stage, rank)]


def _processes_on(host: LabHost, stage: Stage, rank: int) -> list[psutil.Process]:
    return host.processes("-m doctor", **{_variable(stage): str(rank)})


def _send(stage: Stage, rank: int, signum: int) -> None:
    found = _processes(stage, rank)
    assert found, f"rank {rank} has ended before its time"
    for process in found:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signum)


def _variable(stage: Stage) -> str:
    """Where the environment of a process holds its rank."""
    number = stage.play.launcher.number.lstrip("$")
    return "RANK" if number.isdigit() else number
