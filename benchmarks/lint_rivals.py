"""``doctor lint`` beside TorchFix and torch-preflight, on the cases that prove our rules.

Each case is a file. A tool finds a bad case when it says something about one of the lines that are marked as bad. Most
of what the others say there is about something else (``weights_only``, ``num_workers``), so what is about the same
fault is counted apart. On a good case whatever they say about the lines at all is counted; it may be right, and
is about something else.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from doctor.api import FileFails, Rule, Script
from doctor.core.check_registry import RULE_FAMILY
from doctor.core.settings import Settings
from doctor.lint.engine.discovery import find_files
from doctor.lint.engine.file_check import FileChecker
from doctor.lint.engine.registry import builtin_rules
from doctor.lint.engine.releases import Releases
from doctor.lint.engine.request import lint_request
from doctor.lint.engine.rule import FileCase

HOME = Path(tempfile.gettempdir()) / "rankdoctor-rivals"
RIVALS = {"TorchFix": "torchfix", "torch-preflight": "torch-preflight"}
"""Name -> distribution and command."""
SAME = {
    "TG001": "losses_kept_with_graph",
    "TG012": "loader_not_distributed",
}
"""What the others say -> the rule of ours that means the same fault."""


class Remark(NamedTuple):
    """What a tool says about a line of a case."""

    case: str
    line: int
    code: str


class Written(NamedTuple):
    """A case as a file, in a folder of its own called ``name``."""

    name: str
    rule: Rule
    case: FileCase


def write_cases(folder: Path) -> list[Written]:
    """All cases of the rules over Python."""
    written = []
    for rule in builtin_rules():
        for number, case in enumerate(rule.cases() if rule.family == RULE_FAMILY and rule.reads is Script else ()):
            kind = "bad" if isinstance(case, FileFails) else "good"
            name = f"{rule.id}-{kind}-{number}"
            path = folder / name / case.name
            path.parent.mkdir(parents=True)
            path.write_text(case.text, encoding="utf-8")
            written.append(Written(name, rule, case))
    return written


def ours(folder: Path, written: list[Written]) -> list[Remark]:
    """What all our rules say, with the releases and the cores of each case."""
    asked = lint_request(Settings())
    remarks = []
    for one in written:
        releases = Releases({**asked.releases, **dict(one.case.releases)})
        judge = FileChecker(asked.book, releases=releases, processors=one.case.processors, known=asked.known)
        for target in find_files([folder / one.name]):
            found = judge.judge(target).found
            remarks += [Remark(one.name, hit.place.line, asked.book.rules[hit.rule].id) for hit in found]
    return remarks


def torchfix(folder: Path) -> list[Remark]:
    """With all of its rules."""
    done = subprocess.run(
        [HOME / "bin" / "torchfix", "--select", "ALL", "."], cwd=folder, capture_output=True, text=True, check=False
    )
    found = re.findall(r"^(\S+?):(\d+):\d+: (TOR\d+) ", done.stdout, re.MULTILINE)
    return [Remark(Path(path).parts[0], int(line), code) for path, line, code in found]


def preflight(folder: Path) -> list[Remark]:
    """As it comes."""
    done = subprocess.run(
        [HOME / "bin" / "torch-preflight", "check", "-f", "json", "."],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    said = json.loads(done.stdout)["diagnostics"]
    return [Remark(Path(one["path"]).parts[0], one["line"], one["code"]) for one in said]


TOOLS: dict[str, Callable[[Path], list[Remark]]] = {"TorchFix": torchfix, "torch-preflight": preflight}


def install() -> Iterator[str]:
    """Install the rivals in an environment of their own; yields the names of those that are there."""
    if not (HOME / "bin" / "pip").exists():
        venv.create(HOME, with_pip=True)
    for name, distribution in RIVALS.items():
        command = [str(HOME / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check", distribution]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        if done.returncode == 0:
            yield name
        else:
            print(f"{name} could not be installed: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)


def rivals_table() -> str:
    """Markdown: what each finds of the bad cases, and says of the good ones."""
    names = list(install())
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        written = write_cases(folder)
        said = {"doctor lint": ours(folder, written)} | {name: TOOLS[name](folder) for name in names}
    bad = [one for one in written if isinstance(one.case, FileFails)]
    good = [one for one in written if not isinstance(one.case, FileFails)]
    rows = [_row(name, remarks, bad, good) for name, remarks in said.items()]
    counts = len(bad), len(good)
    head = _HEAD.format(*counts)
    return "\n".join([head, "| --- | --- | --- | --- |", *rows])


_HEAD = "| | something on a bad line, of {} bad cases | about the same fault | something on a good case, of {} |"


def _row(name: str, remarks: list[Remark], bad: list[Written], good: list[Written]) -> str:
    by_case: dict[str, list[Remark]] = {}
    for remark in remarks:
        by_case.setdefault(remark.case, []).append(remark)
    on_line = sum(any(remark.line in _lines(one) for remark in by_case.get(one.name, ())) for one in bad)
    same = sum(
        any(remark.line in _lines(one) and _means(remark, one) for remark in by_case.get(one.name, ())) for one in bad
    )
    loud = sum(one.name in by_case for one in good)
    return f"| {name} | {on_line} | {same} | {loud} |"


def _lines(one: Written) -> tuple[int, ...]:
    return one.case.lines if isinstance(one.case, FileFails) else ()


def _means(remark: Remark, one: Written) -> bool:
    return one.rule.id == remark.code or SAME.get(remark.code) == one.rule.judge.__name__
