"""A small part of each measurement of docs/evidence, by the same code from end to end; no file is written.

Measurements that start the scenes of other tests are run there, with scenes that these have played already:
``tests.test_documented_commands.MEASURED`` names the place of each.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.lab.needs import ROOT, CannotPlay, require_namespaces
from tests.lab.speed import patience

pytestmark = pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="needs a checkout")

KEPT = [*(ROOT / "docs" / "evidence").glob("*.md"), *(ROOT / "benchmarks").glob("*.json")]
"""What the whole measurements write."""
FAULTY = """import torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 0:
    dist.barrier()
"""
SIXTH = "allenai+allenact"
"""A repository of the part ``sixth`` of lint_corpus.json."""
CASES = ROOT / "tests" / "data" / "reported_failures.jsonl"


class Part(NamedTuple):
    """A measurement: its arguments (``{folder}`` is the fixture of that name), what it prints (a pattern for each line
    that has to be there), what it needs (packages, or namespaces), and the exit codes that it may have."""

    arguments: str
    prints: tuple[str, ...]
    needs: str = ""
    codes: tuple[int, ...] = (0,)


FIGURE = r"[\d.]+"
QUICK = {
    "coverage.py": Part(
        "--part", (r"\| torch\.distributed\.elastic \| v2\.0\.0 to .* \| (\d+) \| \1 \| 100\.0% \| 95% \| 0 \| \d+ \|",)
    ),
    "whole_jobs.py": Part(
        "--only accelerate-exit-code",
        (
            r"\| accelerate-exit-code \| accelerate \| .* \| RUN004, rank 2 \| RUN004, rank 2, node0 \| right \|  \|",
            r"1 faults: primary 1 right, 0 weak, 0 wrong; ranks right in 1 of 1; .* exit code right in 1 of 1",
        ),
        "torch",
    ),
    "scale.py": Part(
        "--part",
        (
            rf" +32 ranks +4 hosts  document +{FIGURE} MB  read +{FIGURE} s  checks +{FIGURE} s  peak +[1-9]\d+ MB",
            r" +64 ranks +8 hosts .* peak +[1-9]\d+ MB",
            r"exponent of checks from 32 to 64 ranks: -?\d\.\d\d",
        ),
    ),
    "cases.py": Part(
        "{folder}/cases.jsonl",
        (
            r"2 texts: the right verdict on 2 of 2 headline cases .*",
            r"\| 0\.\d\d to \d\.\d\d \| \d \| 0\.\d\d \| 1\.00 \|",
        ),
    ),
    "lint_scripts.py": Part(
        "--part --set lint_scripts_2",
        (r"script: scripts 3, found 2, .* healthy with a finding 0", r"found +\S+\.py: CODE\d+ \(\w+\) line \d+.*"),
    ),
    "lint.py --sources": Part(
        "--sources {folder}/sources --half sixth --show",
        (
            r"\| CODE005 \| 1 \|  \|  \|",
            r"sixth: 1 repositories, 1 files, 1 hits in 1 repositories, 0 crashes, \d+ s",
            r"allenai\+allenact\ttrain\.py\t5\tCODE005\terror",
            r"git init -q .* checkout -q FETCH_HEAD",
        ),
    ),
    "lint.py --hits": Part(
        "--hits {folder}/checkouts",
        (
            r"\?\?\?\?\? CODE005 owner/name/train\.py:5",
            r"1 files: 1 hits are not judged yet; 0 crashes\. owner/name; \d+ s\.",
            "no crash",
        ),
    ),
}
"""At most two seconds of a processor each."""
SLOW = {
    "gathering.py": Part(
        "--part",
        (
            rf"\| 2 hosts x 1 rank, store, against 2 concurrent `import torch` \| {FIGURE} s: [+-]{FIGURE} s, .*",
            rf"\| verdict on an absent rank \(2 of 3 came\), .*`--timeout` [+-]{FIGURE} s .*",
            rf"\| 32 simulated ranks over a store \| {FIGURE} s, {FIGURE} MB of facts \|  \|",
            rf"\| 32 simulated ranks through a folder, read into one job \| {FIGURE} s .*",
        ),
        "torch namespaces",
    ),
    "startup.py": Part(
        "--part",
        (
            rf"doctor check +{FIGURE} s  ratio to import torch +{FIGURE}  limit 0\.35  peak +[1-9]\d+ MB",
            r"1 rounds on \d+ cores; largest process of all \d+ MB",
        ),
        "torch",
    ),
    "isolation.py": Part(
        "--part",
        (
            r"8 hosts, 10% noise, what is slow has 0\.5 of the usual; 1 networks of each kind:",
            r"\| this doctor \| \d+ \| .*\d\.\d\d / \d\.\d\d.*",
            r"\| 4 \| \d+ \| [\d.]+ \| .*\d\.\d\d / \d\.\d\d.*",
        ),
    ),
    "environments.py": Part(
        "--set fifth aws-batch-p5",
        (r"1 recommended environments, 0 with an alarm \(error or warning\); 0 faults, 0 found; 0 not run",),
        "namespaces",
    ),
    "callback_cost.py": Part(
        "--part ten first",
        (
            rf"\| 1 process, step of 10 ms: wall clock above none, DoctorCallback \| [+-]{FIGURE} µs \(95 % .*",
            rf"\| 1 process, step of 10 ms: CPU time of DoctorCallback \| -?{FIGURE} µs in hooks and .*",
            rf"\| added by DoctorCallback to the first fit of a process \| -?{FIGURE} s \| -?{FIGURE} s \|",
        ),
        "lightning",
    ),
    "framework_faults.py": Part(
        "--part",
        (r'(?:WRONG )?\{"name": "ddp more", .*"ids": \["DATA001"\], "ranks": \[1\], "right": true, .*',),
        "torch",
        (0, 1),  # 1 if a busy machine needs more than 15 s
    ),
    "estimate.py --published": Part(
        "--published --part",
        (
            r"a100_vit_large_bf16_b4_sgd +held +older +reserved +[\d,]+ MiB  estimate +[\d,]+ +-?\+?\d\.\d %",
            r"The range holds 100% of the 1 figures of the half held .*",
        ),
        "torch",
    ),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with two reported failures, and with checkouts as the measurements of lint read them."""
    lines = CASES.read_text(encoding="utf-8").splitlines(keepends=True)
    (tmp_path / "cases.jsonl").write_text("".join(lines[:2]), encoding="utf-8")
    for checkout in (tmp_path / "sources" / SIXTH, tmp_path / "checkouts" / "owner" / "name"):
        checkout.mkdir(parents=True)
        (checkout / "train.py").write_text(FAULTY)
    return tmp_path


def _kept() -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in KEPT}


def measure(name: str, part: Part, folder: Path) -> None:
    """Run a part, and look for each line that it has to print."""
    for need in part.needs.split():
        if need != "namespaces":
            pytest.importorskip(need)
            continue
        try:
            require_namespaces()
        except CannotPlay as why:
            pytest.skip(str(why))
    before = _kept()
    script = ROOT / "benchmarks" / name.partition(" ")[0]
    done = subprocess.run(
        [sys.executable, str(script), *part.arguments.format(folder=folder).split()],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'checks'}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=patience(120),
    )
    assert done.returncode in part.codes, done.stdout[-2000:] + done.stderr[-2000:]
    lines = done.stdout.splitlines()
    missing = [pattern for pattern in part.prints if not any(re.fullmatch(pattern, line) for line in lines)]
    assert missing == [], done.stdout
    assert _kept() == before


@pytest.mark.parametrize("name", QUICK)
def test_a_small_part_is_measured(name: str, folder: Path) -> None:
    measure(name, QUICK[name], folder)


@pytest.mark.slow
@pytest.mark.real_time
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", SLOW)
def test_a_part_with_processes_of_its_own_is_measured(name: str, folder: Path) -> None:
    measure(name, SLOW[name], folder)
