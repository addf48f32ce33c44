"""How many of the failure messages of other software are recognized, by component.

    python benchmarks/coverage.py                  the table; with --write also into docs/evidence
    python benchmarks/coverage.py --part           the table of one component, in seconds
    python benchmarks/coverage.py --missed NAME    messages of a component that are not recognized, and why
    python benchmarks/coverage.py --sample 200     a random sample with classes, to be classified again independently
    python benchmarks/coverage.py --healthy [DIR…] wrong matches in the healthy public texts, and in healthy logs of DIR

A message counts as recognized if its line, with values filled in as the component writes it, yields an event of the
class of the message: the check it is evidence for, or its role. An event of another pattern counts if that pattern
feeds the same check, or if it has the role. Messages that end no job (``harmless``) and messages without a class are
listed apart: the first do not count, the second count as missed.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "checks"), str(ROOT / "benchmarks")]

from evidence_pages import add_part, write_between  # noqa: E402

from doctor.analysis.logs.root_event import CRASH, ENDS, EXCEPTION, LOST_PEERS, ROOTS, TIMED_OUT  # noqa: E402 - the path comes first
from doctor.knowledge.log_patterns import known_patterns  # noqa: E402
from doctor.knowledge.software_messages import (  # noqa: E402
    CAUSE,
    CONSEQUENCE,
    HARMLESS,
    UNCLASSIFIED,
    SoftwareComponent,
    components,
)
from doctor.postmortem.logs.scanner import read_lines  # noqa: E402

MESSAGES = ROOT / "doctor" / "knowledge" / "messages"
WORDS = ("eth0", "gpu-node-3", "10.1.2.3<45021>", "Connection refused", "mlx5_0", "train.py", "ncclSystemError")
GOALS = {
    "NCCL": 0.95,
    "torch.distributed": 0.95,
    "torch.distributed.elastic": 0.95,
    "SLURM": 0.95,
    "Open MPI": 0.95,
}
USUAL_GOAL = 0.8
PART = "torch.distributed.elastic"
"""The component of ``--part``."""


class Outcome(NamedTuple):
    """What became of one message. ``found``: the kinds and classes of the events of its line."""

    text: str
    about: str
    is_recognized: bool
    found: tuple[str, ...]


def outcomes(component: SoftwareComponent) -> Iterator[Outcome]:
    """Yield the outcome of every failure message of a component."""
    chance = random.Random(component.file)
    by_class = json.loads((MESSAGES / f"{component.file}.json").read_text())
    feeds = checks_by_kind()
    for about, texts in by_class.items():
        for text in texts if about != HARMLESS else ():
            events, _ = read_lines([filled(component.line, text, chance)], "job.log")
            found = {name for event in events for name in classes_of(event.kind, event.value("about"), feeds)}
            yield Outcome(text, about, about != UNCLASSIFIED and about in found, tuple(sorted(found)))


def filled(line: str, text: str, chance: random.Random) -> str:
    """The line of a message, with values."""
    values = {"%s": lambda: chance.choice(WORDS), "%d": lambda: str(chance.randrange(2, 5000))}
    values |= {"%x": lambda: f"{chance.randrange(1 << 20):x}", "%f": lambda: f"{chance.random():.2f}"}
    message = re.sub(r"(?<!%)%[sdxf]", lambda one: values[one[0]](), text).replace("%%", "%")
    return line.replace("{message}", message).replace("{place}", "file.cc:123")


def classes_of(kind: str, about: str | None, feeds: dict[str, set[str]]) -> set[str]:
    """The checks that an event is evidence for, and its role."""
    if about is not None and kind.startswith("software."):
        return {about}
    roles = set()
    if kind in (*LOST_PEERS, *TIMED_OUT, *ENDS):
        roles.add(CONSEQUENCE)
    if kind in ROOTS and kind not in (EXCEPTION, CRASH):
        roles.add(CAUSE)
    found = feeds.get(kind, set())
    return found | roles | ({CAUSE} if found - {"RUN012"} else set())


def checks_by_kind() -> dict[str, set[str]]:
    """The ids of the checks that read events of a kind."""
    sources = {path: path.read_text() for path in (ROOT / "checks" / "doctor_checks").rglob("*.py")}
    ids = {path: re.findall(r'\bid="([A-Z]+\d{3})"', text) for path, text in sources.items()}
    found: dict[str, set[str]] = {}
    for pattern in known_patterns():
        checks = found.setdefault(pattern.kind, set())
        checks |= {pattern.check} - {""}
        for path, text in sources.items():
            if f'"{pattern.kind}"' in text:
                checks.update(ids[path])
    return found


def table(*, part: bool = False) -> tuple[str, bool]:
    """The coverage by component, and whether all reach their goal; ``part``: of :data:`PART` alone."""
    rows = [
        "| component | releases | failure messages | recognized | share | goal | unclassified | harmless |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    by_name: dict[str, list[SoftwareComponent]] = {}
    for component in components():
        if part and component.name != PART:
            continue
        by_name.setdefault(component.name, []).append(component)
    is_reached = True
    for name, parts in by_name.items():
        every = [one for part in parts for one in outcomes(part)]
        harmless = sum(len(json.loads((MESSAGES / f"{one.file}.json").read_text()).get(HARMLESS, ())) for one in parts)
        recognized = sum(one.is_recognized for one in every)
        share, goal = recognized / max(len(every), 1), GOALS.get(name, USUAL_GOAL)
        open_ones = sum(one.about == UNCLASSIFIED for one in every)
        is_reached = is_reached and share >= goal
        releases = " to ".join(dict.fromkeys(parts[0].releases))
        counts = f"{len(every):,} | {recognized:,} | {share:.1%} | {goal:.0%} | {open_ones} | {harmless}"
        rows.append(f"| {name} | {releases} | {counts} |")
    return "\n".join(rows), is_reached


def missed(name: str) -> None:
    """Print the messages of a component that are not recognized, by what was found instead."""
    for component in components():
        if component.file == name:
            for one in outcomes(component):
                if not one.is_recognized:
                    print(f"{one.about}\t{','.join(one.found) or '-'}\t{one.text}")


def sample(count: int) -> None:
    """Print a random sample of messages: component, class and text."""
    chance = random.Random(count)
    every = [
        (component.name, about, text)
        for component in components()
        for about, texts in json.loads((MESSAGES / f"{component.file}.json").read_text()).items()
        for text in texts
        if about != UNCLASSIFIED
    ]
    for row in chance.sample(every, min(count, len(every))):
        print("\t".join(row))


def healthy(folders: list[Path]) -> int:
    """Print what is recognized as a failure in healthy logs; return how many lines."""
    logs = {path.name: path.read_text(errors="replace").splitlines() for one in folders for path in _files(one)}
    for path in (ROOT / "benchmarks" / "failure_texts" / f"{half}.json" for half in ("rules", "held")):
        logs.update((one["address"], one["lines"]) for one in json.loads(path.read_text()) if one.get("healthy"))
    wrong = Counter[str]()
    for name, lines in logs.items():
        events, _ = read_lines(lines, name)
        wrong.update(f"{name}: {one.text}" for one in events if one.kind in ("software.check", "software.cause"))
    for text, times in wrong.items():
        print(times, text)
    print(f"{sum(wrong.values())} wrong matches in {sum(map(len, logs.values()))} lines of {len(logs)} healthy logs")
    return sum(wrong.values())


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    add_part(parser, PART)
    parser.add_argument("--missed")
    parser.add_argument("--sample", type=int)
    parser.add_argument("--healthy", action="store_true")
    parser.add_argument("folders", nargs="*", type=Path)
    options = parser.parse_args()
    if options.missed:
        missed(options.missed)
    elif options.sample:
        sample(options.sample)
    elif options.healthy:
        return int(healthy(options.folders) > 0)
    else:
        text, is_reached = table(part=options.part)
        print(text)
        if options.write and not options.part:
            write_between("coverage", text)
        return int(not is_reached)
    return 0


if __name__ == "__main__":
    sys.exit(main())
