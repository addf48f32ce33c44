"""Small training jobs over Gloo, without the doctor in them, that hang or move in a known way."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.lab.needs import clean_environ
from tests.lab.ports import free_ports
from tests.lab.speed import patience

PROGRAM = Path(__file__).with_name("scenes.py")
PORTS = free_ports()


class Attached(NamedTuple):
    """What ``doctor attach`` returned: exit code, report, and standard error."""

    code: int
    report: dict[str, Any]
    stderr: str

    @property
    def findings(self) -> list[tuple[str, list[int], str]]:
        """Check, ranks and severity of all findings about the ranks."""
        return [
            (result["id"], finding["ranks"], finding["severity"])
            for result in self.report["results"]
            for finding in result["findings"]
        ]


def doctor_attach(*arguments: object, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the command."""
    command = [sys.executable, "-m", "doctor", "attach", *map(str, arguments)]
    return subprocess.run(
        command,
        env=clean_environ(Path("/nonexistent")) | environ,
        capture_output=True,
        text=True,
        timeout=patience(60),
        check=False,
    )


class TrainingJob:
    """The processes of a running job, by rank."""

    def __init__(self, processes: Sequence[subprocess.Popen[bytes]], folder: Path) -> None:
        self.processes = processes
        self.folder = folder

    def attach(self, *arguments: object) -> Attached:
        """Attach to all of its ranks."""
        pids = [word for process in self.processes for word in ("--pid", process.pid)]
        done = doctor_attach("--isolated", "--format", "json", *pids, *arguments)
        return Attached(done.returncode, json.loads(done.stdout) if done.stdout else {}, done.stderr)

    def wait_for_scene(self) -> None:
        """Wait until every rank has come to what the scene does."""
        until = time.monotonic() + patience(60)
        while len(list(self.folder.glob("rank-*"))) < len(self.processes):
            assert time.monotonic() < until, "the job did not start"
            assert all(process.poll() is None for process in self.processes), (self.folder / "log").read_text()
            time.sleep(0.05)
        time.sleep(0.5)  # for the others to come to where they wait


@contextlib.contextmanager
def running(scene: str, folder: Path, world: int = 3) -> Iterator[TrainingJob]:
    """A job of ``world`` ranks that plays ``scene``."""
    port = str(next(PORTS))
    processes: list[subprocess.Popen[bytes]] = []
    with (folder / "log").open("wb") as log:
        for rank in range(world):
            environ = {
                "PATH": os.environ["PATH"],
                "HOME": str(folder),
                "RANK": str(rank),
                "WORLD_SIZE": str(world),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(world),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": "1",
            }
            command = [sys.executable, str(PROGRAM), scene, str(folder)]
            processes.append(subprocess.Popen(command, env=environ, stdout=log, stderr=log, start_new_session=True))
        job = TrainingJob(processes, folder)
        try:
            job.wait_for_scene()
            yield job
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            for process in processes:
                process.wait()
