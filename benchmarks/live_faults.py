"""Faults of jobs on several hosts, caused for real while every rank asks the doctor: found, rightly blamed, at rest.

    python benchmarks/live_faults.py            prints the table
    python benchmarks/live_faults.py NET ENV    only scenes whose title begins with one of these words
    python benchmarks/live_faults.py --write   writes it into docs/evidence

The hosts are network, process, name, mount and IPC namespaces of this machine on a switch of their own; the ranks are
started as launchers do it, meet in a shared folder or in torch's store, and probe one another. Detected: the id, its
severity, its words and every exit code are right. Right culprit: exactly the ranks and hosts at fault are blamed, and
no other alarm is raised but consequences. False alarms: healthy twins and healthy jobs about which anything is said at
severity error or warning. 1 where anything went wrong.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "checks"), str(ROOT / "benchmarks")]

from evidence_pages import folded, word_of, write_between  # noqa: E402 - the path comes first

from doctor.core.check import FAMILIES  # noqa: E402
from tests.faults.live.healthy_jobs import HEALTHY  # noqa: E402
from tests.faults.live.program import SCENES  # noqa: E402
from tests.faults.live.scenes import LiveScene, noise, score  # noqa: E402
from tests.faults.live.stage import perform  # noqa: E402
from tests.lab.needs import CannotPlay  # noqa: E402


class Row(NamedTuple):
    """What became of one scene or healthy job. ``ids``: of the faults in it, none where it is healthy. ``marks``:
    detected, right culprit, no false alarm; ``None`` where there is nothing to say. ``doctor``: seconds from the start
    of the ranks to the end of the last one."""

    name: str
    ids: tuple[str, ...]
    marks: tuple[bool | None, bool | None, bool | None]
    complaints: list[str]
    doctor: float | None = None
    skipped: str = ""


def play_scene(scene: LiveScene) -> Row:
    """The row of a scene."""
    ids = tuple(dict.fromkeys(check for _, check in scene.lines)) or (scene.id,)
    try:
        result = score(scene)
    except CannotPlay as why:
        return Row(scene.name, ids, (None, None, None), [], skipped=str(why))
    except AssertionError as wrong:  # a traceback on stderr, two reports
        return Row(scene.name, ids, (False, False, None), [str(wrong)])
    marks = (not result.found, not result.blamed, not result.silent)
    return Row(scene.name, ids, marks, result.complaints, perform(scene.faulty).seconds)


def play_healthy(name: str) -> Row:
    """The row of a healthy job."""
    try:
        outcome = perform(HEALTHY[name])
    except CannotPlay as why:
        return Row(name, (), (None, None, None), [], skipped=str(why))
    except AssertionError as wrong:
        return Row(name, (), (None, None, False), [str(wrong)])
    complaints = noise(HEALTHY[name], outcome)
    return Row(name, (), (None, None, not complaints), complaints, outcome.seconds)


def by_family(rows: Iterable[Row]) -> str:
    """One line a family, and one for the healthy jobs, as Markdown."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(FAMILIES[row.ids[0][:-3]] if row.ids else "healthy jobs", []).append(row)
    lines = [
        "| family | scenes | detected | right culprit | false alarms | seconds | skipped |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    return "\n".join([*lines, *(_line(name, group) for name, group in groups.items())])


def _line(name: str, rows: list[Row]) -> str:
    played = [row for row in rows if not row.skipped]
    faults = [row for row in played if row.ids]
    detected, culprits = (str(sum(bool(row.marks[column]) for row in faults)) if faults else "" for column in (0, 1))
    alarms = sum(row.marks[2] is False for row in played)
    seconds = [row.doctor for row in played if row.doctor is not None]
    spent = f"{min(seconds):.1f} to {max(seconds):.1f}" if seconds else ""
    cells = (name, len(played), detected, culprits, alarms, spent, len(rows) - len(played))
    return f"| {' | '.join(map(str, cells))} |"


def table(rows: Iterable[Row]) -> str:
    """Every row as Markdown."""
    lines = [
        "| scene | id | detected | right culprit | no false alarm | seconds |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        cells = [f"skipped: {row.skipped}", "", ""] if row.skipped else [word_of(mark) for mark in row.marks]
        seconds = "" if row.doctor is None else f"{row.doctor:.1f}"
        lines.append(f"| {row.name} | {', '.join(row.ids) or 'none: healthy'} | {' | '.join(cells)} | {seconds} |")
    return "\n".join(lines)


def totals(rows: list[Row], seconds: float) -> str:
    """One line of sums."""
    played = [row for row in rows if not row.skipped]
    faults = [row for row in played if row.ids]
    detected, culprits = (sum(bool(row.marks[column]) for row in faults) for column in (0, 1))
    alarms = sum(row.marks[2] is False for row in played)
    ids = {name for row in faults for name in row.ids}
    return (
        f"{len(faults)} live faults of {len(ids)} ids: {detected} detected, {culprits} with the right culprit; "
        f"{alarms} false alarms over the healthy variants of all of them and {len(played) - len(faults)} healthy jobs "
        f"besides; {len(rows) - len(played)} skipped; {seconds:.0f} s"
    )


def main(words: list[str], *, write: bool = False) -> int:
    """Play everything one after another, print the tables, the sums and what went wrong."""
    began = time.monotonic()
    chosen = [scene for scene in SCENES if not words or scene.title.startswith(tuple(words))]
    rows = [play_scene(scene) for scene in chosen]
    rows += [] if words else [play_healthy(name) for name in HEALTHY]
    sums = totals(rows, time.monotonic() - began)
    print(table(rows), by_family(rows), sums, sep="\n\n")
    if write:
        fold = folded("Every scene", table(rows))
        write_between("live", f"{sums}.\n\n{by_family(rows)}\n\n{fold}")
    for row in rows:
        for complaint in [row.skipped, *row.complaints] if row.skipped else row.complaints:
            print(f"{' '.join(row.ids)} {row.name}: {complaint}", file=sys.stderr)
    return 1 if any(row.complaints for row in rows) else 0


if __name__ == "__main__":
    arguments = sys.argv[1:]
    sys.exit(main([word for word in arguments if word != "--write"], write="--write" in arguments))
