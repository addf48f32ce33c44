"""Hits of ``doctor lint`` in public repositories that train on several ranks.

``lint_corpus.json`` names the repositories by address and commit; none of their content is in this tree. Rules may be
tuned on the half ``tuned`` (the first hex digit of the SHA-256 of the address is even); the hits in the half ``held``
are read only to judge the rules. Entries with a ``part`` were gathered later, each part after rules had been corrected
by those before it, and read once (``lint_readings.json``); ``development`` was gathered to correct rules with.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

CORPUS = Path(__file__).with_name("lint_corpus.json")
DOCTOR = str(Path(sys.executable).parent / "doctor")
SEVERITIES = ("error", "warning", "info")
TIMEOUT = 600.0
"""Seconds for one repository."""
Part: TypeAlias = Literal[
    "fresh",
    "third",
    "fourth",
    "fifth",
    "sixth",
    "seventh",
    "eighth",
    "ninth",
    "tenth",
    "eleventh",
    "twelfth",
    "thirteenth",
    "fourteenth",
    "fifteenth",
    "sixteenth",
    "seventeenth",
    "eighteenth",
    "nineteenth",
    "twentieth",
    "twenty-first",
    "twenty-second",
    "twenty-third",
    "twenty-fourth",
    "twenty-fifth",
    "twenty-sixth",
    "development",
]
Half: TypeAlias = Literal["tuned", "held"] | Part
HALVES: tuple[Half, ...] = ("tuned", "held", *get_args(Part))


class Repository(NamedTuple):
    """A public repository at a commit. ``part``: which part it belongs to if it was gathered later."""

    address: str
    commit: str
    part: Part | Literal[""] = ""

    @property
    def folder(self) -> str:
        """The name of its checkout, ``OWNER+NAME``."""
        return "+".join(self.address.rsplit("/", 2)[1:])

    @property
    def half(self) -> Half:
        """The half that the SHA-256 of its address puts it into, or its part."""
        if self.part:
            return self.part
        return "held" if int(hashlib.sha256(self.address.encode()).hexdigest()[0], 16) % 2 else "tuned"


class Hit(NamedTuple):
    """A finding in a checkout: the file relative to it, and the text of the line."""

    repository: str
    file: str
    line: int
    rule: str
    severity: str
    code: str
    summary: str


class Outcome(NamedTuple):
    """What lint reports on one checkout."""

    repository: Repository
    hits: tuple[Hit, ...]
    files: int
    crashes: tuple[str, ...]
    seconds: float


def read_corpus() -> list[Repository]:
    """The repositories of :data:`CORPUS`."""
    return [Repository(**entry) for entry in json.loads(CORPUS.read_text("utf-8"))]


def fetch_lines(repository: Repository, sources: Path) -> str:
    """Shell commands that check a repository out below ``sources``."""
    folder = sources / repository.folder
    return (
        f"git init -q {folder} && git -C {folder} fetch -q --depth 1 {repository.address} {repository.commit} "
        f"&& git -C {folder} checkout -q FETCH_HEAD"
    )


def lint_checkout(repository: Repository, folder: Path) -> Outcome:
    """Run ``doctor lint`` over a checkout in a process of its own."""
    command = [DOCTOR, "lint", "--isolated", "--format", "json", str(folder)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=tempfile.gettempdir(), timeout=TIMEOUT
    )
    if done.returncode not in (0, 1, 3):
        return Outcome(repository, (), 0, (f"exit {done.returncode}: {done.stderr.strip()[-200:]}",), 0.0)
    report = json.loads(done.stdout)
    return Outcome(
        repository,
        tuple(sorted(_hits(report, repository, folder))),
        sum(one["skipped"] is None for one in report["inputs"]),
        tuple(f"{one['id']}: {one['reason']}" for one in report["results"] if one["status"] == "error"),
        report["seconds"],
    )


def _hits(report: dict[str, Any], repository: Repository, folder: Path) -> Iterator[Hit]:
    for result in report["results"]:
        for one in result["findings"]:
            path, line = Path(one["source"]["file"]), one["source"]["line"] or 0
            yield Hit(
                repository.folder,
                path.relative_to(folder).as_posix(),
                line,
                result["id"],
                one["severity"],
                str(one["evidence"].get("code", "")).strip(),
                one["summary"],
            )


def show_corpus(sources: Path, halves: Sequence[Half], *, hits: bool) -> None:
    """Print counts by rule and severity for each half, and commands that fetch absent repositories."""
    corpus = [one for one in read_corpus() if one.half in halves]
    absent = [one for one in corpus if not (sources / one.folder).is_dir()]
    for half in halves:
        outcomes = [
            lint_checkout(one, sources / one.folder) for one in corpus if one.half == half and one not in absent
        ]
        if hits:
            print("\n".join(_shown(hit, sources) for one in outcomes for hit in one.hits))
        print(counts_table(half, outcomes), end="\n\n")
        print("".join(f"{one.repository.folder}: {crash}\n" for one in outcomes for crash in one.crashes), end="")
    if absent:
        print(f"# {len(absent)} repositories are not in {sources}; fetch them with:")
        print("\n".join(fetch_lines(one, sources) for one in absent))


def _shown(hit: Hit, sources: Path) -> str:
    path = sources / hit.repository / hit.file
    excerpt = _excerpt(path, hit.line) if path.suffix != ".ipynb" else f"      {hit.code}"
    return f"{hit.repository}\t{hit.file}\t{hit.line}\t{hit.rule}\t{hit.severity}\n    {hit.summary}\n{excerpt}\n"


def _excerpt(path: Path, line: int, around: int = 6) -> str:
    lines = path.read_text("utf-8", errors="replace").splitlines()
    first, last = max(1, line - around), min(len(lines), line + around)
    return "\n".join(f"    {'>' if at == line else ' '}{at:5d} {lines[at - 1][:160]}" for at in range(first, last + 1))


def counts_table(half: str, outcomes: Sequence[Outcome]) -> str:
    """Markdown: hits of a half by rule and severity."""
    hits = [hit for one in outcomes for hit in one.hits]
    counts = Counter((hit.rule, hit.severity) for hit in hits)
    head = (
        f"{half}: {len(outcomes)} repositories, {sum(one.files for one in outcomes)} files, {len(hits)} hits in "
        f"{sum(bool(one.hits) for one in outcomes)} repositories, {sum(len(one.crashes) for one in outcomes)} crashes, "
        f"{sum(one.seconds for one in outcomes):.0f} s"
    )
    rows = [
        f"| {rule} | {' | '.join(_cells(counts[rule, severity] for severity in SEVERITIES))} |"
        for rule in sorted({hit.rule for hit in hits})
    ]
    totals = _cells(sum(hit.severity == severity for hit in hits) for severity in SEVERITIES)
    return "\n".join(
        [
            head,
            "",
            f"| rule | {' | '.join(SEVERITIES)} |",
            "| --- | --- | --- | --- |",
            *rows,
            f"| all | {' | '.join(totals)} |",
        ]
    )


def _cells(counts: Iterable[int]) -> list[str]:
    return [str(count) if count else "" for count in counts]
