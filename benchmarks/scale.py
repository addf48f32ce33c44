"""Measures how the time of all checks grows from 1,024 to 16,384 ranks, eight per host.

    python benchmarks/scale.py

Each size runs in a separate process, which reads the job from a capture as ``doctor diagnose`` does, so that its peak
memory is its own. Prints seconds, memory, and the exponent of growth (1 is linear).
"""

from __future__ import annotations

import gc
import math
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec

SIZES = (1024, 2048, 4096, 8192, 16384)
PER_HOST = 8


def write_job(ranks: int, path: Path) -> None:
    """Write the capture of a job with addresses and pids of its own and faults on a few ranks."""
    from doctor.core.capture import to_document
    from doctor.core.facts import SoftwareFacts
    from doctor.testing.cases import healthy

    sketch = healthy(hosts=ranks // PER_HOST, per_host=PER_HOST, rdma=8)
    sketch = sketch.alter(SoftwareFacts, ranks=range(8, 16), python="3.10.1")
    sketch = sketch.environ(ranks=(17,), NCCL_ALGO="Ring", NCCL_SOCKET_IFNAME="eth9")
    path.write_bytes(msgspec.json.encode(to_document(sketch.job())))


def examine_job(path: Path) -> None:
    """Print the seconds of reading and of the checks, and the peak memory in MB."""
    from doctor.core.capture import read_capture
    from doctor.core.check_registry import load_registry
    from doctor.core.check_runner import examine_job as examine

    gc.disable()  # as the command does
    catalog = load_registry(plugins=False)
    began = time.perf_counter()
    job = read_capture(path).job()
    read = time.perf_counter()
    results = examine(job, catalog)
    done = time.perf_counter()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    found = sum(len(result.findings) for result in results)
    slowest = max(results, key=lambda result: result.seconds)
    print(f"{read - began:.3f} {done - read:.3f} {peak:.0f} {len(results)} {found} {slowest.id}:{slowest.seconds:.2f}")


def measure(ranks: int) -> tuple[float, float, float]:
    """Seconds of reading and of the checks, and megabytes, for one size."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.json"
        write_job(ranks, path)
        size = path.stat().st_size / 1e6
        command = [sys.executable, __file__, "--examine", str(path)]
        words = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    read, seconds, memory = (float(word) for word in words[:3])
    print(
        f"{ranks:6d} ranks {ranks // PER_HOST:5d} hosts  document {size:6.1f} MB  read {read:6.2f} s  "
        f"{words[3]} checks {seconds:6.2f} s  peak {memory:5.0f} MB  {words[4]} findings  slowest {words[5]}"
    )
    return read, seconds, memory


def main() -> None:
    """Measure all sizes and print the exponent from the smallest to the largest."""
    measured = [measure(ranks) for ranks in SIZES]
    span = math.log(SIZES[-1] / SIZES[0])
    for name, column in (("examining", 1), ("reading", 0)):
        exponent = math.log(measured[-1][column] / measured[0][column]) / span
        print(f"exponent of {name} from {SIZES[0]} to {SIZES[-1]} ranks: {exponent:.2f}")
    worst = measured[-1]
    print(f"limits: examining {worst[1]:.2f} s of 10 s, memory {worst[2]:.0f} MB of 2,000 MB")


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent.parent / "checks")]
    if sys.argv[1:2] == ["--examine"]:
        examine_job(Path(sys.argv[2]))
    else:
        main()
