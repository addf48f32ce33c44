"""What a command that judges gives back: the report document, schema 1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from doctor.finding import Severity, Source, Status
from doctor.reasoning.outcome import Outcome
from doctor.version import __version__

SCHEMA = 1

VerdictWord = Literal["ok", "sick", "inconclusive"]


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


class Tool(msgspec.Struct, frozen=True):
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


class Coverage(msgspec.Struct, frozen=True):
    """How much could be judged: checks by status, and ranks."""

    checks: Mapping[str, int]
    ranks_seen: int
    ranks_expected: int


class Input(msgspec.Struct, frozen=True):
    """A file that was given, what it turned out to be, and why it was passed over (``None``: it was read). ``notes``:
    parts of it that were not read; left out where there are none. ``decisive``: that it was passed over leaves the
    report inconclusive; left out where it does not."""

    path: str
    kind: str
    skipped: str | None = None
    notes: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    decisive: bool | msgspec.UnsetType = msgspec.UNSET


class Report(msgspec.Struct, frozen=True, omit_defaults=True):
    """The report document. Times: ``started`` ISO 8601 in UTC, ``seconds`` of wall clock. ``run``: the id of the run
    that was watched, as in the records of its ranks; not in the document of a command. ``estimate``: what
    ``doctor estimate`` answers besides, :class:`doctor.estimate.plan.Estimate` as a mapping; only in its document.
    ``outcome``: how the run ended, in the document of ``doctor diagnose`` where logs, records or dumps were read."""

    schema: int
    tool: Tool
    started: str
    seconds: float
    exit_code: int
    verdict: VerdictWord
    job: ReportJob | None
    coverage: Coverage
    primary: str | None
    inputs: tuple[Input, ...]
    results: tuple[CheckResult, ...]
    run: str | None = None
    estimate: Mapping[str, object] | None = None
    outcome: Outcome | None = None

    def result(self, check_id: str) -> CheckResult | None:
        """The result of the check with that id."""
        return next((result for result in self.results if result.id == check_id), None)


class RunReport(msgspec.Struct, frozen=True):
    """The report on one of several runs, and a word for the run."""

    name: str
    report: Report


class SeveralReports(msgspec.Struct, frozen=True):
    """The document of ``doctor diagnose`` where what was read comes from several runs. ``exit_code`` and ``verdict``:
    of the worst of them; findings of one run never explain those of another."""

    schema: int
    tool: Tool
    started: str
    seconds: float
    exit_code: int
    verdict: VerdictWord
    runs: tuple[RunReport, ...]
