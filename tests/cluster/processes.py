"""Ranks as real processes: the command, in a clean environment, ended with all that it started when the test ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tests.lab.needs import clean_environ
from tests.lab.speed import patience

T = TypeVar("T")

DOCTOR = [sys.executable, "-m", "doctor"]
ABOUT_THE_JOB = ("--select", "ENV004,ENV005,ENV008,NET003")
"""Checks of who came (ENV), and one that needs what is read once a host (NET003): whatever else is wrong with the
machine that runs the tests is none of their business."""
LIMIT = patience(90.0)
"""Seconds after which a command hangs. Importing torch takes many on a machine that is busy."""


class Command:
    """One command that runs, in ``folder``; its output goes to files, so that nobody waits for a reader."""

    def __init__(self, argv: Sequence[str | Path], folder: Path, environ: Mapping[str, str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._files = [folder / "stdout", folder / "stderr"]
        with self._files[0].open("wb") as stdout, self._files[1].open("wb") as stderr:
            self.process = subprocess.Popen(
                [str(word) for word in argv],
                env={**clean_environ(folder), **environ},
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )

    @property
    def stdout(self) -> str:
        """What it has printed."""
        return self._files[0].read_text(errors="replace")

    @property
    def stderr(self) -> str:
        """What it has told."""
        return self._files[1].read_text(errors="replace")

    @property
    def report(self) -> dict[str, Any]:
        """The one document that it has printed."""
        document: dict[str, Any] = json.loads(self.stdout)
        return document

    def wait(self) -> int:
        """Its exit code. It neither hangs nor lets an exception out."""
        code = self.process.wait(LIMIT)
        for text in (self.stdout, self.stderr):
            assert "Traceback" not in text, text
            assert "Exception in thread" not in text, text
            assert "terminate called" not in text, text
        return code

    def send(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    def end(self) -> None:
        """Kill it and everything that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(LIMIT)


class Commands:
    """Commands of one test, as a context; each gets a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._started: list[Command] = []

    def __enter__(self) -> Commands:
        return self

    def __exit__(self, *_: object) -> None:
        for command in self._started:
            command.end()

    def start(self, argv: Sequence[str | Path], **environ: str) -> Command:
        """Start ``argv`` with these variables added."""
        folder = self.folder / f"process-{len(self._started)}"
        # A name server that does not answer costs a second, and not many; see resolv.conf(5).
        self._started.append(Command(argv, folder, {"RES_OPTIONS": "timeout:1 attempts:1", **environ}))
        return self._started[-1]

    def rank(self, number: int, world: int, port: int, *arguments: str | Path, **environ: str) -> Command:
        """Start ``doctor`` as a rank that was started by hand."""
        return self.start([*DOCTOR, *arguments], **{**rank_environ(number, world, port), **environ})

    def ranks(self, world: int, port: int, *arguments: str | Path, **environ: str) -> list[Command]:
        """All ranks of a job on this host."""
        return [self.rank(number, world, port, *arguments, **environ) for number in range(world)]


def rank_environ(number: int, world: int, port: int) -> dict[str, str]:
    """The variables of a rank on this host."""
    numbers = {
        "RANK": number,
        "LOCAL_RANK": number,
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": world,
        "MASTER_PORT": port,
    }
    return {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in numbers.items()}}


def wait(*commands: Command) -> list[int]:
    """Their exit codes."""
    return [command.wait() for command in commands]


def is_taken(port: int) -> bool:
    """Whether somebody listens on a port of this host."""
    with contextlib.closing(socket.socket()) as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def until(holds: Callable[[], T], seconds: float = LIMIT) -> T:
    """What ``holds`` gives once it is true."""
    end = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.02)
    return found


def posted(share: Path) -> int:
    """How many ranks have brought their facts to the gathering in a folder."""
    return len([entry for entry in share.glob(".rankdoctor-*/*/facts/*") if not entry.name.startswith(".")])


def lacks_of_hosts(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Checks that miss the facts of a host, which some process was to read."""
    return [
        (result["id"], result["reason"])
        for result in report["results"]
        if result["status"] == "unknown" and any(lack in result["reason"] for lack in ("do not hold", "fell silent"))
    ]
