"""Faults that are caused for real on this machine, through the real command: found, rightly blamed, twin left alone.

    python benchmarks/real_faults.py            prints the table
    python benchmarks/real_faults.py NET ENV    only scenes whose title begins with one of these words
    python benchmarks/real_faults.py --write   writes it into docs/evidence

A scene causes one fault in processes, namespaces, limits, files, sockets, launchers or a driver of the lab; its twin is
the same without the fault. Found: the id, with the severity, the words and the exit code that belong to it. Blamed
rightly: exactly the ranks and hosts at fault, and no other alarm that is not true there. Twin silent: no finding of
severity error or warning, by any check. The machines at the end have no fault at all. 1 where anything went wrong.
"""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "checks"), str(ROOT / "benchmarks")]

from evidence_pages import folded, word_of, write_between  # noqa: E402 - the path comes first

from tests.faults.healthy_machines import MACHINES  # noqa: E402 - the path comes first
from tests.faults.program import SCENES  # noqa: E402
from tests.faults.scenes import Scene, loud, score  # noqa: E402
from tests.faults.stage import perform  # noqa: E402
from tests.lab.needs import CannotPlay  # noqa: E402


class Row(NamedTuple):
    """What became of one scene or machine. ``marks``: found, blamed, silent; ``None`` where there is nothing to say."""

    name: str
    id: str
    marks: tuple[bool | None, bool | None, bool | None]
    complaints: list[str]
    skipped: str = ""


def play_scene(scene: Scene) -> Row:
    """The row of a scene."""
    try:
        result = score(scene)
    except CannotPlay as why:
        return Row(scene.name, scene.id, (None, None, None), [], str(why))
    marks = (not result.found, not result.blamed, not result.silent)
    return Row(scene.name, scene.id, marks, result.complaints)


def play_machine(name: str) -> Row:
    """The row of a healthy machine."""
    try:
        complaints = loud(MACHINES[name], perform(MACHINES[name]))
    except CannotPlay as why:
        return Row(name, "", (None, None, None), [], str(why))
    return Row(name, "", (None, None, not complaints), complaints)


def table(rows: list[Row]) -> str:
    """The rows as Markdown."""
    lines = [
        "| scene | id | found | correct culprit | healthy variant without finding |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        cells = ["skipped" if row.skipped else word_of(mark) for mark in row.marks]
        lines.append(f"| {row.name} | {row.id or 'none: healthy'} | {' | '.join(cells)} |")
    return "\n".join(lines)


def totals(rows: list[Row]) -> str:
    """One line of sums."""
    played = [row for row in rows if not row.skipped]
    scenes = [row for row in played if row.id]
    sums = [sum(bool(row.marks[column]) for row in scenes) for column in range(3)]
    machines = [row for row in played if not row.id]
    ids = len({row.id for row in scenes if row.marks[0]})
    return (
        f"{len(scenes)} faults of {ids} ids: {sums[0]} found, {sums[1]} with the correct culprit, {sums[2]} healthy "
        f"variants without finding; {sum(bool(row.marks[2]) for row in machines)} of {len(machines)} healthy machines "
        f"without finding; {len(rows) - len(played)} skipped"
    )


def main(words: list[str], *, write: bool = False) -> int:
    """Play everything, print the table, the sums and what went wrong."""
    chosen = [scene for scene in SCENES if not words or scene.title.startswith(tuple(words))]
    with ThreadPoolExecutor(max(2, len(os.sched_getaffinity(0)))) as pool:
        rows = list(pool.map(play_scene, chosen))
        rows += [] if words else list(pool.map(play_machine, MACHINES))
    print(table(rows), totals(rows), sep="\n\n")
    if write:
        fold = folded("Every scene", table(rows))
        write_between("real", f"{totals(rows)}.\n\n{fold}")
    for row in rows:
        for complaint in [row.skipped, *row.complaints] if row.skipped else row.complaints:
            print(f"{row.id} {row.name}: {complaint}", file=sys.stderr)
    return 1 if any(row.complaints for row in rows) else 0


if __name__ == "__main__":
    arguments = sys.argv[1:]
    sys.exit(main([word for word in arguments if word != "--write"], write="--write" in arguments))
