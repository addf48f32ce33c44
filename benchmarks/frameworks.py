"""Trainings with each framework below ``doctor run``: the same numbers, and a fault of one rank found.

    benchmarks/frameworks/environment FOLDER         makes an environment with all of them
    FOLDER/bin/python benchmarks/frameworks.py       runs all, and keeps the results in frameworks_results.json
    python benchmarks/frameworks.py --only zero1,ray     only these
    python benchmarks/frameworks.py --part --only ddp    without a fault and with a crash; nothing is kept
    python benchmarks/frameworks.py --evidence       writes the kept results into docs/evidence

Small real programs of two ranks over Gloo on the CPU (``tests/frameworks/program.py``), none of which was edited. Each
runs without the doctor and below ``doctor run``: outputs of every forward pass, states of random numbers and parameters
are compared bit by bit. Then rank 1 stops in a forward pass, raises an exception there, and has one more batch than
rank 0. Seconds: from the fault to the report that names it. A framework that can't be run here is kept with the reason.
The exit code is 1 if numbers differ, a healthy run is reported as faulty, or a fault is not found on rank 1.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "checks"), str(ROOT / "benchmarks")]

from evidence_pages import add_part, word_of, write_between  # noqa: E402 - the path comes first

from tests.frameworks.jobs import EXPECTED, NEEDS, Fault, JobOutcome, run_job  # noqa: E402 - the path

RESULTS = Path(__file__).with_name("frameworks_results.json")
NAMES = {
    "ddp": "DistributedDataParallel",
    "fsdp1": "FullyShardedDataParallel",
    "fsdp2": "fully_shard",
    "accelerate": "Accelerate",
    "fabric": "Lightning Fabric",
    "lightning": "Lightning Trainer",
    "transformers": "Transformers Trainer",
    "trl_sft": "TRL SFTTrainer",
    "trl_dpo": "TRL DPOTrainer",
    "zero1": "DeepSpeed ZeRO 1",
    "zero2": "DeepSpeed ZeRO 2",
    "zero3": "DeepSpeed ZeRO 3",
    "ray": "Ray Train TorchTrainer",
    "torchtitan": "torchtitan Trainer",
    "megatron": "Megatron-LM",
}
PACKAGES = {"megatron": "megatron-core"}
FAULTS: tuple[Fault, ...] = ("hang", "crash", "uneven")
PART: tuple[Fault, ...] = ("crash",)
"""The faults of ``--part``."""
_ERROR = re.compile(r"^(?:\[rank\d+\]: )?(\w+(?:\.\w+)*(?:Error|Exception): .+)$", re.MULTILINE)

Row = dict[str, Any]


def run_framework(framework: str, folder: Path, faults: tuple[Fault, ...] = FAULTS) -> Row:
    """Run all jobs of one framework in ``folder``; return what is kept."""
    package = NEEDS.get(framework, "torch")
    row: Row = {"date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")}
    if find_spec(package) is None:
        return row | {"skipped": f"needs {package}, which benchmarks/frameworks/environment installs"}
    names = {PACKAGES.get(package, package), "torch"}
    row["versions"] = {name: metadata.version(name) for name in sorted(names)}
    bare = run_job(folder / "bare", framework, watched=False)
    if bare.code:
        error = (_ERROR.findall(bare.output) or [bare.output[-200:]])[-1]
        return row | {"skipped": f"fails on the CPU, without the doctor too: {error}"[:300]}
    healthy = run_job(folder / "healthy", framework)
    row["watched_as"] = _watched_as(healthy.folder)
    row["identical"] = healthy.code == 0 and bare.traces() == healthy.traces()
    row["alarms"] = sorted(healthy.findings()) if healthy.report else ["no report"]
    for fault in faults:
        row[fault] = _found(run_job(folder / fault, framework, fault), fault)
    return row


def _watched_as(folder: Path) -> dict[str, Any]:
    """What the doctor's own record of rank 1 says of the run."""
    record = json.loads((folder / "doctor" / "rank-1.json").read_text())["ranks"][0]["facts"]
    training = record["training"]
    return {
        "framework": training.get("framework", "plain"),
        "strategy": training.get("strategy"),
        "steps": record["progress"].get("step"),
        "replicated": record.get("model", {}).get("replicated"),
    }


def _found(outcome: JobOutcome, fault: Fault) -> dict[str, Any]:
    ids = outcome.findings()
    named = next((check for check in EXPECTED[fault] if check in ids), None)
    seconds = None if outcome.waited is None else round(outcome.waited, 1)
    return {"id": named, "ranks": outcome.culprits(fault), "seconds": seconds, "all": sorted(ids)}


def is_wrong(row: Row) -> bool:
    """Return whether something is not as it should be."""
    if "skipped" in row:
        return False
    return (
        not row["identical"]
        or bool(row["alarms"])
        or any(fault in row and row[fault]["ranks"] != [1] for fault in FAULTS)
    )


def kept() -> dict[str, Row]:
    """The results that are kept, by framework."""
    rows: dict[str, Row] = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
    return {name: rows[name] for name in NAMES if name in rows}


def keep(framework: str, row: Row) -> None:
    """Keep a result in the place of the one before."""
    RESULTS.write_text(json.dumps(kept() | {framework: row}, indent=1) + "\n", "utf-8")


def markdown() -> str:
    """All kept results as a table."""
    lines = [
        "| framework | releases | watched as | same numbers | no finding in a healthy run | rank 1 hangs |"
        " rank 1 raises | rank 1 has one more batch | run on |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    return "\n".join([*lines, *(_line(NAMES[name], row) for name, row in kept().items())])


def _line(name: str, row: Row) -> str:
    versions = ", ".join(f"{package} {version}" for package, version in row.get("versions", {}).items())
    if "skipped" in row:
        reason = row["skipped"].replace("|", "/")
        return f"| {name} | {versions} | not run: {reason} | | | | | | {row['date']} |"
    seen = row["watched_as"]
    kind = seen["framework"] if seen["framework"] != "plain" else f"a loop, {seen['strategy']}"
    faults = [_words(row[fault]) for fault in FAULTS]
    cells = [name, versions, kind, word_of(row["identical"]), word_of(not row["alarms"]), *faults, row["date"]]
    return f"| {' | '.join(cells)} |"


def _words(found: dict[str, Any]) -> str:
    if found["id"] is None:
        return f"**by {', '.join(found['all'])} only**" if found["all"] else "**not found**"
    ranks = ", ".join(map(str, found["ranks"]))
    named = f"{found['id']}, rank {ranks}" if found["ranks"] == [1] else f"{found['id']}, **rank {ranks or 'unknown'}**"
    return f"{named}, {found['seconds']} s" if found["seconds"] is not None else named


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line names, else all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="names of frameworks, with commas between them")
    parser.add_argument("--evidence", action="store_true", help="write the kept results into docs/evidence")
    parser.add_argument("--folder", type=Path, help="leave the files of the jobs here")
    add_part(parser, "a run without a fault and a crash")
    given = parser.parse_args(arguments)
    if given.evidence:
        write_between("frameworks", markdown())
        return 0
    wrong = False
    for framework in given.only.split(",") if given.only else NAMES:
        with nullcontext(given.folder / framework) if given.folder else _scratch() as folder:
            row = run_framework(framework, Path(folder), PART if given.part else FAULTS)
        if not given.part:
            keep(framework, row)
        wrong |= is_wrong(row)
        print(f"{'WRONG ' if is_wrong(row) else ''}{framework}: {json.dumps(row)}", flush=True)
    return int(wrong)


def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="rankdoctor-framework-", ignore_cleanup_errors=True)


if __name__ == "__main__":
    sys.exit(main())
