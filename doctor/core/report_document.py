"""What a command that judges gives back: the report document, schema 1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from doctor.core.finding import Severity, Source, Status
from doctor.version import __version__

SCHEMA = 1

VerdictWord = Literal["pass", "fail", "inconclusive"]
FailOn = Literal["error", "warning", "never"]

Kind = Literal["ended", "running", "interrupted", "unknown"]
"""``ended``: in an orderly way. ``running``: steps still advance. ``interrupted``: from outside, by a user, a launcher
or a scheduler. ``unknown``: nothing shows how it ended."""


class Ignored(msgspec.Struct, frozen=True):
    """Why a finding does not count, and where that is written (``doctor.toml:12`` or ``command line``)."""

    reason: str
    by: str


class ReportFinding(msgspec.Struct, frozen=True):
    """A finding with everything that the runner stamps on it."""

    summary: str
    severity: Severity
    ignored: Ignored | None
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    evidence: Mapping[str, object]
    effect: str
    fix: str
    confidence: float
    explained_by: str | None = None
    source: Source | None = None

    @property
    def stands(self) -> bool:
        """Whether it counts."""
        return self.ignored is None


class CheckResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """How one check ended. ``seen`` and ``expected`` count ranks, or hosts where the scope is the host.

    ``crash``: how it broke after it had found something, so that ``status`` is sick; else not in the document.
    ``origin``: the distribution or file of a check that is not built in; else not in the document.
    """

    id: str
    name: str
    family: str
    status: Status
    severity: Severity
    seen: int
    expected: int
    reason: str | None
    seconds: float
    findings: tuple[ReportFinding, ...]
    crash: str | None = None
    origin: str | None = None


class ReportTool(msgspec.Struct, frozen=True):
    """Who wrote the document."""

    name: str = "rankdoctor"
    version: str = __version__


class HostRanks(msgspec.Struct, frozen=True):
    """A host and its ranks."""

    name: str
    ranks: tuple[int, ...]


class ReportJob(msgspec.Struct, frozen=True):
    """The job that was judged."""

    launcher: str
    world_size: int
    hosts: tuple[HostRanks, ...]
    absent: tuple[int, ...]


class CheckCoverage(msgspec.Struct, frozen=True):
    """How much could be judged: checks by status, and ranks."""

    checks: Mapping[str, int]
    ranks_seen: int
    ranks_expected: int


class ReportInput(msgspec.Struct, frozen=True):
    """A file that was given, what it turned out to be, and why it was passed over (``None``: it was read). ``notes``:
    parts of it that were not read; left out where there are none. ``decisive``: that it was passed over leaves the
    report inconclusive; left out where it does not."""

    path: str
    kind: str
    skipped: str | None = None
    notes: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    decisive: bool | msgspec.UnsetType = msgspec.UNSET


class QuotedLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of a log: where it stands (``line`` from 1), who wrote it as far as that is known, and its text."""

    file: str
    line: int
    text: str
    rank: int | None = None
    host: str | None = None


class LastStep(msgspec.Struct, frozen=True, omit_defaults=True):
    """The last step that a process reported: ``step`` in words (``epoch 0, batch 37/370``), ``at`` in seconds since the
    epoch."""

    step: str
    file: str
    line: int
    rank: int | None = None
    at: float | None = None


class RunOutcome(msgspec.Struct, frozen=True):
    """How a run ended. ``reason``: a clause for people. ``evidence``: the lines on which ``kind`` rests. ``lines`` were
    read, of which ``recognized`` are of a known kind. ``unexplained``: lines that look like errors and that no finding
    quotes, of each rank the first ones first; ``unexplained_lines``: how many there are. ``collect``: what would show
    more, a sentence each."""

    kind: Kind
    reason: str
    lines: int = 0
    recognized: int = 0
    evidence: tuple[QuotedLine, ...] = ()
    last_steps: tuple[LastStep, ...] = ()
    unexplained: tuple[QuotedLine, ...] = ()
    unexplained_lines: int = 0
    collect: tuple[str, ...] = ()

    @property
    def is_orderly(self) -> bool:
        """Whether it is evidence of health."""
        return self.kind in ("ended", "running")


class Report(msgspec.Struct, frozen=True, omit_defaults=True):
    """The report document. Times: ``started`` ISO 8601 in UTC, ``seconds`` of wall clock. ``run``: the id of the run
    that was watched, as in the records of its ranks; not in the document of a command. ``estimate``: what
    ``doctor estimate`` answers besides, :class:`doctor.estimate.data_model.Estimate` as a mapping; only in its
    document. ``outcome``: how the run ended, in the document of ``doctor diagnose`` where logs, records or dumps were
    read."""

    schema: int
    tool: ReportTool
    started: str
    seconds: float
    exit_code: int
    verdict: VerdictWord
    job: ReportJob | None
    coverage: CheckCoverage
    primary: str | None
    inputs: tuple[ReportInput, ...]
    results: tuple[CheckResult, ...]
    run: str | None = None
    estimate: Mapping[str, object] | None = None
    outcome: RunOutcome | None = None

    def result(self, check_id: str) -> CheckResult | None:
        """The result of the check with that id."""
        return next((result for result in self.results if result.id == check_id), None)


class RunReport(msgspec.Struct, frozen=True):
    """The report on one of several runs, and a word for the run."""

    name: str
    report: Report


class RunReports(msgspec.Struct, frozen=True):
    """The document of ``doctor diagnose`` where what was read comes from several runs. ``exit_code`` and ``verdict``:
    of the worst of them; findings of one run never explain those of another."""

    schema: int
    tool: ReportTool
    started: str
    seconds: float
    exit_code: int
    verdict: VerdictWord
    runs: tuple[RunReport, ...]
