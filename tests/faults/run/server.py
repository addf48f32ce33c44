"""A process that has imported torch and Lightning once, and forks the ranks of one run after another.

    python server.py serve                  plays as they are asked for on stdin, answers on stdout (see stage.py)
    python server.py play PART              one rank, started by a launcher that runs a command

Everything that a run starts stays below this process, also what loses its parent, and is killed when the run is over.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil

from tests.faults.run.role import CODE, LOG, REPORT, Part, Role
from tests.lab.ports import free_port

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
"""Of prctl(2): what a process is sent when its parent ends; that it takes in what lost its parent below it."""
LOOK = 0.05
"""Seconds between looks at a run."""
IMPORTED = ("torch.distributed", "lightning.pytorch", "pytorch_lightning")


class Request(msgspec.Struct, frozen=True):
    """A run to be played: its ``part``, how many processes are started ``by`` whom, for how many ``seconds`` at most.
    It is over when all have ended, or ``settle`` seconds after the report names one of ``ids`` at ``severity``."""

    part: Part
    seconds: float
    ids: tuple[str, ...] = ()
    severity: str = ""
    settle: float | None = None
    environ: dict[str, str] = {}


class Answer(msgspec.Struct, frozen=True):
    """``seconds`` that the run took; ``seen``: when the report first named one of the ids, since the epoch."""

    seconds: float
    seen: float | None = None


def main(arguments: list[str]) -> None:
    """Serve, or play one part. A forked rank comes back from serving with its part, and ends as a script does."""
    part = serve() if arguments[:1] == ["serve"] else msgspec.json.decode(arguments[1], type=Part)
    if part is not None:
        module, _, function = part.program.partition(".")
        getattr(importlib.import_module(f"tests.faults.run.programs.{module}"), function)(Role(part))


def serve() -> Part | None:
    """Play what is asked for until stdin ends. In a forked rank: its part."""
    for name in IMPORTED:
        importlib.import_module(name)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    replies = os.dup(1)
    for line in iter(sys.stdin.readline, ""):
        request = msgspec.json.decode(line, type=Request)
        run = _Run(request)
        if not run.start():
            os.close(replies)
            return run.request.part
        os.write(replies, msgspec.json.encode(run.watch()) + b"\n")
    return None


class _Run:
    def __init__(self, request: Request) -> None:
        self.request = request
        self.folder = Path(request.part.folder)
        self.ranks: dict[int, int] = {}
        self.player = os.getppid()

    def start(self) -> bool:
        """Fork the ranks, or the one process that starts them. ``False`` in a forked one."""
        part = self.request.part
        port = free_port()
        for rank in range(part.world if part.by == "variables" else 1):
            pid = os.fork()
            if pid == 0:
                _become(self.request, rank, port)
                return False
            self.ranks[pid] = rank
        return True

    def watch(self) -> Answer:
        """Until the run is over; nothing is left of it then."""
        try:
            return self._watch()
        finally:
            self.kill()

    def _watch(self) -> Answer:
        began, seen = time.monotonic(), None
        end = began + self.request.seconds
        while self.ranks and time.monotonic() < end and os.getppid() == self.player:
            self.reap()
            if seen is None and self.names_it():
                seen = (self.folder / REPORT).stat().st_mtime
                if self.request.settle is not None:
                    end = min(end, time.monotonic() + self.request.settle)
            time.sleep(LOOK)
        return Answer(time.monotonic() - began, seen)

    def reap(self) -> None:
        """Note how those ended that did."""
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                rank = self.ranks.pop(ended[0], None)
                if rank is not None:
                    (self.folder / CODE.format(rank)).write_text(str(os.waitstatus_to_exitcode(ended[1])))

    def names_it(self) -> bool:
        """Whether the report has a finding of one of the ids."""
        if not self.request.ids:
            return False
        try:
            report = json.loads((self.folder / REPORT).read_bytes())
        except (OSError, ValueError):
            return False
        named = [result["findings"] for result in report["results"] if result["id"] in self.request.ids]
        return any(finding["severity"] == self.request.severity for findings in named for finding in findings)

    def kill(self) -> None:
        """All that is below this process, and what they started meanwhile."""
        self.ranks.clear()
        while below := psutil.Process().children(recursive=True):
            for process in below:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            self.reap()
            time.sleep(0.01)


def _become(request: Request, rank: int, port: int) -> None:
    """Be a process of the run: its own session, output, directory, environment and command line."""
    part = request.part
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    silence = os.open(os.devnull, os.O_RDONLY)
    log = os.open(Path(part.folder) / LOG.format(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor, onto in ((silence, 0), (log, 1), (log, 2)):
        os.dup2(descriptor, onto)
    os.chdir(part.folder)
    os.environ.update({"HOME": part.folder, "TMPDIR": part.folder, **request.environ})
    sys.modules["torch.distributed"].set_debug_level_from_env()  # was read when torch was imported
    argv = [str(Path(__file__).resolve()), "play", msgspec.json.encode(part).decode()]
    sys.argv = argv
    if part.by == "variables":
        os.environ.update(_variables(rank, part.world, port))
    if part.by == "torchrun":
        options = ["--standalone", f"--nproc-per-node={part.world}"]
        os.execvp("torchrun", ["torchrun", *options, *argv])


def _variables(rank: int, world: int, port: int) -> dict[str, str]:
    """What torch's env:// and Lightning read where somebody else starts the ranks of one host."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "NODE_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


if __name__ == "__main__":
    main(sys.argv[1:])
