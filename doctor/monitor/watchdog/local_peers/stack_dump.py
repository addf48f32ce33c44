"""The stacks of this process for a neighbour that asks for them, when its own interpreter answers nobody.

A signal makes faulthandler write them, in C, without the interpreter's lock. That is safe while this lock is held in C
code, and not while Python runs: walking frames that change ended a busy process with SIGSEGV after some hundred
signals (CPython 3.11; faulthandler documents no such use). So no timer of one's own asks for them, which would also
fire after a pause of the whole process: a neighbour does, of a rank that does not answer while the job stands still.
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

from doctor.core.files.own_folder import OwnFile, OwnFolder
from doctor.monitor.telemetry.stacks.stack_files import HEAD


class StackSignal(NamedTuple):
    """How a process is asked: a real-time signal to one thread of it, which is never the training thread: a signal
    would cut its system calls short. ``number`` is 0 where it can't be."""

    thread: int
    number: int


FOLDER = ".stacks"


def stack_file(directory: Path | OwnFolder, rank: int) -> OwnFile:
    """Where the stacks of a rank go. Hidden: no input for ``doctor diagnose``."""
    return OwnFolder.of(directory).file(f"{FOLDER}/rank-{rank}.txt")


class StackDumper:
    """Of this process. There is one: the handler stays as long as the process, which a late signal would end
    otherwise."""

    def __init__(self) -> None:
        self._file: FileIO | None = None
        self._number = 0

    def listen(self) -> None:
        """Let signals ask for stacks, from now on and as long as the process lives."""
        if self._file is None:
            self._file = Path(os.devnull).open("wb", buffering=0)  # noqa: SIM115 - as long as the process
            with contextlib.suppress(AttributeError, OSError, RuntimeError, ValueError):  # there is no such thing here
                number = _free_signal()
                faulthandler.register(number, file=self._file, all_threads=True, chain=False)
                self._number = number

    @property
    def signal(self) -> StackSignal:
        """How the calling thread is asked."""
        return StackSignal(threading.get_native_id(), self._number)

    def write_to(self, file: Path | OwnFile, trainer: int) -> None:
        """Where stacks go from now on. ``trainer``: identity of the training thread, for
        :func:`doctor.monitor.telemetry.stacks.stack_files.read_stack_file`.

        Raises:
            OSError: the file can't be written.
        """
        with OwnFile.of(file).draft() as stream:
            stream.write(HEAD.format(trainer).encode())
            self._turn_to(stream)

    def write_nowhere(self, file: Path | OwnFile) -> None:
        """Remove the file again, and its folder with the last one."""
        with contextlib.suppress(OSError):
            with Path(os.devnull).open("wb", buffering=0) as nowhere:
                self._turn_to(nowhere)
            OwnFile.of(file).remove()

    def _turn_to(self, stream: FileIO) -> None:
        """The handler knows the file by its number, which comes to mean another one."""
        if self._file is not None:
            os.dup2(stream.fileno(), self._file.fileno())


STACK_DUMPER = StackDumper()


def _free_signal() -> int:
    """A real-time signal that nothing in this process catches or ignores, and this thread does not block; the highest,
    as libraries that take some begin at the lowest.

    Raises:
        ValueError: there is none.
    """
    fields = (line.split(":\t") for line in Path("/proc/thread-self/status").read_text().splitlines())
    masks = {name: int(value, 16) for name, value in fields if name in ("SigCgt", "SigIgn", "SigBlk")}
    taken = masks["SigCgt"] | masks["SigIgn"] | masks["SigBlk"]
    return max(n for n in range(signal.SIGRTMIN + 1, signal.SIGRTMAX + 1) if not taken >> (n - 1) & 1)
