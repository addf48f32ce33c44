"""Small training jobs over Gloo, without the doctor in them, that hang or move in a known way."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from tests.lab.needs import clean_environ, require_tools
from tests.lab.ports import free_port
from tests.lab.speed import patience

PROGRAM = Path(__file__).with_name("scenes.py")
SPAWNING = Path(__file__).with_name("spawned_scenes.py")
ATTACH = (sys.executable, "-m", "doctor", "attach")
_LONGEST_ENVIRON = 4096


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
            for result in self.report.get("results", ())
            for finding in result["findings"]
        ]


def doctor_attach(*arguments: object, before: Sequence[str] = (), **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the command; ``before``: what its command line begins with."""
    command = [*before, *ATTACH, *map(str, arguments)]
    return subprocess.run(
        command,
        env=clean_environ(Path("/nonexistent")) | environ,
        capture_output=True,
        text=True,
        timeout=patience(60),
        check=False,
    )


class TrainingJob:
    """A running job. ``processes``: those that were started for it, which are its ranks or their launcher."""

    def __init__(self, name: str, processes: Sequence[psutil.Process], world: int, folder: Path) -> None:
        self.name = name
        self.processes = processes
        self.folder = folder
        self._world = world

    def attach(self, *arguments: object) -> Attached:
        """Attach to it once."""
        done = self.run_doctor("--isolated", "--format", "json", *arguments)
        return Attached(done.returncode, json.loads(done.stdout) if done.stdout else {}, done.stderr)

    def run_doctor(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        """Run the command, which finds the job by its id."""
        return doctor_attach("--job", self.name, *arguments)

    def wait_for_scene(self) -> None:
        """Wait until every rank has come to what the scene does."""
        until = time.monotonic() + patience(60)
        while len(list(self.folder.glob("rank-*"))) < self._world:
            assert time.monotonic() < until, ("the job did not start", (self.folder / "log").read_text())
            time.sleep(0.05)
        time.sleep(0.5)  # for the others to come to where they wait

    def states(self) -> dict[psutil.Process, tuple[bool, str]]:
        """Whether each process of the job, with all children, is stopped, and the PID of its tracer."""
        found = {}
        for process in self.processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                for one in (process, *process.children(recursive=True)):
                    status = Path(f"/proc/{one.pid}/status").read_text()
                    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
                    found[one] = (fields["State"][0] in "Tt", fields["TracerPid"])
        return found


class _WarmProgram:
    """A process that has imported what a rank needs, and forks ranks."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._turn = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, str(PROGRAM), "serve", *modules],
            env={"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", "PADDING": "x" * _LONGEST_ENVIRON},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        atexit.register(self._end)

    def fork(self, scene: str, folder: Path, environ: Mapping[str, str]) -> psutil.Process:
        """Start a process of the job in ``folder``, which leads a session of its own."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        with self._turn:
            stdin.write(json.dumps([scene, str(folder), environ]) + "\n")
            stdin.flush()
            return psutil.Process(int(stdout.readline()))

    def _end(self) -> None:
        self._process.kill()
        self._process.communicate()


warm_program = functools.cache(_WarmProgram)


@contextlib.contextmanager
def running(
    scene: str,
    folder: Path,
    world: int = 3,
    launch: str = "",
    needs: tuple[str, ...] = (),
    own_hosts: bool = False,
    **variables: str,
) -> Iterator[TrainingJob]:
    """A job of ``world`` ranks that plays ``scene``; see :class:`tests.attach.plays.AttachScene`. With ``own_hosts``,
    each has PID, UTS and mount namespaces of its own, and the processes of the job are their parents."""
    port = free_port()
    name = f"{os.getpid()}-{port}"
    environ = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "PBS_JOBID": name,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        **variables,
    }
    (folder / "log").touch()
    processes: list[psutil.Process] = []
    job = TrainingJob(name, processes, world, folder)
    try:
        processes.extend(_started(scene, folder, environ, world, launch, needs, own_hosts))
        job.wait_for_scene()
        yield job
    finally:
        for process in processes:
            for one in (process, *_children(process)):  # a pool replaces a child that ends
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
        psutil.wait_procs(processes, timeout=patience(10))


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _started(
    scene: str,
    folder: Path,
    environ: dict[str, str],
    world: int,
    launch: str,
    needs: tuple[str, ...],
    own_hosts: bool,
) -> Iterator[psutil.Process]:
    if launch == "Lightning":
        yield warm_program(needs).fork(scene, folder, environ)
    elif launch:
        with (folder / "log").open("ab") as log:
            yield psutil.Popen(_command(launch, scene, folder, world, environ), env=environ, stdout=log, stderr=log)
    else:
        numbers = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": "1" if own_hosts else str(world)}
        for rank in map(str, range(world)):
            own = {"RANK": rank, "LOCAL_RANK": "0" if own_hosts else rank, **numbers}
            if own_hosts:
                own["OWN_HOST"] = f"host{rank}"
            yield warm_program(needs).fork(scene, folder, {**environ, **own})


def _command(launch: str, scene: str, folder: Path, world: int, environ: Mapping[str, str]) -> list[str]:
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n"]
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    programs = {
        "torchrun": [torchrun, "--nproc-per-node", f"{world}", "--master-port", environ["MASTER_PORT"], str(PROGRAM)],
        "mpirun": [*mpirun, f"{world}", sys.executable, str(PROGRAM)],
        "torch.multiprocessing": [sys.executable, str(SPAWNING)],
    }
    require_tools(programs[launch][0])
    return [*programs[launch], scene, str(folder)]
