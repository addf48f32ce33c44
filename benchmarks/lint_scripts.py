"""Score ``doctor lint`` on training scripts with one fault each, and on their healthy variants.

    python benchmarks/lint_scripts.py           scores all scripts
    python benchmarks/lint_scripts.py --keep    adds the score to benchmarks/lint_scripts_results.json

``lint_scripts/bad`` holds the scripts and ``lint_scripts/good`` the same scripts without the fault. ``expect.json``
was committed before the first run: the lines that a finding may name, and the ids that count as found; without ids
(no rule existed for the fault) any finding on these lines counts. ``certain`` says whether the fault follows from the
code alone, so that severity ``error`` is right. Every finding in a healthy variant is a false alarm. The groups:
``script`` and ``project`` are training programs, ``environment`` are variables and devices that a program sets,
``launch`` are launch files.

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

from doctor.cli.main import app

SCRIPTS = Path(__file__).resolve().parent / "lint_scripts"
RESULTS = SCRIPTS.with_name("lint_scripts_results.json")
COUNTS = ("scripts", "found", "found as error", "certain found as error", "healthy with a finding")


class Script(NamedTuple):
    """A faulty script: the places (file, line) and ids that count as found."""

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


def read_scripts() -> list[Script]:
    """The entries of ``expect.json``."""
    entries = json.loads((SCRIPTS / "expect.json").read_text("utf-8"))
    return [_script(entry) for entry in entries]


def _script(entry: dict[str, Any]) -> Script:
    places = (str(line) if ":" in str(line) else f"{entry['script']}:{line}" for line in entry["lines"])
    pairs = (place.rpartition(":") for place in places)
    return Script(
        entry["script"],
        entry["group"],
        entry["fault"],
        frozenset((file, int(line)) for file, _, line in pairs),
        frozenset(entry["ids"]),
        entry["certain"],
    )


def findings_in(variant: str, script: str) -> list[Finding]:
    """The findings of ``doctor lint`` in a script or in a folder of scripts."""
    root = SCRIPTS / variant
    done = CliRunner().invoke(app, ["lint", "--isolated", "--format", "json", str(root / script)])
    if done.exit_code not in (0, 1, 3):
        raise SystemExit(f"{variant}/{script}: {done.output}")
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
    findings = findings_in("bad", script.name)
    found = tuple(one for one in findings if _counts(one, script))
    others = tuple(one for one in findings if one not in found)
    return Score(script, found, others, tuple(findings_in("good", script.name)))


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


def kept() -> list[dict[str, Any]]:
    """The kept scores, oldest first."""
    return json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else []


def keep(scores: Sequence[Score]) -> None:
    """Add the score to :data:`RESULTS`, with the date and the commit that was scored."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=SCRIPTS, capture_output=True, text=True, check=True
    )
    entry = {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit.stdout.strip(),
        "groups": by_group(scores),
        "missed": [one.script.name for one in scores if not one.found],
        "false alarms": [one.script.name for one in scores if one.alarms],
    }
    RESULTS.write_text(json.dumps([*kept(), entry], indent=1) + "\n", "utf-8")


def below_kept(scores: Sequence[Score]) -> bool:
    """Whether the score is below the last kept one."""
    if not kept():
        return False
    before: Counter[str] = Counter()
    for counts in kept()[-1]["groups"].values():
        before.update(counts)
    now = counts_of(scores)
    return now["found"] < before["found"] or now["healthy with a finding"] > before["healthy with a finding"]


def main() -> None:
    """Score all scripts, and keep the score if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", action="store_true")
    asked = parser.parse_args()
    scores = [score(script) for script in read_scripts()]
    show(scores)
    below = below_kept(scores)
    if asked.keep:
        keep(scores)
    raise SystemExit(int(below))


if __name__ == "__main__":
    main()
