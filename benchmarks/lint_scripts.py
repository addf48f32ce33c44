"""Score ``doctor lint`` on training scripts with one fault each, and on their healthy variants.

    python benchmarks/lint_scripts.py                       scores all scripts of the first set
    python benchmarks/lint_scripts.py --set lint_scripts_2  scores those of the second set
    python benchmarks/lint_scripts.py --part                the first three of the set
    python benchmarks/lint_scripts.py --keep                adds the score to benchmarks/SET_results.json

``SET/bad`` holds the scripts and ``SET/good`` the same scripts without the fault. ``SET/expect.json`` was committed
before the first run: the lines that a finding may name, and the ids that count as found; without ids (no rule existed
for the fault) any finding on these lines counts. ``certain`` says whether the fault follows from the code alone, so
that severity ``error`` is right. Every finding in a healthy variant is a false alarm. The groups: ``script`` and
``project`` are training programs, ``environment`` are variables and devices that a program sets, ``launch`` are launch
files. The second set was written by somebody who knew the names of the rules and not their source; its first kept score
is from before any change of a rule.

Exits with 1 if fewer scripts are found or more healthy variants have a finding than in the last kept score.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from click.testing import CliRunner
from evidence_pages import add_part

from doctor.cli.main import app

BENCHMARKS = Path(__file__).resolve().parent
SETS = ("lint_scripts", "lint_scripts_2")
PART = 3
"""Scripts of ``--part``."""
COUNTS = ("scripts", "found", "found as error", "certain found as error", "healthy with a finding")


class Script(NamedTuple):
    """A faulty script of a set: the places (file, line) and ids that count as found."""

    set: str
    name: str
    group: str
    fault: str
    places: frozenset[tuple[str, int]]
    ids: frozenset[str]
    certain: bool


class Finding(NamedTuple):
    """A finding of lint, with the file relative to the folder of the scripts."""

    id: str
    severity: str
    file: str
    line: int


class Score(NamedTuple):
    """The findings that count as found, and the findings in the healthy variant."""

    script: Script
    found: tuple[Finding, ...]
    others: tuple[Finding, ...]
    alarms: tuple[Finding, ...]


def read_scripts(name: str) -> list[Script]:
    """The entries of ``expect.json`` of a set."""
    entries = json.loads((BENCHMARKS / name / "expect.json").read_text("utf-8"))
    return [_script(name, entry) for entry in entries]


def _script(name: str, entry: dict[str, Any]) -> Script:
    places = (str(line) if ":" in str(line) else f"{entry['script']}:{line}" for line in entry["lines"])
    pairs = (place.rpartition(":") for place in places)
    return Script(
        name,
        entry["script"],
        entry["group"],
        entry["fault"],
        frozenset((file, int(line)) for file, _, line in pairs),
        frozenset(entry["ids"]),
        entry["certain"],
    )


def findings_in(variant: str, script: Script) -> list[Finding]:
    """The findings of ``doctor lint`` in a script or in a folder of scripts."""
    root = BENCHMARKS / script.set / variant
    done = CliRunner().invoke(app, ["lint", "--isolated", "--format", "json", str(root / script.name)])
    if done.exit_code not in (0, 1, 3):
        raise SystemExit(f"{variant}/{script.name}: {done.output}")
    return [
        Finding(
            result["id"],
            one["severity"],
            Path(one["source"]["file"]).resolve().relative_to(root).as_posix(),
            one["source"]["line"] or 0,
        )
        for result in json.loads(done.stdout)["results"]
        for one in result["findings"]
    ]


def score(script: Script) -> Score:
    """Lint both variants of a script."""
    findings = findings_in("bad", script)
    found = tuple(one for one in findings if _counts(one, script))
    others = tuple(one for one in findings if one not in found)
    return Score(script, found, others, tuple(findings_in("good", script)))


def _counts(finding: Finding, script: Script) -> bool:
    return (finding.file, finding.line) in script.places and (not script.ids or finding.id in script.ids)


def counts_of(scores: Sequence[Score]) -> dict[str, int]:
    """The numbers of :data:`COUNTS`."""
    errors = [one for one in scores if any(finding.severity == "error" for finding in one.found)]
    values = (
        len(scores),
        sum(bool(one.found) for one in scores),
        len(errors),
        sum(one.script.certain for one in errors),
        sum(bool(one.alarms) for one in scores),
    )
    return dict(zip(COUNTS, values, strict=True))


def by_group(scores: Sequence[Score]) -> dict[str, dict[str, int]]:
    """The counts of each group, in the order of ``expect.json``."""
    groups = dict.fromkeys(one.script.group for one in scores)
    return {group: counts_of([one for one in scores if one.script.group == group]) for group in groups}


def show(scores: Sequence[Score]) -> None:
    """Print what was found and missed, findings in healthy variants, and the counts."""
    for one in scores:
        word = "found " if one.found else "MISSED"
        print(f"{word} {one.script.name}: {_listed(one.found) or one.script.fault}")
        if one.others:
            print(f"       also {_listed(one.others)}")
        if one.alarms:
            print(f"       FALSE ALARM in the healthy variant: {_listed(one.alarms)}")
    for group, counts in by_group(scores).items():
        print(f"{group}: {', '.join(f'{name} {count}' for name, count in counts.items())}")


def _listed(findings: Sequence[Finding]) -> str:
    return ", ".join(f"{one.id} ({one.severity}) line {one.line}" for one in findings)


def results_of(name: str) -> Path:
    """The file with the kept scores of a set."""
    return BENCHMARKS / f"{name}_results.json"


def kept(name: str) -> list[dict[str, Any]]:
    """The kept scores of a set, oldest first."""
    results = results_of(name)
    return json.loads(results.read_text("utf-8")) if results.exists() else []


def keep(name: str, scores: Sequence[Score]) -> None:
    """Add the score of a set to its kept ones, with the date and the commit that was scored."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=BENCHMARKS, capture_output=True, text=True, check=True
    )
    entry = {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit.stdout.strip(),
        "groups": by_group(scores),
        "missed": [one.script.name for one in scores if not one.found],
        "false alarms": [one.script.name for one in scores if one.alarms],
    }
    results_of(name).write_text(json.dumps([*kept(name), entry], indent=1) + "\n", "utf-8")


def below_kept(name: str, scores: Sequence[Score]) -> bool:
    """Whether the score of a set is below its last kept one."""
    if not kept(name):
        return False
    before: Counter[str] = Counter()
    for counts in kept(name)[-1]["groups"].values():
        before.update(counts)
    now = counts_of(scores)
    return now["found"] < before["found"] or now["healthy with a finding"] > before["healthy with a finding"]


def main() -> None:
    """Score all scripts, and keep the score if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", choices=SETS, default=SETS[0])
    parser.add_argument("--keep", action="store_true")
    add_part(parser, f"{PART} scripts")
    asked = parser.parse_args()
    scores = [score(script) for script in read_scripts(asked.set)[: PART if asked.part else None]]
    show(scores)
    below = not asked.part and below_kept(asked.set, scores)
    if asked.keep and not asked.part:
        keep(asked.set, scores)
    raise SystemExit(int(below))


if __name__ == "__main__":
    main()
