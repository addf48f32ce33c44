"""The doctor's metrics in the loggers of Lightning's and Transformers' Trainers, each read back with its own package.

    benchmarks/frameworks/environment FOLDER     makes an environment with all of them
    FOLDER/bin/python benchmarks/loggers.py      trains with each for 35 s, keeps loggers_results.json
    python benchmarks/loggers.py --only wandb    only this one
    python benchmarks/loggers.py --part          the CSVLogger for 18 s; nothing is kept
    python benchmarks/loggers.py --evidence      writes the kept results into docs/evidence

One process on the CPU (``tests/frameworks/logger_program.py``). W&B runs offline; MLflow writes to SQLite. A value
counts as kept if name, step and value (to 32 bits) are those that a CSVLogger kept, or that Transformers' callback was
called with. The exit code is 1 if one is missing or another.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "checks"), str(ROOT / "benchmarks")]

from evidence_pages import add_part, word_of, write_between  # noqa: E402 - the path comes first

from tests.frameworks.logger_program import NEEDS  # noqa: E402 - the path

RESULTS = Path(__file__).with_name("loggers_results.json")
NAMES = {"csv": "CSVLogger", "tensorboard": "TensorBoardLogger", "mlflow": "MLFlowLogger", "wandb": "WandbLogger"}
NAMES |= {"transformers-tensorboard": "TensorBoardCallback", "transformers-mlflow": "MLflowCallback"}
NAMES |= {"transformers-wandb": "WandbCallback"}
DISTRIBUTIONS = {"mlflow": "mlflow-skinny"}
"""Distributions with another name than their package."""
SECONDS, SECONDS_OF_PART = 35, 18
"""Long enough for two periodic rounds, and for one."""
LONGEST = 600
"""Seconds after which a training and the reading of its files are given up."""

Row = dict[str, Any]


def run_logger(name: str, folder: Path, seconds: int = SECONDS) -> Row:
    """Train with one logger for so many seconds; return what is kept."""
    row: Row = {"date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")}
    if find_spec(NEEDS[name]) is None:
        return row | {"skipped": f"needs {NEEDS[name]}, which benchmarks/frameworks/environment installs"}
    framework = name.rpartition("-")[0] or "lightning"
    needed = DISTRIBUTIONS.get(NEEDS[name], NEEDS[name])
    row["versions"] = {package: metadata.version(package) for package in dict.fromkeys((needed, framework))}
    command = [sys.executable, "-m", "tests.frameworks.logger_program", str(folder), name, str(seconds)]
    environ = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'checks'}"}
    try:
        done = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=LONGEST)
    except subprocess.TimeoutExpired:
        return row | {"failed": f"did not end within {LONGEST} s"}
    if done.returncode:
        return row | {"failed": done.stderr.strip().splitlines()[-1][:300]}
    found = json.loads(done.stdout.splitlines()[-1])
    handed, kept = (
        {(metric, step): value for metric, pairs in found[part].items() for step, value in pairs}
        for part in ("handed", "kept")
    )
    row["metrics"], row["values"] = len(found["handed"]), len(handed)
    row["lost"] = sorted(f"{metric} at step {step}" for metric, step in handed.keys() - kept.keys())
    row["more"] = len(kept.keys() - handed.keys())
    row["changed"] = sorted(
        metric for metric, step in handed.keys() & kept.keys() if not _same(handed[metric, step], kept[metric, step])
    )
    return row


def _same(one: float, other: float) -> bool:
    return abs(one - other) <= 1e-6 * max(abs(one), abs(other))


def is_wrong(row: Row) -> bool:
    """Return whether a value was lost, added or changed, or the training failed."""
    return "skipped" not in row and ("failed" in row or bool(row["lost"] or row["more"] or row["changed"]))


def kept_rows() -> dict[str, Row]:
    """The results that are kept, by logger."""
    rows: dict[str, Row] = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
    return {name: rows[name] for name in NAMES if name in rows}


def markdown() -> str:
    """All kept results as a table."""
    lines = [
        "| logger | releases | metrics | values | all kept, at their steps | run on |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, row in kept_rows().items():
        versions = ", ".join(f"{package} {version}" for package, version in row.get("versions", {}).items())
        if reason := row.get("skipped") or row.get("failed"):
            lines.append(f"| {NAMES[name]} | {versions} | not run: {reason} | | | {row['date']} |")
            continue
        cells = (NAMES[name], versions, row["metrics"], row["values"], word_of(not is_wrong(row)), row["date"])
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line names, else all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="names of loggers, with commas between them")
    parser.add_argument("--evidence", action="store_true", help="write the kept results into docs/evidence")
    add_part(parser, f"one logger, for {SECONDS_OF_PART} s")
    given = parser.parse_args(arguments)
    if given.evidence:
        write_between("loggers", markdown())
        return 0
    wrong = False
    for name in given.only.split(",") if given.only else ["csv"] if given.part else NAMES:
        with tempfile.TemporaryDirectory(prefix="rankdoctor-logger-", ignore_cleanup_errors=True) as folder:
            row = run_logger(name, Path(folder), SECONDS_OF_PART if given.part else SECONDS)
        if not given.part:
            RESULTS.write_text(json.dumps(kept_rows() | {name: row}, indent=1) + "\n", "utf-8")
        wrong |= is_wrong(row)
        print(f"{'WRONG ' if is_wrong(row) else ''}{name}: {json.dumps(row)}", flush=True)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
