"""Faults that only full probes find, caused for real again and again: how often they are found, and rightly blamed.

    python benchmarks/full_probes.py                 20 times each, with a healthy run after every round
    python benchmarks/full_probes.py --times 3       fewer
    python benchmarks/full_probes.py --part          a wrong sum, once, on two hosts
    python benchmarks/full_probes.py NET014 GPU      only scenes whose title begins with one of these words
    python benchmarks/full_probes.py --write        writes the table into docs/evidence

One rank on each of eight hosts of the lab (see ``live_faults.py``), which share the processors of this machine, asks
``doctor check --probe full``. Found: the id and its severity. Right culprit: exactly the ranks and hosts at fault are
blamed and listed for exclusion. Others: runs in which anything was raised besides that is neither true there nor a
consequence. Seconds: from the start of the ranks to the end of the last one; runs of over 30 are counted, with the part
of the processor time that the hypervisor gave to somebody else meanwhile. Healthy runs take the twins of the faults in
turn: the same offloads, switches and processors, and nothing wrong; a false alarm is anything at severity error or
warning. 1 where fewer than 19 of 20 culprits are right, anything else is raised, or eight hosts take over 30 seconds
while less than a tenth of the processor time was taken.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "checks"), str(ROOT / "benchmarks")]

from evidence_pages import add_part, write_between  # noqa: E402 - the path comes first

from tests.faults.live.full_scenes import SCENES, SUM_HOSTS, scenes, twins_of  # noqa: E402
from tests.faults.live.scenes import LiveScene, judged, noise  # noqa: E402
from tests.faults.live.stage import Outcome, Play, perform_anew  # noqa: E402
from tests.lab.needs import CannotPlay  # noqa: E402

TIMES = 20
LEAST_RIGHT = 0.95
MOST_SECONDS = 30.0
MUCH_TAKEN = 0.1
"""The share of the processor time that goes to others on the same machine, from which seconds tell of these."""


@dataclass
class Row:
    """What became of the repetitions of one fault, or of all healthy runs: how many were ``found`` and had the right
    culprit, in how many ``others`` were raised; ``ids``: none where all is well; ``taken``: of the processor time in
    each, by the hypervisor."""

    name: str
    ids: str = ""
    found: int = 0
    culprit: int = 0
    others: int = 0
    seconds: list[float] = field(default_factory=list)
    taken: list[float] = field(default_factory=list)
    skipped: str = ""

    @property
    def times(self) -> int:
        """How often it was played."""
        return len(self.seconds)

    @property
    def is_good(self) -> bool:
        """Whether that is good enough."""
        right = not self.ids or min(self.found, self.culprit) >= LEAST_RIGHT * self.times
        return right and not self.others and all(taken >= MUCH_TAKEN for taken in self.late)

    @property
    def late(self) -> list[float]:
        """Of the repetitions that took too long what the hypervisor took."""
        return [taken for spent, taken in zip(self.seconds, self.taken, strict=True) if spent > MOST_SECONDS]

    def line(self) -> str:
        """Of the table."""
        if self.skipped:
            return f"| {self.name} | {self.ids} | skipped: {self.skipped} | | | | | |"
        marks = (self.found, self.culprit) if self.ids else ("", "")
        spent = f"{min(self.seconds):.1f} to {max(self.seconds):.1f}" if self.seconds else ""
        late = f"{len(self.late)} ({', '.join(f'{taken:.0%}' for taken in self.late)} taken)" if self.late else "0"
        return f"| {' | '.join(map(str, (self.name, self.ids, self.times, *marks, self.others, spent, late)))} |"


def play_faulty(scene: LiveScene, row: Row) -> Iterator[str]:
    """One repetition; yields what went wrong."""
    outcome = yield from _played(scene.faulty, row)
    if outcome is not None:
        wrong = judged(scene, outcome)
        row.found += not wrong.found
        row.culprit += not (wrong.found or wrong.culprit)
        row.others += bool(wrong.others)
        yield from itertools.chain(*wrong)
        if wrong.culprit:
            yield from _said_of(scene.id, outcome)


def _said_of(check: str, outcome: Outcome) -> Iterator[str]:
    report = outcome.report
    for finding in report.findings(check) if report else ():
        yield f"said: {finding['severity']}: {finding['summary']}: {finding['evidence']}"


def play_healthy(twin: Play, row: Row) -> Iterator[str]:
    """One healthy run; yields what is alarming about it."""
    outcome = yield from _played(twin, row)
    if outcome is not None:
        wrong = noise(twin, outcome)
        row.others += bool(wrong)
        yield from wrong


def _played(play: Play, row: Row) -> Generator[str, None, Outcome | None]:
    before = psutil.cpu_times()
    try:
        outcome = perform_anew(play)
    except CannotPlay as why:
        row.skipped = str(why)
        return None
    except AssertionError as wrong:  # a traceback on stderr
        row.seconds.append(play.seconds)
        row.taken.append(_taken(before))
        row.others += not row.ids
        yield str(wrong)
        return None
    row.seconds.append(outcome.seconds)
    row.taken.append(_taken(before))
    return outcome


def _taken(before: NamedTuple) -> float:
    """The share of the processor time since ``before`` that the hypervisor gave to somebody else."""
    spent: list[float] = [now - then for now, then in zip(psutil.cpu_times(), before, strict=True)]
    return spent[before._fields.index("steal")] / sum(spent)


def play_all(chosen: Sequence[LiveScene], times: int) -> list[Row]:
    """A row for each of the ``chosen`` scenes, and one for healthy runs; what goes wrong is printed as it happens."""
    rows = [Row(scene.name, scene.id) for scene in chosen]
    healthy = Row("nothing: healthy")
    twins = itertools.cycle(twins_of(chosen))
    for number in range(1, times + 1):
        for scene, row in zip(chosen, rows, strict=True):
            if not row.skipped:
                _tell(number, row, play_faulty(scene, row))
        _tell(number, healthy, play_healthy(next(twins), healthy))
    return [*rows, healthy]


def _tell(number: int, row: Row, complaints: Iterable[str]) -> None:
    wrong = list(complaints)
    spent = f"{row.seconds[-1]:.1f} s ({row.taken[-1]:.0%} taken)" if row.seconds else row.skipped
    print(f"{number}: {row.name}: {spent}{'' if wrong else ', as it should be'}", file=sys.stderr, flush=True)
    for words in wrong:
        print(f"    {words}", file=sys.stderr, flush=True)


def table(rows: Iterable[Row]) -> str:
    """Every row as Markdown."""
    lines = [
        "| fault | id | runs | found | right culprit | runs with other alarms | seconds | over 30 s |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    return "\n".join([*lines, *(row.line() for row in rows)])


def main(arguments: Sequence[str] | None = None) -> int:
    """Play, print the table and the sums."""
    parser = argparse.ArgumentParser(description="Faults that only full probes find.")
    parser.add_argument("words", nargs="*", help="beginnings of titles")
    parser.add_argument("--times", type=int, default=TIMES)
    parser.add_argument("--write", action="store_true")
    add_part(parser, "a wrong sum, once, on two hosts")
    given = parser.parse_args(arguments)
    began = time.monotonic()
    chosen = [scene for scene in SCENES if not given.words or scene.title.startswith(tuple(given.words))]
    chosen, times = ([scenes(SUM_HOSTS)["wrong sum"]], 1) if given.part else (chosen, given.times)
    rows = play_all(chosen, times)
    where = f"{len(os.sched_getaffinity(0))} processors for all hosts, {time.monotonic() - began:.0f} s in all."
    print(table(rows), where, sep="\n\n")
    if given.write and not given.part:
        write_between("full", f"{table(rows)}\n\n{where}")
    return 0 if all(row.is_good for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
