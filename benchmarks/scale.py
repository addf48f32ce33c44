"""Measures how the CPU time of all checks grows from 1,024 to 16,384 ranks, eight per host.

    python benchmarks/scale.py [CHECKOUT | --part]

Each run is a separate process, which reads the job from a capture as ``doctor diagnose`` does, so that its peak memory
is its own. Prints CPU seconds, memory, and the exponent of growth (1 is linear). With CHECKOUT, the directory of an
earlier commit, that commit reads the same captures in turn, and the ratios of the CPU times are printed; the goals
are relative to commit 3e39873. ``--part``: 32 and 64 ranks.
"""

from __future__ import annotations

import argparse
import gc
import math
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import msgspec

ROOT = Path(__file__).resolve().parents[1]

SIZES = (1024, 2048, 4096, 8192, 16384)
PART = (32, 64)
"""The sizes of ``--part``."""
PER_HOST = 8
PAIRS = 3
"""Runs of each commit; the fastest counts."""
GOALS = {"checks": 0.25, "reading and checks": 0.4}
"""The largest ratios to the CPU time of commit 3e39873 at 16,384 ranks."""
ON_CPU_TIME = (
    "import runpy, time; time.perf_counter = time.process_time; runpy.run_path({script!r}, run_name='__main__')"
)
"""Runs a script whose clock then counts CPU seconds."""


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
    """Print the seconds of reading and of the checks, the peak memory in MB, and what was found."""
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


class Measured(NamedTuple):
    """One run: CPU seconds of reading and of the checks, and peak memory in MB."""

    read: float
    checks: float
    memory: float

    @property
    def total(self) -> float:
        """CPU seconds of reading and of the checks together."""
        return self.read + self.checks


def run(checkout: Path, capture: Path) -> Measured:
    """Examine a capture by the code of a checkout, whose own script prints the seconds."""
    code = ON_CPU_TIME.format(script=str(checkout / "benchmarks" / "scale.py"))
    command = [sys.executable, "-c", code, "--examine", str(capture)]
    words = subprocess.run(command, check=True, capture_output=True, text=True, cwd=checkout).stdout.split()
    return Measured(*map(float, words[:3]))


def measure(ranks: int, earlier: Path | None) -> tuple[Measured, Measured | None]:
    """The fastest run for one size, by this tree and by the earlier commit."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.json"
        write_job(ranks, path)
        runs = [(run(ROOT, path), run(earlier, path) if earlier else None) for _ in range(PAIRS if earlier else 1)]
        size = path.stat().st_size / 1e6
    best = min((own for own, _ in runs), key=lambda one: one.total)
    print(
        f"{ranks:6d} ranks {ranks // PER_HOST:5d} hosts  document {size:6.1f} MB  read {best.read:6.2f} s  "
        f"checks {best.checks:6.2f} s  peak {best.memory:5.0f} MB"
    )
    return best, min((other for _, other in runs if other), key=lambda one: one.total, default=None)


def main() -> None:
    """Measure all sizes and print the exponents and the ratios."""
    from evidence_pages import add_part

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkout", nargs="?", type=Path)
    add_part(parser, f"{PART[0]} and {PART[1]} ranks")
    options = parser.parse_args()
    earlier, sizes = options.checkout and options.checkout.resolve(), PART if options.part else SIZES
    measured = [measure(ranks, earlier) for ranks in sizes]
    span = math.log(sizes[-1] / sizes[0])
    (first, _), (last, before) = measured[0], measured[-1]
    for name, growth in (("checks", last.checks / first.checks), ("reading", last.read / first.read)):
        print(f"exponent of {name} from {sizes[0]} to {sizes[-1]} ranks: {math.log(growth) / span:.2f}")
    if before:
        ratios = {"checks": last.checks / before.checks, "reading and checks": last.total / before.total}
        for name, ratio in ratios.items():
            print(f"CPU time of {name} at {sizes[-1]} ranks: {ratio:.2f} of the earlier commit (goal {GOALS[name]:g})")


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "checks")]
    if sys.argv[1:2] == ["--examine"]:
        examine_job(Path(sys.argv[2]))
    else:
        main()
