"""First readings of hits of ``doctor lint`` in public repositories, and the scores on the bad scripts, as tables.

    python benchmarks/lint_readings.py                 prints the tables, and all readings of the newest set
    python benchmarks/lint_readings.py --half NAME     prints those of another set
    python benchmarks/lint_readings.py --write         writes the tables into docs/evidence

``lint_readings.json`` holds what somebody judged who opened the source around each hit, before a rule was changed
because of it: ``right``, ``arguable`` (true, and of little use there: tests, demonstrations, code that works by luck)
or ``wrong``, with a reason for the last two. A reading is of all hits, or of a sample drawn with a seed. Readers of the
later sets were asked more: a hit is arguable, too, if its severity is one too high, or if it depends on something that
the project does not show. Since the twelfth set a hit has both verdicts where they differ. Since the twentieth it has a
third one, by the examples of an earlier measurement by others: right where it is true of the code when it runs on
several ranks and its maintainer wants to know it, arguable in tests and where it costs nothing.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from evidence_pages import write_between
from lint_scripts import COUNTS, SETS, kept

from doctor.lint.engine.registry import builtin_rules

READINGS = Path(__file__).with_name("lint_readings.json")
VERDICTS = ("right", "arguable", "wrong")
EXCEPTIONS = VERDICTS[1:]


class ReadHit(NamedTuple):
    """A hit that was read: where it is, and what was judged of it. ``statement``: the verdict without regard to its
    severity and to what the project shows; ``by_examples``: that by the examples of others. Empty if it is the same."""

    repository: str
    file: str
    line: int
    rule: str
    severity: str
    verdict: str
    why: str
    statement: str = ""
    by_examples: str = ""


class Reading(NamedTuple):
    """The hits that were read in one half of the corpus. ``corrected``: what was changed afterwards."""

    half: str
    date: str
    commit: str
    extent: str
    corrected: str
    hits: tuple[ReadHit, ...]


def read_readings() -> list[Reading]:
    """The readings of :data:`READINGS`, oldest first."""
    return [
        Reading(**{**entry, "hits": tuple(ReadHit(*hit) for hit in entry["hits"])})
        for entry in json.loads(READINGS.read_text("utf-8"))
    ]


def shares(hits: Sequence[ReadHit]) -> tuple[str, ...]:
    """Number of hits, of each verdict, and the two shares of right ones: arguable left out, and counted as wrong."""
    counts = Counter(hit.verdict for hit in hits)
    right, decided = counts["right"], counts["right"] + counts["wrong"]
    return (
        str(len(hits)),
        *(str(counts[verdict]) for verdict in VERDICTS),
        f"{right / decided:.1%}" if decided else "",
        f"{right / len(hits):.1%}" if hits else "",
    )


def of_statements(hits: Sequence[ReadHit]) -> list[ReadHit]:
    """The hits with the verdicts of what they state, whatever their severity."""
    return [hit._replace(verdict=hit.statement or hit.verdict) for hit in hits]


def of_examples(hits: Sequence[ReadHit]) -> list[ReadHit]:
    """The hits with the verdicts by the examples of others."""
    return [hit._replace(verdict=hit.by_examples or hit.verdict) for hit in hits]


def reading_table(reading: Reading) -> str:
    """Markdown of one reading: shares by severity and by rule, and the reasons of what was not right."""
    errors = [hit for hit in reading.hits if hit.severity == "error"]
    others = [hit for hit in reading.hits if hit.severity != "error"]
    groups = [("all", list(reading.hits)), ("errors", errors), ("warnings and infos", others)]
    if any(hit.statement for hit in reading.hits):
        groups += [(f"{name}, the statement alone", of_statements(hits)) for name, hits in groups[:3]]
    if any(hit.by_examples for hit in reading.hits):
        groups += [(f"{name}, by the examples of others", of_examples(hits)) for name, hits in groups[:3]]
    groups += [
        (rule, [hit for hit in reading.hits if hit.rule == rule]) for rule in sorted({hit.rule for hit in reading.hits})
    ]
    rows = [f"| {name} | {' | '.join(shares(hits))} |" for name, hits in groups]
    reasons = [
        f"- {hit.verdict}: {hit.rule} ({hit.severity}), {hit.repository.replace('+', '/')} {hit.file}:{hit.line}: "
        f"{hit.why}"
        for hit in reading.hits
        if hit.verdict in EXCEPTIONS
    ]
    return "\n".join(
        [
            f"Half `{reading.half}`, read on {reading.date} at {reading.commit}: {reading.extent}. "
            f"Corrected afterwards: {reading.corrected}.",
            "",
            "| hits | read | right | arguable | wrong | right, arguable left out | right of all |",
            "| --- | --- | --- | --- | --- | --- | --- |",
            *rows,
            "",
            *reasons,
        ]
    )


def sets_table(readings: Sequence[Reading]) -> str:
    """Markdown: a row for each set, with the shares of all its hits, of what they state, and of its errors."""
    rows = []
    for reading in readings:
        hits = reading.hits
        stated = shares(of_statements(hits))[4:] if any(hit.statement for hit in hits) else ("", "")
        errors = shares([hit for hit in hits if hit.severity == "error"])
        cells = (reading.half, reading.date, *shares(hits), *stated, "/".join(errors[1:4]), errors[4])
        rows.append(f"| {' | '.join(cells)} |")
    head = (
        "| set | read on | hits | right | arguable | wrong | right, arguable left out | right of all "
        "| statement: arguable left out | statement: of all | errors: right/arguable/wrong | arguable left out |"
    )
    return "\n".join([head, "| --- " * 12 + "|", *rows])


def measured(readings: Sequence[Reading]) -> dict[str, list[ReadHit]]:
    """The hits of all readings, by rule."""
    found: dict[str, list[ReadHit]] = {}
    for hit in sorted(hit for reading in readings for hit in reading.hits):
        found.setdefault(hit.rule, []).append(hit)
    return dict(sorted(found.items()))


def rules_table(readings: Sequence[Reading]) -> str:
    """Markdown: the shares of each rule over all readings, and what of it is in preview."""
    states: dict[str, str] = {}
    for rule in builtin_rules():
        is_preview = rule.state == "preview"
        states[rule.id] = "all" if is_preview else "infos" if rule.preview_infos else states.get(rule.id, "")
    rows = [
        f"| {rule} | {' | '.join(shares(hits))} | {states.get(rule, '')} |" for rule, hits in measured(readings).items()
    ]
    return "\n".join(
        [
            "All readings, by rule:",
            "",
            "| rule | read | right | arguable | wrong | right, arguable left out | right of all | in preview |",
            "| --- | --- | --- | --- | --- | --- | --- | --- |",
            *rows,
        ]
    )


def _summed(entry: dict[str, Any]) -> list[str]:
    counts: Counter[str] = Counter()
    for group in entry["groups"].values():
        counts.update(group)
    return [str(counts[name]) for name in COUNTS]


def scripts_table() -> str:
    """Markdown: the first and the last kept score of each set of bad scripts."""
    rows = [
        f"| {name} | {which} | {entry['date']} | {entry['commit']} | {' | '.join(_summed(entry))} |"
        for name in SETS
        for which, entry in (("first", kept(name)[0]), ("last", kept(name)[-1]))
    ]
    head = f"| set | score | date | commit | {' | '.join(COUNTS)} |"
    return "\n".join([head, f"| --- | --- | --- | --- |{' --- |' * len(COUNTS)}", *rows])


def main() -> None:
    """Print the tables, or write them into the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    readings = {reading.half: reading for reading in read_readings()}
    parser.add_argument("--half", choices=readings)
    options = parser.parse_args()
    if options.half:
        print(reading_table(readings[options.half]))
        return
    newest = list(readings.values())[-1]
    tables = "\n\n".join([sets_table([*readings.values()]), reading_table(newest), rules_table([*readings.values()])])
    if options.write:
        write_between("lint-scripts", scripts_table())
        write_between("lint-readings", tables)
        return
    print(f"{scripts_table()}\n\n{tables}")


if __name__ == "__main__":
    main()
