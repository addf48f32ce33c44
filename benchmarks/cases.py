"""Texts of failures that people reported in public, each alone in a log: is the cause that was found there the verdict?

    python benchmarks/cases.py [PATH]            a folder of NNN.json, or a file with one case a line
    python benchmarks/cases.py --write          writes the tables of the cases in tests/data into docs/evidence

A case has ``text``, ``cause_family``, ``accepted_ids`` and, to tell which count for the headline, ``text_source``,
``input_kind``, ``text_states_cause`` and ``under_determined``.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from doctor.core.check_registry import load_registry
from doctor.core.errors import UnusableError
from doctor.core.finding import Severity
from doctor.core.report_document import Report
from doctor.core.settings import Settings
from doctor.postmortem.run_reader import read_runs
from doctor.session import judge

sys.path.insert(0, str(Path(__file__).resolve().parent))
from evidence_pages import folded, write_between

ROOT = Path(__file__).resolve().parent.parent
REPORTED = ROOT / "tests" / "data" / "reported_failures.jsonl"
ELSEWHERE = ROOT.parent / "shared" / "cases"
"""A folder of others, where one lies beside the checkout."""
BINS = (0.3, 0.5, 0.7, 0.85, 0.93, 1.01)
"""Bounds of the confidences that stand in one row of the table of reliability."""


class Case(NamedTuple):
    """A failure; ``accepted``: the ids that are right. ``counts``: it is one of the headline."""

    name: str
    family: str
    accepted: tuple[str, ...]
    text: str
    counts: bool
    stated: bool
    open_ended: bool


class Outcome(NamedTuple):
    """A case and what ``doctor diagnose`` said: the primary id, its confidence, all loud ids, the exit code."""

    case: Case
    primary: str | None
    confidence: float
    loud: tuple[str, ...]
    code: int

    @property
    def is_right(self) -> bool:
        """Whether the verdict is one of those accepted; of a healthy text: that there is none."""
        return self.primary in self.case.accepted if self.case.accepted else not self.loud


def read_cases(path: Path) -> list[Case]:
    """All cases of a folder, by number, or of a file."""
    if path.is_dir():
        return [_case(json.loads(file.read_text())) for file in sorted(path.glob("*.json"))]
    return [_case(json.loads(line)) for line in path.read_text().splitlines()]


def _case(raw: dict[str, Any]) -> Case:
    flagged = raw["text_states_cause"] or raw["under_determined"]
    return Case(
        name=raw["id"],
        family=raw["cause_family"],
        accepted=tuple(raw["accepted_ids"]),
        text=raw["text"],
        counts=raw["text_source"] == "excerpt" and raw["input_kind"] != "config" and not flagged,
        stated=raw["text_states_cause"],
        open_ended=raw["under_determined"],
    )


def diagnose(case: Case) -> Outcome:
    """What the doctor says of the text alone."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "job.log"
        log.write_text(case.text)
        try:
            _, job, inputs = read_runs([log])[0]
        except UnusableError:
            return Outcome(case, None, 0.0, (), 2)
        report = judge(job, load_registry(()), Settings(), must_be_complete=False, inputs=inputs)
    return Outcome(case, report.primary, _confidence(report), _loud(report), report.exit_code)


def _confidence(report: Report) -> float:
    result = report.result(report.primary) if report.primary else None
    return max((one.confidence for one in result.findings), default=0.0) if result else 0.0


def _loud(report: Report) -> tuple[str, ...]:
    loud = (one for one in report.results if any(f.stands and f.severity is not Severity.INFO for f in one.findings))
    return tuple(one.id for one in loud)


class Score(NamedTuple):
    """What became of all cases."""

    outcomes: tuple[Outcome, ...]

    @property
    def headline(self) -> list[Outcome]:
        """Those that count: excerpts of logs whose cause is not written in them, and is in them."""
        return [one for one in self.outcomes if one.case.counts and one.case.accepted]

    @property
    def healthy(self) -> list[Outcome]:
        """Texts of which the right answer is nothing."""
        return [one for one in self.outcomes if not one.case.accepted]

    @property
    def is_enough(self) -> bool:
        """At least 95 % of the headline, and no verdict on a healthy text."""
        right = sum(one.is_right for one in self.headline)
        return right >= 0.95 * len(self.headline) and not any(one.primary for one in self.healthy)


def score(path: Path) -> Score:
    """Diagnose all cases of a path."""
    return Score(tuple(map(diagnose, read_cases(path))))


def main(arguments: Sequence[str]) -> int:
    """Print the tables; 1 where they say too little or too much."""
    paths = [Path(one) for one in arguments if not one.startswith("-")]
    found = score(paths[0] if paths else REPORTED)
    if not found.outcomes:
        print("there are no cases")
        return 2
    print("\n".join([summary(found), "", *confusion(found), "", *reliability(found), "", *wrong(found)]))
    if "--write" in arguments:
        every = folded("Family by family", "\n".join(confusion(found)))
        write_between("cases", "\n\n".join([summary(found), "\n".join(reliability(found)), every]))
    return int(not found.is_enough)


def summary(found: Score) -> str:
    """The score in one sentence."""
    causes = [one for one in found.outcomes if one.case.accepted]
    headline, healthy = found.headline, found.healthy
    right = sum(one.is_right for one in headline)
    return (
        f"{len(found.outcomes)} texts: the right verdict on {right} of {len(headline)} headline cases "
        f"({100 * right / max(1, len(headline)):.1f} %) and on {sum(one.is_right for one in causes)} of all "
        f"{len(causes)} with a cause; of {len(healthy)} healthy texts {sum(bool(one.primary) for one in healthy)} with "
        f"a verdict, {sum(bool(one.loud) for one in healthy)} with a warning or an error."
    )


def confusion(found: Score) -> list[str]:
    """The table of families against verdicts."""
    rows: dict[str, list[Outcome]] = {}
    for one in found.outcomes:
        rows.setdefault(one.case.family, []).append(one)
    lines = ["| family | accepted | headline, right | all, right | verdicts |", "| --- | --- | ---: | ---: | --- |"]
    return lines + [_row(family, members) for family, members in sorted(rows.items())]


def _row(family: str, members: Sequence[Outcome]) -> str:
    counted = [one for one in members if one.case.counts]
    said = Counter(one.primary or "none" for one in members)
    accepted = dict.fromkeys(name for one in members for name in one.case.accepted)
    return (
        f"| {family} | {' '.join(accepted) or 'none'} | {sum(one.is_right for one in counted)} of {len(counted)} "
        f"| {sum(one.is_right for one in members)} of {len(members)} "
        f"| {', '.join(f'{name} {count}' for name, count in said.most_common())} |"
    )


def reliability(found: Score) -> list[str]:
    """How often a verdict of each confidence is right."""
    spoken = [one for one in found.outcomes if one.primary]
    lines = ["| confidence | verdicts | mean confidence | right |", "| --- | ---: | ---: | ---: |"]
    for low, high in itertools.pairwise(BINS):
        row = [one for one in spoken if low <= one.confidence < high]
        if row:
            mean, right = (
                sum(values) / len(row) for values in ([o.confidence for o in row], [o.is_right for o in row])
            )
            lines.append(f"| {low:.2f} to {min(high, 1.0):.2f} | {len(row)} | {mean:.2f} | {right:.2f} |")
    return lines


def wrong(found: Score) -> list[str]:
    """Every case that is not right."""
    return [
        f"{one.case.name} {one.case.family}: {one.primary} at {one.confidence:.2f}, wanted "
        f"{' '.join(one.case.accepted) or 'none'}; loud: {' '.join(one.loud) or 'nothing'}"
        f"{', headline' if one.case.counts else ''}{', open' if one.case.open_ended else ''}"
        for one in found.outcomes
        if not one.is_right
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
