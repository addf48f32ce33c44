"""What ``doctor run`` costs: the start of a process, and a step of a loop that nobody edited.

    python benchmarks/run_cost.py [start] [steps] [--rounds N]

``start``: seconds of wall clock of commands below ``doctor run`` and without it, by turns, as medians of the
differences of pairs. ``steps``: CPU time of all threads of rank 0 for a step of a loop with DistributedDataParallel
over Gloo, two ranks and a model of two small layers: without the doctor, with ``doctor.watch`` by hand, and below
``doctor run``, by turns. Needs torch and the installed command ``doctor`` beside this Python.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

DOCTOR = str(Path(sys.executable).parent / "doctor")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
STARTS = {
    "true": ["true"],
    "python -c pass": [sys.executable, "-c", "pass"],
    "import torch": [sys.executable, "-c", "import torch"],
}
PREFIXES: dict[str, list[str]] = {
    "alone": [],
    "doctor run --": [DOCTOR, "run", "--"],
    "doctor run --on-hang abort --": [DOCTOR, "run", "--on-hang", "abort", "--"],
}
STEPS, WARM = 3000, 500
LOOP = f"""
import contextlib, os, sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
torch.set_num_threads(1)
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 1)))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
loader = DataLoader(TensorDataset(torch.randn({STEPS}, 64)), 1)
def train(batches, step):
    for number, (batch,) in enumerate(batches):
        if number == {WARM}:
            since = time.process_time()
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        step()
    if dist.get_rank() == 0:
        print((time.process_time() - since) / {STEPS - WARM} * 1e6)
if sys.argv[1] == "edited":
    import doctor
    with doctor.watch() as watch:
        watch.model(model)
        train(watch.loader(loader), watch.step)
else:
    train(loader, lambda: None)
dist.destroy_process_group()
"""


def seconds_of(command: Sequence[str]) -> float:
    """Seconds of wall clock of a command."""
    began = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - began


def measure_starts(rounds: int) -> None:
    """Print what is added to the start of each command."""
    for name, command in STARTS.items():
        taken: Mapping[str, list[float]] = {prefix: [] for prefix in PREFIXES}
        for turn in range(rounds + 1):
            for prefix, words in PREFIXES.items():
                seconds = seconds_of([*words, *command])
                if turn:
                    taken[prefix].append(seconds)
        for prefix, samples in taken.items():
            added = statistics.median(one - base for one, base in zip(samples, taken["alone"], strict=True))
            print(f"{name:16s} {prefix:32s} {1e3 * statistics.median(samples):7.1f} ms   added {1e3 * added:6.1f} ms")
    print(f"{rounds} rounds on {len(os.sched_getaffinity(0))} cores")


def measure_steps(rounds: int) -> None:
    """Print the CPU time of a step, and what is added to it."""
    kinds = {"without": ([], "bare"), "doctor.watch": ([], "edited"), "doctor run": ([DOCTOR, "run", "--"], "bare")}
    taken: Mapping[str, list[float]] = {name: [] for name in kinds}
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "loop.py"
        program.write_text(LOOP)
        for _ in range(rounds):
            for name, (prefix, word) in kinds.items():
                command = [*prefix, *TORCHRUN, str(program), word]
                done = subprocess.run(command, check=True, cwd=folder, capture_output=True, text=True)
                taken[name].append(float(done.stdout.split()[-1]))
    for name, samples in taken.items():
        added = statistics.median(one - base for one, base in zip(samples, taken["without"], strict=True))
        print(f"{name:14s} {statistics.median(samples):7.1f} µs of CPU time a step   added {added:6.1f} µs")
    print(f"{rounds} rounds of {STEPS - WARM} steps")


def main() -> None:
    """Measure what the command line names, else both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", choices=("start", "steps", []))
    parser.add_argument("--rounds", type=int)
    given = parser.parse_args()
    if "steps" not in given.what:
        measure_starts(given.rounds or 15)
    if "start" not in given.what:
        measure_steps(given.rounds or 7)


if __name__ == "__main__":
    main()
