"""Whole jobs, recorded with all their files: what ``doctor diagnose`` says of the folder that each one left.

    python benchmarks/whole_jobs.py                     prints the table of the recorded jobs
    python benchmarks/whole_jobs.py --make              plays all jobs in the lab and records them anew
    python benchmarks/whole_jobs.py --make --missing    plays only jobs that are not recorded yet
    python benchmarks/whole_jobs.py --only slurm,hang   only jobs with one of these words in their name or launcher

The jobs are real: four ranks by torchrun, Lightning, Accelerate and DeepSpeed, up to 16 ranks on three hosts by SLURM,
four workers on two hosts by Ray Train, all on the CPU. What is expected of each stands in
``tests/postmortem/whole_jobs/jobs.py``. To play those of DeepSpeed and Ray Train, the variable ``EXTRA_PACKAGES`` names
a folder with deepspeed, pandas, pyarrow and what they need. The exit code is 1 if a primary finding is wrong.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "checks")]
os.environ["DOCTOR_LONG_TESTS"] = "1"  # jobs import all of torch

from tests.postmortem.whole_jobs.jobs import JOBS, WholeJob  # noqa: E402 - the path and the variable come first
from tests.postmortem.whole_jobs.play import ARCHIVES, make  # noqa: E402
from tests.postmortem.whole_jobs.score import Diagnosis, diagnose  # noqa: E402


def make_all(jobs: list[WholeJob]) -> None:
    """Play one job after another, with a line for each on stderr."""
    os.nice(10)
    for job in jobs:
        began = time.monotonic()
        archive = make(job)
        size = archive.stat().st_size / 1000
        print(f"{job.name}: {time.monotonic() - began:.0f} s, {size:.1f} kB", file=sys.stderr, flush=True)


def table(rows: list[Diagnosis]) -> str:
    """Every row as Markdown."""
    lines = ["| job | launcher | fault | expected | reported | primary | other differences |", "| --- " * 7 + "|"]
    for row in rows:
        expected = _verdict(row.job.expected.id, row.job.expected.ranks or (), row.job.expected.hosts or ())
        said = _verdict(row.primary, row.ranks, row.hosts)
        complaints = "; ".join(one for one in row.complaints if not one.startswith("primary"))
        cells = (row.job.name, row.job.launcher, row.job.about, expected, said, row.grade, complaints)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _verdict(primary: str, ranks: tuple[int, ...], hosts: tuple[str, ...]) -> str:
    blamed = [f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"] if ranks else []
    return ", ".join([primary or "none", *blamed, *hosts])


def totals(rows: list[Diagnosis]) -> str:
    """One line of sums."""
    faults, healthy = ([row for row in rows if row.job.is_healthy is kind] for kind in (False, True))
    grades = {grade: sum(row.grade == grade for row in faults) for grade in ("right", "weak", "wrong")}
    named = [row for row in faults if row.job.expected.ranks is not None]
    blamed = sum(row.ranks == row.job.expected.ranks for row in named)
    codes = sum(row.code == row.job.expected.code for row in rows)
    alarms = sum(row.grade != "right" for row in healthy)
    counts = ", ".join(f"{number} {grade}" for grade, number in grades.items())
    return (
        f"{len(faults)} faults: primary {counts}; ranks right in {blamed} of {len(named)}; {alarms} false alarms in "
        f"{len(healthy)} jobs without a fault; exit code right in {codes} of {len(rows)}"
    )


def _is_recorded(job: WholeJob) -> bool:
    return (ARCHIVES / f"{job.name}.tar.xz").exists()


def main() -> int:
    """Record jobs, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="words of names or launchers, separated by commas")
    parser.add_argument("--make", action="store_true", help="play the jobs and record them anew")
    parser.add_argument("--missing", action="store_true", help="leave out jobs that are recorded")
    options = parser.parse_args()
    words = [word.strip() for word in options.only.split(",") if word.strip()]
    jobs = [job for job in JOBS if not words or any(word in f"{job.name} {job.launcher}" for word in words)]
    if options.make:
        make_all([job for job in jobs if not (options.missing and _is_recorded(job))])
        return 0
    rows = [diagnose(job) for job in jobs if _is_recorded(job)]
    print(table(rows), totals(rows), sep="\n\n")
    return 1 if any(row.grade == "wrong" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
