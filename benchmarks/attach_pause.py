"""For how long ``doctor attach`` stops the ranks that it reads, and how long it takes for a host.

    python benchmarks/attach_pause.py [--ranks 8] [--times 3]

Ranks over Gloo wait in a collective for one that sleeps, and then the same without the sleep. A thread of each notes
when it runs, a thousand times a second; the longest gap within each read is compared with the gaps while nobody reads.
Needs torch. Ends with 1 if half of the reads stop a process for more than 50 ms, or if a host takes more than 10 s.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "checks")]

from doctor.attach.sampler import SamplingOptions, sample  # noqa: E402 - the path comes first
from doctor.collectors.host.local_processes import process_start_time  # noqa: E402
from doctor.core.facts import AttachedProcess  # noqa: E402

MOST_PAUSE, MOST_SECONDS = 0.05, 10.0
READ = 1.2
"""Seconds after the start of a read within which it stops the process."""
SETTINGS = {
    "default": SamplingOptions(),
    "non-blocking": SamplingOptions(blocking=False),
    "with locals": SamplingOptions(locals=True),
    "with native frames": SamplingOptions(native=True, seconds=30.0),
}
JUDGED = ("default", "non-blocking", "with locals")
RANK = """
import json, os, signal, sys, threading, time
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
runs = []

def record():
    while True:
        time.sleep(0.001)
        runs.append(time.time())

def write():
    signal.sigwait([signal.SIGUSR1])
    with open(sys.argv[1] + ".part", "w") as stream:
        json.dump(runs, stream)
    os.rename(sys.argv[1] + ".part", sys.argv[1])

for work in (record, write):
    threading.Thread(target=work, daemon=True).start()
dist.barrier()
print("ready", flush=True)
step = 0
while True:
    step += 1
    if sys.argv[2] == "hangs" and os.environ["RANK"] == "1" and step == 3:
        time.sleep(600)
    sum(range(20000))
    dist.all_reduce(torch.ones(10))
"""


class Reading(NamedTuple):
    """The processes that were read, and the seconds that it took."""

    processes: tuple[AttachedProcess, ...]
    seconds: float


@contextlib.contextmanager
def job(ranks: int, folder: Path, state: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Start the ranks of a job that ``hangs`` or ``moves``."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    environ = {**os.environ, "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(folder / f"{rank}.json"), state],
            env={**environ, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        time.sleep(2.0)
        yield processes
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


def runs_of(process: subprocess.Popen[str], file: Path) -> list[float]:
    """Return the times at which the recording thread of a rank ran."""
    process.send_signal(signal.SIGUSR1)
    while not file.exists():
        time.sleep(0.1)
    return list(json.loads(file.read_text()))


def longest_gap(runs: Sequence[float], start: float, end: float) -> float:
    """Return the longest time between two runs, one of which is between ``start`` and ``end``."""
    inside = [position for position, at in enumerate(runs) if start <= at <= end]
    if not inside:
        return end - start
    around = runs[max(inside[0] - 1, 0) : inside[-1] + 2]
    return max((after - before for before, after in pairwise(around)), default=0.0)


def in_milliseconds(values: Sequence[float]) -> str:
    """Return the median, the 90th percentile and the maximum of seconds."""
    ordered = sorted(values)
    tenth = ordered[int(0.9 * (len(ordered) - 1))]
    return f"{statistics.median(ordered) * 1e3:6.1f} {tenth * 1e3:6.1f} {ordered[-1] * 1e3:6.1f}"


def measure(state: str, ranks: int, times: int) -> bool:
    """Measure and print; return whether the limits are kept."""
    readings: list[tuple[str, Reading]] = []
    with tempfile.TemporaryDirectory() as name, job(ranks, Path(name), state) as processes:
        targets = [
            AttachedProcess(process.pid, process_start_time(process.pid) or 0.0, rank=rank)
            for rank, process in enumerate(processes)
        ]
        quiet = time.time()
        time.sleep(4 * READ)
        for setting, wanted in [*SETTINGS.items()] * times:
            begin = time.monotonic()
            readings.append((setting, Reading(sample(targets, wanted), time.monotonic() - begin)))
        runs = [runs_of(process, Path(name, f"{rank}.json")) for rank, process in enumerate(processes)]
    nobody = [longest_gap(each, quiet + READ * at, quiet + READ * (at + 1)) for each in runs for at in range(3)]
    print(f"job {state}: {ranks} ranks, load {os.getloadavg()[0]:.1f}, {os.cpu_count()} CPUs; ms: median, p90, max")
    print(f"  {'nobody reads':20}{in_milliseconds(nobody)}")
    is_kept = True
    for setting in SETTINGS:
        mine = [reading for named, reading in readings if named == setting]
        samples = [(one.rank or 0, at) for reading in mine for one in reading.processes for at in one.samples]
        gaps = [longest_gap(runs[rank], one.at, one.at + READ) for rank, one in samples]
        stacks = sum(bool(one.threads) for _, one in samples)
        stopped = sum(bool(one.paused) for _, one in samples)
        slowest = max(reading.seconds for reading in mine)
        counts = f"{len(samples)} samples, {stacks} with stacks, {stopped} seen stopped, {slowest:.1f} s a host"
        print(f"  {setting:20}{in_milliseconds(gaps)}  {counts}")
        is_kept &= setting not in JUDGED or (statistics.median(gaps) <= MOST_PAUSE and slowest <= MOST_SECONDS)
    return is_kept


def main() -> None:
    """Measure a job that hangs and one that moves."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--times", type=int, default=3)
    options = parser.parse_args()
    kept = [measure(state, options.ranks, options.times) for state in ("hangs", "moves")]
    sys.exit(int(not all(kept)))


if __name__ == "__main__":
    main()
