"""What a check costs against ``import torch`` in the same run.

    python benchmarks/startup.py [RUNS | --part]

Runs the commands in turn, so that a machine that gets slower slows all of them, and prints the median of the ratios
pair by pair, and peak memory. ``--part``: one round, without the one before that fills the page cache. Needs torch and
the installed command ``doctor`` beside this Python.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

from evidence_pages import add_part

DOCTOR = str(Path(sys.executable).parent / "doctor")
COMMANDS = {
    "import torch": [sys.executable, "-c", "import torch"],
    "doctor check": [DOCTOR, "check"],
    "doctor check --format json": [DOCTOR, "check", "--format", "json"],
    "doctor --version": [DOCTOR, "--version"],
    "doctor explain NET007": [DOCTOR, "explain", "NET007"],
}
LIMITS = {"doctor check": 0.35, "doctor --version": 0.15}


def run(command: list[str]) -> tuple[float, float]:
    """Seconds of wall clock and peak megabytes of one run, its own children included."""
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=dict(os.environ))
    _, _, usage = os.wait4(process.pid, 0)
    process.returncode = 0
    return time.perf_counter() - began, usage.ru_maxrss / 1024


def measure(runs: int, *, warms_up: bool = True) -> None:
    """Print the figures of ``runs`` rounds, after one that is not counted."""
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in COMMANDS}
    for round_ in range(1 - warms_up, runs + 1):
        for name, command in COMMANDS.items():
            figures = run(command)
            if round_:
                taken[name].append(figures)
    base = [seconds for seconds, _ in taken["import torch"]]
    for name, samples in taken.items():
        ratio = statistics.median(seconds / whole for (seconds, _), whole in zip(samples, base, strict=True))
        memory = max(peak for _, peak in samples)
        median = statistics.median(seconds for seconds, _ in samples)
        limit = f"  limit {LIMITS[name]}" if name in LIMITS else ""
        print(f"{name:28s} {median:6.3f} s  ratio to import torch {ratio:5.2f}{limit}  peak {memory:4.0f} MB")
    cores = len(os.sched_getaffinity(0))
    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    print(f"{runs} rounds on {cores} cores; largest process of all {children:.0f} MB")


def main() -> None:
    """Measure so many rounds."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("runs", nargs="?", type=int, default=7)
    add_part(parser, "one round, without a warm-up")
    options = parser.parse_args()
    measure(1 if options.part else options.runs, warms_up=not options.part)


if __name__ == "__main__":
    main()
