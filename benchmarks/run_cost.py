"""What ``doctor run`` costs: the start of a process, and a step of a loop that nobody edited.

    python benchmarks/run_cost.py [start] [steps] [--rounds N]

``start``: seconds of wall clock of commands below ``doctor run`` and without it, by turns, as medians of the
differences of pairs. ``steps``: CPU time of the training thread of rank 0 of two for a step of a loop with
DistributedDataParallel over Gloo and a model of two small layers, with ``doctor.watch`` by hand and below
``doctor run``: blocks of steps with and without the doctor's calls, by turns. What the doctor's own thread does beside
is the same in both. Needs torch and the installed command ``doctor`` beside this Python.
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
BLOCK, TURNS = 100, 12
LOOP = f"""
import statistics, sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
torch.set_num_threads(1)
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 1)))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
loader = DataLoader(TensorDataset(torch.randn({BLOCK * (2 * TURNS + 2)}, 64)), 1)
taken = [[], []]
def train(batches, step, switch):
    since = None
    for number, (batch,) in enumerate(batches):
        block, within = divmod(number, {BLOCK})
        if not within:
            if block > 2:
                taken[(block - 1) % 2].append(time.thread_time() - since)
            switch(bool(block % 2))
            since = time.thread_time()
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        step()
    switch(True)
    if dist.get_rank() == 0:
        print(*(1e6 * statistics.median(one) / {BLOCK} for one in taken))
if sys.argv[1] == "edited":
    import doctor
    with doctor.watch() as watch:
        run = watch._run
        watch.model(model)
        train(watch.loader(loader), watch.step, lambda on: setattr(watch, "_run", run if on else None))
else:
    from doctor.monitor.autostart.plain_loop import LoopWatch
    thread = LoopWatch.current._thread
    train(loader, lambda: None, lambda on: setattr(LoopWatch.current, "_thread", thread if on else 0))
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
    """Print the CPU time that is added to a step."""
    kinds = {"doctor.watch": ([], "edited"), "doctor run": ([DOCTOR, "run", "--"], "bare")}
    taken: Mapping[str, list[tuple[float, float]]] = {name: [] for name in kinds}
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "loop.py"
        program.write_text(LOOP)
        for _ in range(rounds):
            for name, (prefix, word) in kinds.items():
                command = [*prefix, *TORCHRUN, str(program), word]
                done = subprocess.run(command, check=True, cwd=folder, capture_output=True, text=True)
                off, on = map(float, done.stdout.split()[-2:])
                taken[name].append((off, on))
    for name, samples in taken.items():
        added = statistics.median(on - off for off, on in samples)
        least, most = min(on - off for off, on in samples), max(on - off for off, on in samples)
        base = statistics.median(off for off, _ in samples)
        print(f"{name:14s} {base:7.1f} µs a step off   added {added:6.1f} µs ({least:.1f} to {most:.1f})")
    print(f"{rounds} rounds of {TURNS} pairs of {BLOCK} steps")


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
