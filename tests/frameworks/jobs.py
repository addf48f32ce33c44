"""Runs the trainings of ``program.py`` as whole jobs, below ``doctor run`` and without it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

import psutil

from tests.lab.needs import ROOT, clean_environ
from tests.lab.speed import patience

PROGRAM = Path(__file__).with_name("program.py")
Fault = Literal["", "hang", "crash", "uneven"]
OWN_LAUNCHERS = ("lightning", "fabric", "ray")
"""Frameworks that start the second rank themselves."""
NEEDS = {
    "accelerate": "accelerate",
    "fabric": "lightning",
    "lightning": "lightning",
    "transformers": "transformers",
    "trl_sft": "trl",
    "trl_dpo": "trl",
    "zero1": "deepspeed",
    "zero2": "deepspeed",
    "zero3": "deepspeed",
    "zero_edited": "deepspeed",
    "ray": "ray",
    "torchtitan": "torchtitan",
    "megatron": "megatron",
}
"""The package that each framework needs besides torch."""
EXPECTED: dict[Fault, tuple[str, ...]] = {
    "": (),
    "hang": ("RUN001",),
    "crash": ("RUN004",),
    "uneven": ("DATA001", "DATA010"),
}
"""The checks one of which has to name rank 1."""


class JobOutcome(NamedTuple):
    """What became of a job. ``waited``: seconds from the fault to its finding; ``None`` without one."""

    folder: Path
    code: int
    output: str
    report: dict[str, Any] | None
    waited: float | None

    def traces(self) -> list[str]:
        """What both ranks computed."""
        return [(self.folder / f"trace-{rank}.json").read_text() for rank in range(2)]

    def modules(self) -> set[str]:
        """What either rank had imported."""
        written = [(self.folder / f"modules-{rank}.json").read_text() for rank in range(2)]
        return {name for names in written for name in json.loads(names)}

    def findings(self) -> dict[str, dict[str, Any]]:
        """All findings that are not only information, by the id of their check."""
        results = self.report["results"] if self.report else []
        return {
            result["id"]: one
            for result in results
            for one in result["findings"]
            if one["severity"] in ("error", "warning")
        }

    def culprits(self, fault: Fault) -> list[int] | None:
        """The ranks that the check of a fault names; ``None`` if it reports nothing."""
        found = self.findings()
        return next((found[check]["ranks"] for check in EXPECTED[fault] if check in found), None)


def run_job(
    folder: Path,
    framework: str,
    fault: Fault = "",
    *,
    watched: bool = True,
    python: str = sys.executable,
    seconds: float = 150,
) -> JobOutcome:
    """Run a job of two ranks in ``folder``; it is ended soon after its fault is reported, or after ``seconds``."""
    process = start_job(folder, framework, PROGRAM, [fault], watched=watched, python=python)
    try:
        seen = _await(process, folder, fault, patience(seconds))
    finally:
        end_job(process)
    compiled = _compiled(python)
    if process.returncode == 0 and (folder / "extensions").exists() and not compiled.exists():
        shutil.copytree(folder / "extensions", compiled)
    stopped = folder / "stopped"
    waited = seen - float(stopped.read_text()) if seen is not None and stopped.exists() else None
    return JobOutcome(folder, process.returncode, (folder / "output").read_text(), report_in(folder), waited)


def start_job(
    folder: Path,
    framework: str,
    program: Path,
    arguments: list[str],
    *,
    watched: bool = True,
    python: str = sys.executable,
    world: int = 2,
    options: tuple[str, ...] = ("--every-n-steps", "3"),
    of_launcher: tuple[str, ...] = (),
) -> subprocess.Popen[bytes]:
    """Start ``program FOLDER FRAMEWORK ARGUMENTS`` on ``world`` ranks.

    ``options`` are those of ``doctor run``, ``of_launcher`` those of torchrun.
    """
    folder.mkdir(parents=True, exist_ok=True)
    python = str(Path(python).absolute())
    if _compiled(python).exists():  # a copy, because a job that is killed leaves its lock there
        shutil.copytree(_compiled(python), folder / "extensions", ignore=shutil.ignore_patterns("lock"))
    environ = clean_environ(folder) | {
        "PATH": f"{Path(python).parent}:/usr/sbin:/usr/bin:/sbin:/bin",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'checks'}",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "DS_BUILD_OPS": "0",
        "TORCH_EXTENSIONS_DIR": str(folder / "extensions"),
    }
    doctor = [python, "-m", "doctor", "run", *options, "--folder", str(folder / "doctor"), "--"]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}", *of_launcher]
    command = [python, *([] if framework in OWN_LAUNCHERS else launcher), str(program), str(folder), framework]
    with (folder / "output").open("w") as output:
        return subprocess.Popen(
            [*(doctor if watched else []), *command, *arguments],
            cwd=folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _compiled(python: str) -> Path:
    """Where the environment of a Python keeps compiled operators of DeepSpeed."""
    return Path(python).absolute().parent.parent / "extensions"


def report_in(folder: Path) -> dict[str, Any] | None:
    """The report of the job in ``folder``; ``None`` if there is none."""
    with suppress(OSError, ValueError):
        report: dict[str, Any] = json.loads((folder / "doctor" / "report.json").read_text())
        return report
    return None


def _await(process: subprocess.Popen[bytes], folder: Path, fault: Fault, seconds: float) -> float | None:
    """Wait for the end of a job; return when one of the checks of its fault has been in the report, since the epoch."""
    seen, until = None, time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < until:
        time.sleep(0.2)
        if seen is None and fault and _is_reported(folder, fault):
            seen = time.time()
            until = min(until, time.monotonic() + patience(3))
    if seen is None and fault and _is_reported(folder, fault):
        seen = time.time()
    return seen


def _is_reported(folder: Path, fault: Fault) -> bool:
    report = report_in(folder)
    return JobOutcome(folder, 0, "", report, None).culprits(fault) is not None


def end_job(process: subprocess.Popen[bytes]) -> None:
    """End the job with all processes that it started, some of which have a session of their own."""
    with suppress(psutil.NoSuchProcess):
        started = psutil.Process(process.pid).children(recursive=True)
        for one in (psutil.Process(process.pid), *started):
            with suppress(psutil.NoSuchProcess):
                one.kill()
    process.wait()
