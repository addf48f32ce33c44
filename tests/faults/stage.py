"""Where scenes are played: hosts and processes made for real, with the real command in each of them.

A :class:`Play` is data: hosts, the namespaces that make each one, the shell commands that put it into its state, and
the processes on it with their environment, their GPUs (a driver that is not there, see tests/lab) and their packages.
:func:`perform` makes it real: one process alone runs ``doctor check``; of several, each runs ``doctor capture``, and
``doctor diagnose`` judges the folder. Everything happens in a clean environment and ends with the play.
"""

from __future__ import annotations

import functools
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults.wheels import install
from tests.lab.needs import CannotPlay, clean_environ, require_namespaces, require_tools
from tests.lab.nvml import FakeNvml, build_library, compiler
from tests.lab.speed import patience

ROOT = Path(__file__).parents[2]
DOCTOR = f"{shlex.quote(sys.executable)} -m doctor"
LOUD = ("error", "warning")
INITIAL_PIDS = "pid:[4026531836]"
"""The PID namespace of the host itself (linux/proc_ns.h PROC_PID_INIT_INO)."""


@dataclass(frozen=True)
class Process:
    """A process of a job. ``shell`` runs before it in the same shell (``ulimit -n 256``). ``gpus``: a machine of the
    lab and more lines for its driver. ``packages``: ``name==version`` as pip would have installed them."""

    environ: tuple[tuple[str, str], ...] = ()
    shell: str = ""
    gpus: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    wrapper: str = ""


@dataclass(frozen=True)
class Host:
    """Processes that share namespaces and a state. ``spaces``: kinds of namespaces of its own, as unshare(1) calls
    them; ``setup``: shell commands that run in them before the processes start; ``needs``: tools, see
    :func:`require`. ``launcher``: a real one (``torchrun --nproc-per-node 2 --no-python``), which starts as many of the
    one process given here as it is told."""

    processes: tuple[Process, ...]
    spaces: tuple[str, ...] = ()
    setup: str = ""
    needs: tuple[str, ...] = ()
    launcher: str = ""


@dataclass(frozen=True)
class Play:
    """What is put on stage. ``options`` go to the command that judges."""

    hosts: tuple[Host, ...]
    options: tuple[str, ...] = ()

    @property
    def is_alone(self) -> bool:
        """Whether there is one process, which is judged by ``doctor check``."""
        return sum(len(host.processes) for host in self.hosts) == 1 and not self.hosts[0].launcher


@dataclass(frozen=True)
class Outcome:
    """The exit code, the report document, and what was written to stderr."""

    code: int
    report: Mapping[str, Any]
    stderr: str = ""

    def result(self, check: str) -> Mapping[str, Any]:
        """The result of a check, by its id."""
        return next(result for result in self.report["results"] if result["id"] == check)

    def findings(self, check: str) -> list[Mapping[str, Any]]:
        """The findings of a check that stand, by its id."""
        return [finding for finding in self.result(check)["findings"] if finding["ignored"] is None]

    def alarms(self, *, but_consequences_of: str = "") -> dict[str, list[str]]:
        """Summaries of the findings of severity error or warning, by id; not those that one id explains."""
        loud: dict[str, list[str]] = {}
        for result in self.report["results"]:
            for finding in result["findings"]:
                if finding["severity"] in LOUD and (finding["explained_by"] or "-") != but_consequences_of:
                    loud.setdefault(result["id"], []).append(finding["summary"])
        return loud

    def crashed(self) -> list[str]:
        """Checks that broke, and why."""
        return [
            f"{result['id']}: {result['reason']}" for result in self.report["results"] if result["status"] == "crash"
        ]


@functools.cache
def perform(play: Play) -> Outcome:
    """What the doctor says of ``play``; each play is made once a process of the test run.

    Raises:
        CannotPlay: a tool or a right is missing.
    """
    for host in play.hosts:
        require(*host.needs)
        if host.spaces:
            require_namespaces()
    with tempfile.TemporaryDirectory(prefix="rankdoctor-scene-") as name:
        folder = Path(name)
        if play.is_alone:
            command = f"check --gather none --format json {shlex.join(play.options)}"
            return _outcome(_play_host(play.hosts[0], folder, command))
        return diagnose(capture(play, folder), *play.options)


def capture(play: Play, folder: Path, *options: str) -> Path:
    """The folder, below ``folder``, into which every process of ``play`` has captured itself."""
    captures = folder / "captures"
    captures.mkdir()
    for number, host in enumerate(play.hosts):
        # Ranks of a launcher run the same script: their shells' process numbers tell them apart.
        command = f"capture --gather none {shlex.join(options)} -o {captures}/{number}-$NUMBER-$$.json"
        done = _play_host(host, folder, command)
        assert done.returncode == 0, done.stderr
    return captures


def diagnose(path: Path, *options: str) -> Outcome:
    """What ``doctor diagnose`` says of a capture or of a folder of them."""
    return _outcome(
        run_shell(f"{DOCTOR} diagnose {shlex.quote(str(path))} --format json {shlex.join(options)}", path.parent)
    )


def _outcome(done: subprocess.CompletedProcess[str]) -> Outcome:
    assert "Traceback" not in done.stderr, done.stderr
    try:
        return Outcome(done.returncode, json.loads(done.stdout), done.stderr)
    except ValueError:
        raise AssertionError(f"no report (exit {done.returncode}): {done.stdout[-500:]}{done.stderr[-2000:]}") from None


def _play_host(host: Host, folder: Path, command: str) -> subprocess.CompletedProcess[str]:
    """Run ``command`` of the doctor in every process of ``host`` at the same time; the shell fails if one does."""
    lines = ["set -e", "trap 'jobs -p | xargs -r kill 2>/dev/null || true' EXIT"]
    if "net" in host.spaces:
        # A fresh /sys shows the interfaces of the namespace, and hides the cgroups unless they are carried over.
        lines.append("mkdir -p cgroup; mount --rbind /sys/fs/cgroup cgroup; mount -t sysfs none /sys")
        lines.append("mount --rbind cgroup /sys/fs/cgroup; ip link set lo up")
    lines += [host.setup, "W=()"]
    for number, process in enumerate(host.processes):
        wrapped = f"{process.wrapper} {DOCTOR} {command}".strip()
        exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in _environ(process, folder))
        body = f"{exports}export NUMBER={number}\n{process.shell}\n{wrapped}"
        if host.launcher:
            script = folder / f"rank-{number}.sh"
            script.write_text(body)
            body = f"{host.launcher} bash {script}"
        lines += [f"( {body}\n) &", "W+=($!)"]
    # Of several processes each one must succeed; of one, its exit code is what is wanted.
    lines.append('CODE=0; for P in "${W[@]}"; do wait $P || CODE=$?; done; exit $CODE')
    spaces = [f"--{space}" for space in host.spaces]
    if "pid" in host.spaces:
        spaces += ["--fork", "--mount-proc", "--kill-child"]
    return run_shell("\n".join(lines), folder, ["unshare", *spaces] if spaces else [])


def run_shell(
    script: str, folder: Path, prefix: list[str] | None = None, timeout: float = patience(30)
) -> subprocess.CompletedProcess[str]:
    """Run ``script`` by bash in the clean environment, in ``folder``, which is its home too."""
    command = [*(prefix or []), "bash", "-c", script]
    return subprocess.run(
        command, env=clean_environ(folder), cwd=folder, capture_output=True, text=True, timeout=timeout
    )


def _environ(process: Process, folder: Path) -> list[tuple[str, str]]:
    added = dict(process.environ)
    if process.gpus:
        if compiler() is None:
            raise CannotPlay("no C compiler for the GPUs of the lab")
        machine, *lines = process.gpus
        lab = FakeNvml(build_library(), folder).environ(machine, *lines)
        added = {"LD_LIBRARY_PATH": str(build_library().parent), "FAKE_NVML_CONF": lab["FAKE_NVML_CONF"], **added}
    if process.packages:
        site = install(folder, process.packages)
        added["PYTHONPATH"] = f"{site}:{clean_environ(folder)['PYTHONPATH']}"
    return list(added.items())


def require(*tools: str) -> None:
    """Raise :class:`CannotPlay` where one of ``tools`` is not there; ``host-pids`` is the sight of all processes."""
    if "host-pids" in tools and os.readlink("/proc/self/ns/pid") != INITIAL_PIDS:
        raise CannotPlay("needs the PID namespace of the host")
    if "two-cpus" in tools and len(os.sched_getaffinity(0)) < 2:
        raise CannotPlay("needs two processors")
    require_tools(*sorted({*tools} - {"host-pids", "two-cpus"}))


@functools.cache
def own_alarms() -> frozenset[str]:
    """What is wrong with this very machine before any scene (a container with a small /dev/shm, say)."""
    return frozenset(perform(Play((Host((Process(),)),))).alarms())


def true_here(play: Play) -> frozenset[str]:
    """Ids that are not held against ``play``: they are true of this machine, whatever is played on it."""
    crowd = max(len(host.processes) for host in play.hosts)
    crowded = {"ENV012"} if crowd > len(os.sched_getaffinity(0)) else set()
    return own_alarms() | crowded
