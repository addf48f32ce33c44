"""Faults of single ranks by framework below ``doctor run``: found, on the right rank, in time; and healthy runs.

    benchmarks/frameworks/environment FOLDER              makes an environment with all frameworks
    FOLDER/bin/python benchmarks/framework_faults.py      plays all, and keeps the results
    ... --only ddp,"lightning rate"                       plays of these frameworks or names
    ... --jobs 1                                          one at a time instead of two
    ... --part                                            one fault; nothing is kept
    python benchmarks/framework_faults.py --evidence      writes the kept results into docs/evidence

``framework_faults.json`` holds the plays: what is planted in the trainings of ``tests/frameworks/training.py``, the
checks one of which has to report it, the ranks at fault, and the seconds allowed. ``scene``: tests that have the same
fault, if not with the same program; ``amended``: why a check was added after the first play, which is scored without.
Right culprit: the ranks that these checks name are those of the play, no more and no less. Seconds: from the moment of
the fault, by the program's own note, to the report. A healthy run has an alarm if a finding of severity error or
warning was in its report at any moment. ``framework_faults_results.json`` keeps every result with its date, commit and
load average; the first one of each play is the first score. Plays that did not reach their fault, because the machine
was too busy, are repeated and not scored. The exit code is 1 if a fault was not found on the right rank in time, or a
healthy run had an alarm.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
from evidence_pages import add_part, folded, word_of, write_between
from frameworks import NAMES, PACKAGES

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "checks")]

from tests.frameworks.jobs import NEEDS, end_job, report_in, start_job  # noqa: E402 - the path

PLAYS = Path(__file__).with_suffix(".json")
RESULTS = Path(__file__).with_name("framework_faults_results.json")
PROGRAM = ROOT / "tests" / "frameworks" / "training.py"
STARTS_WITHIN = 240.0
"""Seconds until the fault of a play: on a busy machine Ray takes two minutes to start."""
HEALTHY_WITHIN = 240.0
SETTLE = 4.0
"""Seconds that a run goes on after its fault was reported."""
POLL = 0.3
NOT_STARTED = ("no report", "the fault was not reached")
PART = "ddp more"
"""The play of ``--part``."""
OF_MACHINE = ("ENV012",)
"""More processes than processors: true of plays of many ranks here."""
PLANTS = NEEDS | {"trl": "trl"}

Play = dict[str, Any]
Result = dict[str, Any]
_writing = threading.Lock()


def findings_in(folder: Path) -> list[dict[str, Any]]:
    """The findings of severity error and warning in the reports of a job, each with the id of its check.

    A launcher that starts the ranks anew, as Ray does, has the report of the first run moved to ``earlier``.
    """
    results = (report_in(folder) or {"results": []})["results"]
    for path in folder.glob("doctor/earlier/*/report.json"):
        with suppress(OSError, ValueError):
            results += json.loads(path.read_text())["results"]
    every = [one | {"id": result["id"]} for result in results for one in result["findings"]]
    return [
        one
        for one in every
        if one["severity"] in ("error", "warning") and one["ignored"] is None and one["id"] not in OF_MACHINE
    ]


def named_ranks(play: Play, findings: Iterable[dict[str, Any]]) -> list[int]:
    """The ranks that the checks of a fault name."""
    return sorted({rank for one in findings if one["id"] in play["ids"] for rank in one["ranks"]})


def unexplained(play: Play, findings: list[dict[str, Any]]) -> list[str]:
    """The alarms that are neither of the checks of a fault nor a consequence of theirs."""
    causes = set(play["ids"])
    while more := {one["id"] for one in findings if one["explained_by"] in causes} - causes:
        causes |= more
    return [_short(one) for one in findings if one["id"] not in causes]


def _short(finding: dict[str, Any]) -> str:
    return f"{finding['id']} {finding['ranks']}: {finding['summary']}"


def perform(play: Play, folder: Path) -> Result:
    """Play a fault or a healthy run in ``folder``."""
    load = os.getloadavg()[0]
    given = play["play"]
    process = start_job(
        folder,
        play["framework"],
        PROGRAM,
        [json.dumps(given)],
        world=given.get("world", 2),
        options=(),
        of_launcher=tuple(given.get("launcher", ())),
    )
    (folder / "launcher").write_text(str(process.pid))
    began = time.monotonic()
    try:
        watched = watch_fault(process, play, folder) if "ids" in play else watch_healthy(process, folder)
    finally:
        end_job(process)
        end_rest(folder)
    loads = [round(one, 1) for one in (load, os.getloadavg()[0])]
    return {
        "name": play["name"],
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M"),
        "commit": commit(),
        **watched,
        "load": loads,
        "lasted": round(time.monotonic() - began),
    }


def watch_fault(process: subprocess.Popen[bytes], play: Play, folder: Path) -> Result:
    """Wait until a fault is found on the right ranks, or three times the time allowed is over."""
    until, noted, seen = time.monotonic() + STARTS_WITHIN, None, None
    while time.monotonic() < until and seen is None:
        over = process.poll() is not None
        time.sleep(POLL)
        if noted is None and (noted := _moment(folder)) is not None:
            until = time.monotonic() + min(3 * play["within"], play["within"] + 60)
        if noted is not None and named_ranks(play, findings_in(folder)) == play["ranks"]:
            seen = time.time()
        if over and not is_running(folder):
            break
    settled = time.monotonic() + SETTLE
    while seen is not None and process.poll() is None and time.monotonic() < settled:
        time.sleep(POLL)
    findings = findings_in(folder)
    seconds = None if seen is None or noted is None else round(seen - noted, 1)
    ranks = named_ranks(play, findings)
    return {
        "ids": sorted({one["id"] for one in findings if one["id"] in play["ids"]}),
        "ranks": ranks,
        "right": ranks == play["ranks"],
        "seconds": seconds,
        "others": unexplained(play, findings),
        **({} if noted is not None else {"error": f"the fault was not reached: {_end(folder)}"}),
    }


def watch_healthy(process: subprocess.Popen[bytes], folder: Path) -> Result:
    """Wait for the end of a healthy run; return each alarm that was ever in its report."""
    alarms: dict[str, str] = {}
    until = time.monotonic() + HEALTHY_WITHIN
    while True:
        over = process.poll() is not None or time.monotonic() > until
        for one in findings_in(folder):
            alarms.setdefault(f"{one['id']} {one['ranks']}", _short(one))
        if over:
            break
        time.sleep(POLL)
    report = report_in(folder)
    result: Result = {"alarms": list(alarms.values()), "code": process.poll()}
    if report is None:
        return result | {"error": f"no report: {_end(folder)}"}
    result["ranks_seen"] = report["coverage"]["ranks_seen"]
    return result | ({} if process.poll() is not None else {"error": f"it did not end: {_end(folder)}"})


def _moment(folder: Path) -> float | None:
    with suppress(OSError, ValueError):
        return float((folder / "planted").read_text())
    return None


def _end(folder: Path) -> str:
    return (folder / "output").read_text(errors="replace")[-400:]


def is_running(folder: Path) -> bool:
    """Whether a process of the job runs on: where the launcher is a rank, as of Fabric, the others may outlive it."""
    return any(True for _ in _left_in(folder))


def end_rest(folder: Path) -> None:
    """End what a job left in its folder: ranks whose launcher was killed, and processes of Ray."""
    for process in _left_in(folder):
        with suppress(psutil.Error):
            process.kill()


def _left_in(folder: Path) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if Path(process.cwd()).is_relative_to(folder):
                yield process


def commit() -> str:
    """The commit that is played."""
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def plays() -> list[Play]:
    """All plays: faults first."""
    read = json.loads(PLAYS.read_text("utf-8"))
    return [*read["faults"], *read["healthy"]]


def kept() -> list[Result]:
    """All results, the oldest first."""
    results: list[Result] = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else []
    return results


def play_and_print(play: Play, *, is_kept: bool) -> Result:
    """Play it, keep the result unless it is not to be kept, print it."""
    package = PLANTS.get(play["framework"], "torch")
    if find_spec(package) is None:
        return {"name": play["name"], "skipped": f"needs {package}"}
    with tempfile.TemporaryDirectory(prefix="rankdoctor-play-", ignore_cleanup_errors=True) as folder:
        result = perform(play, Path(folder))
    names = {PACKAGES.get(package, package), "torch"}
    result["versions"] = {name: metadata.version(name) for name in sorted(names)}
    with _writing:
        if is_kept:
            lines = ",\n".join(json.dumps(one) for one in [*kept(), result])
            RESULTS.write_text(f"[\n{lines}\n]\n", "utf-8")
        print(f"{'' if is_good(play, result) else 'WRONG '}{json.dumps(result)}", flush=True)
    return result


def is_good(play: Play, result: Result) -> bool:
    """Whether a fault was found on the right ranks in time, and a healthy run had no alarm."""
    if "ids" in play:
        return bool(result["right"]) and in_time(play, result)
    return not result["alarms"] and "error" not in result


def in_time(play: Play, result: Result) -> bool:
    """Whether a fault was reported within the seconds allowed."""
    return result["seconds"] is not None and result["seconds"] <= play["within"]


def by_framework(chosen: dict[str, Result]) -> str:
    """One line a framework, as Markdown."""
    lines = [
        "| framework | faults | found | right culprit | in time | seconds of hangs, deaths and divergence |"
        " of slow ranks | healthy runs | with an alarm |",
        "| --- | ---: | ---: | ---: | ---: | --- | --- | ---: | ---: |",
    ]
    every = [play for play in plays() if play["name"] in chosen]
    groups = dict.fromkeys(play["framework"] for play in every)
    rows = {name: [play for play in every if play["framework"] == name] for name in groups} | {"all": every}
    return "\n".join([*lines, *(_line(name, group, chosen) for name, group in rows.items())])


def _line(name: str, group: list[Play], chosen: dict[str, Result]) -> str:
    faults = [(play, chosen[play["name"]]) for play in group if "ids" in play]
    healthy = [(play, chosen[play["name"]]) for play in group if "ids" not in play]
    found = sum(bool(result["ids"]) for _, result in faults)
    right = sum(result["right"] for _, result in faults)
    timely = sum(is_good(play, result) for play, result in faults)
    quick = [result["seconds"] for play, result in faults if result["right"] and play["within"] == 15]
    slow = [result["seconds"] for play, result in faults if result["right"] and play["within"] == 60]
    alarms = sum(not is_good(play, result) for play, result in healthy)
    title = {"trl": "TRL SFTTrainer"}.get(name, NAMES.get(name, name))
    cells = (title, len(faults), found, right, timely, _spent(quick), _spent(slow), len(healthy), alarms)
    return f"| {' | '.join(map(str, cells))} |"


def _spent(seconds: list[float | None]) -> str:
    known = [one for one in seconds if one is not None]
    return f"{min(known):.1f} to {max(known):.1f}, median {statistics.median(known):.1f}" if known else ""


def table(first: dict[str, Result], last: dict[str, Result]) -> str:
    """Every play with its first and its last result, as Markdown."""
    lines = ["| play | ranks | expected | first score | last score |", "| --- | ---: | --- | --- | --- |"]
    for play in plays():
        if play["name"] not in first:
            continue
        expected = f"{' or '.join(play['ids'])}, {play['ranks']}, {play['within']} s" if "ids" in play else "healthy"
        scores = (_words(play, one[play["name"]]) for one in (first, last))
        lines.append(f"| {play['name']} | {play['play'].get('world', 2)} | {expected} | {' | '.join(scores)} |")
    return "\n".join(lines)


def _words(play: Play, result: Result) -> str:
    load = f"load {max(result['load'])}"
    if "ids" not in play:
        said = "; ".join(one.replace("|", "/") for one in result["alarms"]) or result.get("error", "")[:80]
        return f"{word_of(True)}, {load}" if is_good(play, result) else f"**{said}**, {load}"
    said = f"{', '.join(result['ids']) or 'nothing'}, {result['ranks']}, {result['seconds']} s, {load}"
    return said if is_good(play, result) else f"**{said}**"


def evidence() -> None:
    """Write first and last scores into the page."""
    results = [one for one in kept() if not one.get("error", "").startswith(NOT_STARTED)]
    last = {one["name"]: one for one in results}
    first = {one["name"]: one for one in reversed(results)}
    faults, healthy = (
        sum(("ids" in play) is kind for play in plays() if play["name"] in first) for kind in (True, False)
    )
    planned = f"Played: {faults} of {sum('ids' in play for play in plays())} faults and {healthy} healthy runs"
    planned += f" of {sum('ids' not in play for play in plays())}"
    text = (
        f"{planned}. First score of every play:\n\n{by_framework(first)}\n\n"
        f"Last score, after corrections and repeats:\n\n"
        f"{by_framework(last)}\n\n{folded('Every play', table(first, last))}"
    )
    write_between("framework-faults", text)


def main() -> int:
    """Play what the command line names, else all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="frameworks or names of plays, with commas between them")
    parser.add_argument("--jobs", type=int, default=2, help="plays at a time (default: 2)")
    parser.add_argument("--evidence", action="store_true", help="write the kept results into docs/evidence")
    add_part(parser, f"the play {PART!r}")
    given = parser.parse_args()
    if given.evidence:
        evidence()
        return 0
    words = given.only.split(",") if given.only else [PART] if given.part else []
    chosen = [one for one in plays() if not words or one["name"] in words or one["framework"] in words]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in what it runs in the background
    with ThreadPoolExecutor(min(2, given.jobs)) as pool:
        results = list(pool.map(partial(play_and_print, is_kept=not given.part), chosen))
    return int(any("skipped" not in one and not is_good(play, one) for play, one in zip(chosen, results, strict=True)))


if __name__ == "__main__":
    sys.exit(main())
