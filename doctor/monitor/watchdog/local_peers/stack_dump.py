"""Stack dumps of this process on request of a local peer, without the interpreter.

A signal makes faulthandler write them, in C, without the GIL. That is safe while the GIL is held in C code, but not
while Python code runs: walking changing frames ended a busy process with SIGSEGV after some hundred signals (CPython
3.11; faulthandler documents no such use). So no timer requests them, which would also fire after a pause of the whole
process; a local peer does, of a rank that does not respond during an incident.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import threading
from io import FileIO
from pathlib import Path
from typing import NamedTuple

from doctor.core.clock import monotonic, sleep
from doctor.core.facts import Frame
from doctor.core.files.own_folder import OwnFile, OwnFolder
from doctor.monitor.telemetry.stacks.stack_files import HEAD, LARGEST, REQUEST, current_thread_in


class StackSignal(NamedTuple):
    """How a process is asked for stacks: a real-time signal to one of its threads.

    Never the training thread, whose system calls the signal would interrupt. ``number`` is 0 if no signal is available.
    """

    thread: int
    number: int


FOLDER = ".stacks"
FORK_SECONDS, FORK_LOOK = 1.0, 0.05
"""Seconds within which a forked child writes its stack, and between two looks."""


def stack_file(directory: Path | OwnFolder, rank: int) -> OwnFile:
    """Return the stack file of a rank, hidden because ``doctor diagnose`` must not read it."""
    return OwnFolder.of(directory).file(f"{FOLDER}/rank-{rank}.txt")


class StackDumper:
    """The stack dumper of this process; the handler stays, as a late signal would end it."""

    def __init__(self) -> None:
        self._file: FileIO | None = None
        self._number = 0

    def install(self) -> None:
        """Install the signal handler for the lifetime of the process."""
        if self._file is None:
            self._file = Path(os.devnull).open("wb", buffering=0)  # noqa: SIM115 - as long as the process
            # Not supported on every platform.
            with contextlib.suppress(AttributeError, OSError, RuntimeError, ValueError):
                number = _free_signal()
                faulthandler.register(number, file=self._file, all_threads=True, chain=False)
                self._number = number

    @property
    def signal(self) -> StackSignal:
        """The signal that requests stacks from the calling thread."""
        return StackSignal(threading.get_native_id(), self._number)

    def write_to(self, file: Path | OwnFile, training_thread: int, requested_by: StackSignal | None = None) -> None:
        """Write stacks to ``file`` from now on.

        ``training_thread``: identity of the training thread, for
        :func:`doctor.monitor.telemetry.stacks.stack_files.read_stack_file`. ``requested_by``: how a process that has no
        announcement of this rank (``doctor attach``) requests stacks.

        Raises:
            OSError: the file cannot be written.
        """
        with OwnFile.of(file).draft() as stream:
            stream.write(HEAD.format(training_thread).encode())
            if requested_by is not None and requested_by.number:
                stream.write(REQUEST.format(requested_by.number, requested_by.thread).encode())
            self._redirect(stream)

    def discard(self, file: Path | OwnFile) -> None:
        """Remove the file, and its folder if it was the last one."""
        with contextlib.suppress(OSError):
            with Path(os.devnull).open("wb", buffering=0) as null:
                self._redirect(null)
            OwnFile.of(file).remove()

    def stack_of_fork(self, pid: int, file: Path | OwnFile, seconds: float = FORK_SECONDS) -> tuple[Frame, ...]:
        """Return the stack of the main thread of a child that was forked by this process; empty without an answer.

        A fork inherits the handler and the stack file. Only one that sleeps in the kernel may be asked: faulthandler
        walks frames that then do not change. What it writes is removed, as peers take the newest stack in the file for
        one of this process.
        """
        if self._file is None or not self._number or not _may_be_asked(pid, self._number):
            return ()
        descriptor, written = self._file.fileno(), OwnFile.of(file)
        before = os.fstat(descriptor).st_size
        os.kill(pid, self._number)
        until = monotonic() + seconds
        size = before
        while monotonic() < until:
            sleep(FORK_LOOK)
            last, size = size, os.fstat(descriptor).st_size
            if size == last > before:
                break
        text = written.read(LARGEST, whole=False)[before:].decode("utf-8", "replace") if size > before else ""
        os.ftruncate(descriptor, before)
        os.lseek(descriptor, before, os.SEEK_SET)
        return current_thread_in(text)

    def _redirect(self, stream: FileIO) -> None:
        if self._file is not None:
            os.dup2(stream.fileno(), self._file.fileno())


STACK_DUMPER = StackDumper()


def _may_be_asked(pid: int, number: int) -> bool:
    """Return whether a child of this process catches the signal, and sleeps."""
    try:
        lines = (Path("/proc") / str(pid) / "status").read_text(encoding="utf-8", errors="replace").splitlines()
        fields = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        catches = bool(int(fields["SigCgt"], 16) >> (number - 1) & 1)
        return int(fields["PPid"]) == os.getpid() and fields["State"].startswith("S") and catches
    except (OSError, KeyError, ValueError):
        return False


def _free_signal() -> int:
    """Return a real-time signal that this process does not catch, ignore or block.

    The highest one, because libraries that take some begin at the lowest.

    Raises:
        ValueError: there is none.
    """
    fields = (line.split(":\t") for line in Path("/proc/thread-self/status").read_text().splitlines())
    masks = {name: int(value, 16) for name, value in fields if name in ("SigCgt", "SigIgn", "SigBlk")}
    taken = masks["SigCgt"] | masks["SigIgn"] | masks["SigBlk"]
    return max(n for n in range(signal.SIGRTMIN + 1, signal.SIGRTMAX + 1) if not taken >> (n - 1) & 1)
