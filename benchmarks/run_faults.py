"""Faults of trainings, caused for real while the callback watches: found, rightly blamed, in time, at rest.

    python benchmarks/run_faults.py                     plays everything, prints the table
    python benchmarks/run_faults.py --only RUN006,leak  only what has one of these words in its id or name
    python benchmarks/run_faults.py --alone             without the callback: every fault does what is said of it
    python benchmarks/run_faults.py --write            writes the table into docs/evidence

Real trainings of two to four processes over Gloo on the CPU, by Lightning's Trainer and in plain loops, with the
callback's defaults unless the name says otherwise. Found: the id, its severity and its words are in the report, before
the first batch where it can be known then. Right culprit: exactly the ranks at fault are blamed, the verdict is the
primary finding, and nothing else is said at severity error or warning but consequences. Seconds: from the moment that
the run goes wrong, by the program's own note, to the report. False alarms: healthy twins (the same program without the
fault) and healthy runs about which anything is said at severity error or warning, or that end otherwise. The exit code
is 1 where the right culprit is named in less than 95 % of the faults, or a healthy run is not left alone.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "checks"), str(ROOT / "benchmarks")]

from evidence_pages import folded, word_of, write_between  # noqa: E402 - the path comes first

from doctor.core.check import FAMILIES  # noqa: E402
from tests.faults.run.program import HEALTHY, SCENES  # noqa: E402
from tests.faults.run.scenes import RunScene, as_described, noise, score  # noqa: E402
from tests.faults.run.stage import Outcome, Run, perform  # noqa: E402
from tests.lab.needs import CannotPlay  # noqa: E402

ENOUGH = 0.95
"""Share of the faults in which the culprit must be right."""
STARTERS = {
    "variables": "torch's variables",
    "trainer": "the Trainer",
    "fork": "the Trainer, by fork",
    "spawn": "the Trainer, by spawn",
    "torchrun": "torchrun",
}


class Row(NamedTuple):
    """What became of one scene or healthy run. ``id`` and ``expected``: of the fault, none where it is healthy.
    ``marks``: found, right culprit, left alone; ``None`` where there is nothing to say. ``waited``: seconds from the
    stop to the verdict; ``before``: it was there before the first batch."""

    name: str
    run: Run
    id: str = ""
    expected: str = ""
    said: str = ""
    marks: tuple[bool | None, bool | None, bool | None] = (None, None, None)
    complaints: tuple[str, ...] = ()
    waited: float | None = None
    hangs: bool = False
    before: bool = False
    skipped: str = ""

    @property
    def family(self) -> str:
        """Of the check, by its word."""
        return FAMILIES[self.id[:-3]] if self.id else "healthy runs"


def play_scene(scene: RunScene) -> Row:
    """The row of a scene."""
    expected = "no single rank" if scene.of_host else _ranks(scene.run.culprits)
    row = Row(scene.name, scene.run, scene.id, expected, hangs=scene.does == "hangs")
    try:
        result = score(scene)
    except CannotPlay as why:
        return row._replace(skipped=str(why))
    return row._replace(
        said=_said(scene, result.outcome),
        marks=(not result.found, not (result.found or result.blamed), not result.silent),
        complaints=tuple(result.complaints),
        waited=result.outcome.waited,
        before=scene.before and result.outcome.in_time,
    )


def play_healthy(name: str) -> Row:
    """The row of a healthy run."""
    outcome = perform(HEALTHY[name])
    complaints = noise(outcome)
    return Row(name, HEALTHY[name], marks=(None, None, not complaints), complaints=tuple(complaints))


def _said(scene: RunScene, outcome: Outcome) -> str:
    """The verdict: the primary finding, or the one that was waited for."""
    primary = outcome.report["primary"] if outcome.report else None
    ids = [one["id"] for one in outcome.findings()]
    chosen = next((check for check in scene.ids if check in ids), primary)
    ranks = {rank for one in outcome.findings() if one["id"] == chosen for rank in one["ranks"]}
    return f"{chosen}, {_ranks(ranks)}" if chosen else "nothing"


def _ranks(ranks: Iterable[int]) -> str:
    named = sorted(ranks)
    return f"{'rank' if len(named) == 1 else 'ranks'} {', '.join(map(str, named))}" if named else "no rank"


def table(rows: Iterable[Row]) -> str:
    """Every row as Markdown."""
    lines = [
        "| run | processes | id | to blame | said | found | right culprit | seconds | healthy variant silent |",
        "| --- | --- | --- | --- | --- | --- | --- | ---: | --- |",
    ]
    for row in rows:
        if row.skipped:
            said, marks = f"skipped: {row.skipped}", ["", "", ""]
        else:
            said, marks = row.said, [word_of(mark) for mark in row.marks]
        started = f"{row.run.world}, {STARTERS[row.run.by]}"
        cells = (row.name, started, row.id or "healthy", row.expected, said, *marks[:2], _seconds(row), marks[2])
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _seconds(row: Row) -> str:
    if row.before or (row.waited is not None and row.waited < 0):
        return "before"
    return "" if row.waited is None else f"{row.waited:.1f}"


def by_family(rows: Iterable[Row]) -> str:
    """One line a family, and one for the healthy runs, as Markdown. Seconds are those of hangs."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.family, []).append(row)
    lines = [
        "| family | runs | found | right culprit | false alarms | seconds to the verdict of a hang | skipped |",
        "| --- | ---: | ---: | ---: | ---: | --- | ---: |",
    ]
    return "\n".join([*lines, *(_line(name, group) for name, group in groups.items())])


def _line(name: str, rows: list[Row]) -> str:
    played = [row for row in rows if not row.skipped]
    faults = [row for row in played if row.id]
    found, culprits = (str(_count(faults, column)) if faults else "" for column in (0, 1))
    alarms = sum(row.marks[2] is False for row in played)
    waited = _waited(played)
    spent = f"{min(waited):.1f} to {max(waited):.1f}, median {statistics.median(waited):.1f}" if waited else ""
    cells = (name, len(played), found, culprits, alarms, spent, len(rows) - len(played))
    return f"| {' | '.join(map(str, cells))} |"


def _waited(rows: Iterable[Row]) -> list[float]:
    return [row.waited for row in rows if row.hangs and row.waited is not None and row.waited >= 0]


def _count(rows: Iterable[Row], column: int) -> int:
    return sum(bool(row.marks[column]) for row in rows)


def totals(rows: list[Row], seconds: float) -> str:
    """One line of sums."""
    played = [row for row in rows if not row.skipped]
    faults = [row for row in played if row.id]
    found, culprits = _count(faults, 0), _count(faults, 1)
    alarms = sum(row.marks[2] is False for row in played)
    share = f" ({culprits / len(faults):.0%})" if faults else ""
    waited = _waited(played)
    slowest = f"; the slowest verdict of a hang came after {max(waited):.1f} s" if waited else ""
    ids = len({row.id for row in faults})
    return (
        f"{len(faults)} faults of {ids} ids in real runs: {found} found, {culprits} with the right culprit"
        f"{share}{slowest}; {alarms} false alarms over the healthy variants of all of them and "
        f"{len(played) - len(faults)} healthy runs besides; {len(rows) - len(played)} skipped; {seconds:.0f} s"
    )


def passes(rows: list[Row]) -> bool:
    """Whether culprits are right often enough and every healthy run is left alone."""
    played = [row for row in rows if not row.skipped]
    faults = [row for row in played if row.id]
    return _count(faults, 1) >= ENOUGH * len(faults) and all(row.marks[2] is not False for row in played)


def play_alone(scenes: list[RunScene]) -> int:
    """Every fault and its twin without the callback; 1 where one does not do what is said of it."""
    wrong = 0
    for scene in scenes:
        try:
            complaints = as_described(scene)
        except CannotPlay as why:
            print(f"{scene.title}: skipped: {why}", flush=True)
            continue
        print(
            f"{scene.title}: {scene.does}{'' if not complaints else ', not so:'}", *complaints, sep="\n  ", flush=True
        )
        wrong += bool(complaints)
    return 1 if wrong else 0


def play(scenes: list[RunScene], healthy: list[str]) -> list[Row]:
    """One after another, with a line for each on stderr."""
    rows = []
    for number, (kind, name) in enumerate(
        [*((play_scene, one) for one in scenes), *((play_healthy, one) for one in healthy)]
    ):
        rows.append(kind(name))  # type: ignore[operator]
        _tell(number + 1, rows[-1])
    return rows


def _tell(number: int, row: Row) -> None:
    state = "skipped" if row.skipped else "ok" if not row.complaints else "WRONG"
    print(
        f"{number:3} {state:7} {row.id or 'healthy':8} {row.name}: {row.said} {_seconds(row)}",
        file=sys.stderr,
        flush=True,
    )
    for complaint in row.complaints:
        print(f"      {complaint}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Play what is asked for; print the tables and the sums."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="words of ids or names, separated by commas")
    parser.add_argument("--alone", action="store_true", help="without the callback")
    parser.add_argument("--write", action="store_true", help="write the tables into docs/evidence")
    options = parser.parse_args(arguments)
    words = [word.strip() for word in options.only.split(",") if word.strip()]
    scenes = [scene for scene in SCENES if not words or any(word in scene.title for word in words)]
    healthy = [name for name in HEALTHY if not words or any(word in f"healthy {name}" for word in words)]
    if options.alone:
        return play_alone(scenes)
    began = time.monotonic()
    rows = play(scenes, healthy)
    sums = totals(rows, time.monotonic() - began)
    print(table(rows), by_family(rows), sums, sep="\n\n")
    if options.write:
        write_between("run", f"{sums}.\n\n{by_family(rows)}\n\n{folded('Every run', table(rows))}")
    return 0 if passes(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
