"""What ``doctor lint`` costs, and whether its hits in real sources are right.

    python benchmarks/lint.py --speed [PATH…]
    python benchmarks/lint.py --hits [PATH…] [--new] [--write]
    python benchmarks/lint.py --rivals [--write]
    python benchmarks/lint.py --sources DIR [--half tuned|held|fresh|third|…|twenty-sixth|development] [--show]

Without PATHs: the installed sources of the libraries below. ``--hits`` prints every hit with its line and what was
judged of it (``lint_hits.json``: whether somebody who read the line says that it is right, and why); a hit that nobody
has judged is said, and no share is told as long as there is one. ``--new`` prints these alone, as entries to fill in.
A PATH may be a folder of checkouts, ``owner/name`` each: ``lint_hits.json`` holds the commits that were judged.
``--sources`` counts the hits in checkouts of the public repositories of ``lint_corpus.json``, ``DIR/OWNER+NAME`` each,
and prints the commands that fetch absent ones; ``--show`` also prints each hit with its lines.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from evidence_pages import write_between
from lint_corpus import HALVES, show_corpus
from lint_rivals import rivals_table

DOCTOR = str(Path(sys.executable).parent / "doctor")
LIBRARIES = ("lightning", "accelerate", "transformers", "torch", "ray", "torchmetrics")
JUDGED = Path(__file__).parent / "lint_hits.json"
FILES, RUNS = 2_000, 5
LIMITS = {"files": 20.0, "one file": 0.3}
"""Seconds on two idle cores."""


class Hit(NamedTuple):
    """A finding in a file: ``path`` relative to where packages are installed."""

    id: str
    path: str
    line: int
    code: str
    summary: str


def packages() -> Path:
    """Where this interpreter's packages are."""
    import sysconfig

    return Path(sysconfig.get_paths()["purelib"])


def installed() -> list[Path]:
    """The libraries that are there."""
    return [path for name in LIBRARIES if (path := packages() / name).is_dir()]


def lint(*arguments: str | Path) -> tuple[dict[str, Any], float]:
    """The report of ``doctor lint``, and seconds of wall clock."""
    began = time.perf_counter()
    command = [DOCTOR, "lint", "--format", "json", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tempfile.gettempdir())
    seconds = time.perf_counter() - began
    if done.returncode not in (0, 1, 3):
        raise SystemExit(done.stderr)
    return json.loads(done.stdout), seconds


def measure(paths: list[Path]) -> None:
    """Seconds for many files and for one, against the limits."""
    files = sorted(file for path in paths for file in path.rglob("*.py"))[:FILES]
    with tempfile.TemporaryDirectory() as folder:
        for number, file in enumerate(files):
            shutil.copyfile(file, Path(folder) / f"{number:05d}.py")
        _tell(f"{len(files)} files", [lint(folder)[1] for _ in range(RUNS)], LIMITS["files"])
    script = Path(__file__).resolve().parent.parent / "examples"
    one = next(iter(sorted(script.rglob("*.py"))), files[0])
    _tell(f"one file ({one.name})", [lint(one)[1] for _ in range(RUNS)], LIMITS["one file"])


def _tell(what: str, seconds: list[float], limit: float) -> None:
    print(
        f"{what:32s} best {min(seconds):6.2f} s  median {statistics.median(seconds):6.2f} s  limit {limit:g} s on two "
        "idle cores"
    )


def hits_of(report: dict[str, Any], paths: list[Path]) -> list[Hit]:
    """Every finding over Python and launch files, by rule and place."""
    roots = [packages(), *paths]
    found = []
    for result in report["results"]:
        for one in result["findings"]:
            path = Path(one["source"]["file"])
            shown = next((path.relative_to(root) for root in roots if path.is_relative_to(root)), path)
            code = str(one["evidence"].get("code", "")).strip()
            found.append(Hit(result["id"], str(shown), one["source"]["line"] or 0, code, one["summary"]))
    return sorted(found)


def judged() -> dict[tuple[str, str, str], tuple[bool, str]]:
    """(id, path, text of the line) -> (right, why): lines move from release to release, their text less often."""
    entries = json.loads(JUDGED.read_text(encoding="utf-8"))["hits"] if JUDGED.is_file() else []
    return {(one["id"], one["path"], one["code"]): (one["right"], one["why"]) for one in entries}


def show_hits(paths: list[Path], *, new: bool, write: bool) -> None:
    """Print the hits, the counts by rule, and the share that is right."""
    report, seconds = lint(*paths)
    known, hits = judged(), hits_of(report, paths)
    open_ones = [hit for hit in hits if (hit.id, hit.path, hit.code) not in known]
    if new:
        print(json.dumps([{**hit._asdict(), "right": None, "why": ""} for hit in open_ones], indent=1))
        return
    for hit in hits:
        right, why = known.get((hit.id, hit.path, hit.code), (None, "not judged"))
        mark = {True: "right", False: "WRONG", None: "?????"}[right]
        print(f"{mark} {hit.id} {hit.path}:{hit.line}\n      {hit.code}\n      {hit.summary}\n      ({why})")
    crashes = [f"{one['id']} {one.get('crash') or one['reason']}" for one in report["results"] if _crashed(one)]
    table = hits_table(report, hits, known, f"{_sources(paths)}; {seconds:.0f} s")
    print(f"\n{table}\n")
    print("\n".join(crashes) if crashes else "no crash")
    if write:
        write_between("lint-hits", table)


def _crashed(result: dict[str, Any]) -> bool:
    return result["status"] == "error" or bool(result.get("crash"))


def hits_table(
    report: dict[str, Any], hits: list[Hit], known: dict[tuple[str, str, str], tuple[bool, str]], sources: str
) -> str:
    """Markdown: hits by rule, how many are right, crashes."""
    marks = [(hit.id, known.get((hit.id, hit.path, hit.code), (None, ""))[0]) for hit in hits]
    counts, right = Counter(name for name, _ in marks), Counter(name for name, mark in marks if mark)
    names = {one["id"]: one["name"] for one in report["results"]}
    unjudged = sum(mark is None for _, mark in marks)
    read = sum(one["skipped"] is None for one in report["inputs"])
    crashed = sum(map(_crashed, report["results"]))
    share = f"{sum(right.values())} of {len(hits)} right ({sum(right.values()) / len(hits):.0%})" if hits else "no hit"
    share = f"{unjudged} hits are not judged yet" if unjudged else share
    rows = [f"| {name} {names[name]} | {count} | {right[name]} |" for name, count in sorted(counts.items())]
    head = f"{read} files: {share}; {crashed} crashes. {sources}."
    return "\n".join([head, "", "| rule | hits | right |", "| --- | --- | --- |", *rows])


def _sources(paths: list[Path]) -> str:
    """What was read: installed libraries with their releases, checkouts by name."""
    import importlib.metadata

    home = packages()
    libraries = [f"{path.name} {importlib.metadata.version(path.name)}" for path in paths if path.parent == home]
    checkouts = [
        f"{name.parent.name}/{name.name}" for path in paths if path.parent != home for name in sorted(path.glob("*/*"))
    ]
    return "; ".join(filter(None, (", ".join(libraries), ", ".join(checkouts))))


def main() -> None:
    """Do what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path)
    parser.add_argument("--sources", type=Path)
    parser.add_argument("--half", choices=HALVES)
    for name in ("speed", "hits", "rivals", "new", "write", "show"):
        parser.add_argument(f"--{name}", action="store_true")
    asked = parser.parse_args()
    if asked.sources:
        show_corpus(asked.sources.resolve(), [asked.half] if asked.half else HALVES, hits=asked.show)
        return
    paths = [path.resolve() for path in asked.paths] or installed()
    if asked.speed:
        measure(paths)
    if asked.hits or asked.new:
        show_hits(paths, new=asked.new, write=asked.write)
    if asked.rivals:
        table = rivals_table()
        print(table)
        if asked.write:
            write_between("lint-rivals", table)


if __name__ == "__main__":
    main()
