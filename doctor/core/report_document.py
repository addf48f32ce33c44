"""The report document (schema 1), as the commands write it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from doctor.core.finding import Severity, Source, Status
from doctor.version import __version__

SCHEMA = 1

VerdictWord = Literal["pass", "fail", "inconclusive"]
FailOn = Literal["error", "warning", "never"]

Kind = Literal["ended", "running", "interrupted", "unknown"]
"""``ended``: in an orderly way. ``running``: steps still advance. ``interrupted``: from outside, by a user, a launcher
or a scheduler. ``unknown``: nothing shows how it ended."""


class Ignored(msgspec.Struct, frozen=True):
    """Why a finding is ignored, and where that is configured: ``doctor.toml:12`` or ``command line``."""

    reason: str
    by: str


class ReportFinding(msgspec.Struct, frozen=True):
    """A finding with the fields that the runner adds."""

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
        """Whether the finding counts, because it is not ignored."""
        return self.ignored is None


class CheckResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """The result of one check.

    ``seen`` and ``expected`` count ranks, or hosts if the scope is the host. ``crash``: the exception that the
    check raised after its findings, so that ``status`` is ``fail``; otherwise omitted. ``origin``: the distribution
    or file of a check that is not built in; otherwise omitted. ``hidden``: findings in preview that ``doctor lint``
    leaves out without ``--preview``, ``in_tests``: findings in tests that it leaves out without ``--tests``; omitted
    if there are none.
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
    hidden: int = 0
    in_tests: int = 0


class ReportTool(msgspec.Struct, frozen=True):
    """The program that wrote the document."""

    name: str = "rankdoctor"
    version: str = __version__


class HostRanks(msgspec.Struct, frozen=True):
    """A host and its ranks."""

    name: str
    ranks: tuple[int, ...]


class ReportJob(msgspec.Struct, frozen=True, omit_defaults=True):
    """The job that was checked. ``at_least``: no log states ``world_size``, and it follows from the largest rank."""

    launcher: str
    world_size: int
    hosts: tuple[HostRanks, ...]
    absent: tuple[int, ...]
    at_least: bool = False


MOST_CONTEXT = 16 << 30
"""Bytes; a CUDA context has 0.1 to 1.5 GiB."""


class DeviceContext(msgspec.Struct, frozen=True):
    """The largest CUDA context that was measured on GPUs called ``device``: ``bytes`` outside of torch's allocator."""

    device: str
    bytes: Annotated[int, Meta(ge=1, le=MOST_CONTEXT)]


class CheckCoverage(msgspec.Struct, frozen=True):
    """How much could be checked: checks by status, and ranks."""

    checks: Mapping[str, int]
    ranks_seen: int
    ranks_expected: int


class ReportInput(msgspec.Struct, frozen=True):
    """An input file, its kind, and why it was skipped.

    ``skipped`` is ``None`` if the file was read. ``notes``: parts of it that were not read; omitted if there are
    none. ``decisive``: skipping it makes the report inconclusive; omitted otherwise.
    """

    path: str
    kind: str
    skipped: str | None = None
    notes: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    decisive: bool | msgspec.UnsetType = msgspec.UNSET


class QuotedLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of a log: ``line`` counts from 1; ``rank`` and ``host`` name the writer if it is known."""

    file: str
    line: int
    text: str
    rank: int | None = None
    host: str | None = None


class LastStep(msgspec.Struct, frozen=True, omit_defaults=True):
    """The last step that a process reported, such as ``epoch 0, batch 37/370``; ``at``: seconds since the epoch."""

    step: str
    file: str
    line: int
    rank: int | None = None
    at: float | None = None


class RunOutcome(msgspec.Struct, frozen=True):
    """How a run ended.

    ``reason``: a clause for people. ``evidence``: the lines that show ``kind``. ``lines`` were read, of which
    ``recognized`` are of a known kind. ``unexplained``: lines that look like errors and that no finding quotes, the
    first ones of each rank first; ``unexplained_lines`` counts all of them. ``collect``: sentences that say what
    would show more.
    """

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
        """Whether the outcome is evidence of a healthy run."""
        return self.kind in ("ended", "running")


class CandidateCause(msgspec.Struct, frozen=True, omit_defaults=True):
    """A cause that the evidence leaves open.

    ``id``: of the check whose page describes it; ``cause``: its name. ``confidence``: from 0 to 1; those of all
    candidates sum to less than 1. ``supports`` and ``against``: observations. ``next_command`` tells this cause from
    the others, and ``confirmed_by`` is the result that speaks for it.
    """

    id: str
    cause: str
    title: str
    confidence: float
    supports: tuple[str, ...] = ()
    against: tuple[str, ...] = ()
    next_command: str = ""
    confirmed_by: str = ""


class StackGroup(msgspec.Struct, frozen=True, omit_defaults=True):
    """Ranks that are at the same place.

    ``state``: ``waiting`` (in a collective), ``standing`` (without progress, outside of collectives), ``busy`` (it
    works at one place), ``moving``, ``seen`` (its stack was read only once, outside of collectives), ``stopped``,
    ``locked`` (native code holds the interpreter's lock), ``unreadable``, ``ended``. ``place``: ``all_reduce at
    train.py:41 (train)``, empty if no line is known. ``condition``: of the line, as in
    :class:`doctor.core.facts.Frame`. ``seconds``: for which all of them have been there at least. ``gpus``: what their
    GPUs did, in words.
    """

    ranks: tuple[int, ...]
    state: str
    place: str = ""
    condition: str = ""
    seconds: float | None = None
    gpus: str = ""


class CallNode(msgspec.Struct, frozen=True, omit_defaults=True):
    """A frame of the merged stacks with the ``ranks`` that are in it; ``calls``: the frames inside of it, those of most
    ranks first. ``skipped``: library frames between it and the frame around it that are left out."""

    place: str
    ranks: tuple[int, ...]
    user: bool = False
    skipped: int = 0
    calls: tuple[CallNode, ...] = ()


class RankStacks(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where the ranks of a job are: groups of them, the largest first, and the tree of their calls, outermost first.

    ``job``: what the job is, in a line; ``notes``: sentences about what was not read, and why. ``steps_per_second`` of
    a job that makes progress, where it can be seen, and ``steps_from``: ``locals`` or ``callback``.
    """

    job: str = ""
    steps_per_second: float | None = None
    steps_from: str = ""
    groups: tuple[StackGroup, ...] = ()
    calls: tuple[CallNode, ...] = ()
    notes: tuple[str, ...] = ()


LossCause = Literal["data", "stragglers", "checkpoints", "evaluation", "communication", "idle"]
"""``data``: waiting for a training batch. ``stragglers``: waiting for a slower rank. ``checkpoints``: writing them, and
waiting for a rank that does. ``evaluation``: waiting for ranks that evaluate while others do not. ``communication``:
collectives of the backward pass, without the wait for other ranks. ``idle``: without progress in a stall, or no longer
in the run while other ranks are."""


class LostByCause(msgspec.Struct, frozen=True):
    """Lost rank-seconds of one cause, and their share of all rank-seconds; ``None`` if they could not be measured."""

    cause: LossCause
    seconds: float | None
    share: float | None


class LargestLoss(msgspec.Struct, frozen=True, omit_defaults=True):
    """One of the largest losses. ``ranks`` caused it; ``summary``: a clause; ``help``: a sentence that says what would
    help; ``check``: the id of the check whose page describes it."""

    cause: LossCause
    seconds: float
    share: float
    ranks: tuple[int, ...]
    summary: str
    help: str
    check: str = ""


class LostByRank(msgspec.Struct, frozen=True):
    """Seconds of one rank: in its ``own`` work, lost by cause (causes without a loss are omitted), and not measured."""

    rank: int
    own: float
    lost: Mapping[LossCause, float]
    unmeasured: float


class LostTime(msgspec.Struct, frozen=True):
    """Rank-seconds of a run in which ranks waited or were idle.

    ``rank_seconds``: ``ranks`` times ``seconds``, the time since the first training batch of the rank that took part
    longest. ``own``, ``lost`` and ``unmeasured`` add up to it, in all and by rank. ``efficiency``: the share of
    ``own``, the scaling efficiency; ``at_most``: it may be less, because of ``notes``. ``basis`` says how it is
    computed. ``gpu_busy``: mean share of time for which the GPUs were busy according to NVML, ``None`` if it reports
    none. ``by_rank``: ranks that lost most first, at most 1024.
    """

    ranks: int
    seconds: float
    rank_seconds: float
    own: float
    lost: float
    unmeasured: float
    efficiency: float
    at_most: bool
    basis: str
    causes: tuple[LostByCause, ...]
    largest: tuple[LargestLoss, ...]
    by_rank: tuple[LostByRank, ...]
    gpu_busy: float | None
    notes: tuple[str, ...]


class Report(msgspec.Struct, frozen=True, omit_defaults=True):
    """The report document.

    ``started``: ISO 8601 in UTC. ``seconds``: wall-clock time. ``run``: the id of a monitored run, as in the
    records of its ranks. ``estimate``: the answer of ``doctor estimate``,
    :class:`doctor.estimate.data_model.Estimate` as a mapping. ``outcome``: how the run ended, if ``doctor
    diagnose`` read logs, records or dumps. ``stacks``: where the ranks are, from ``doctor attach``. ``candidates``:
    the likeliest causes, if logs do not carry one verdict. ``contexts``: measured by the full probes on GPUs.
    ``lost_time``: of a watched run that has trained. Fields that do not apply are omitted.
    """

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
    stacks: RankStacks | None = None
    candidates: tuple[CandidateCause, ...] = ()
    contexts: tuple[DeviceContext, ...] = ()
    lost_time: LostTime | None = None

    def result(self, check_id: str) -> CheckResult | None:
        """The result of the check with this id, or ``None``."""
        return next((result for result in self.results if result.id == check_id), None)

    def _repr_html_(self) -> str:
        """Return the report as notebooks show it: the HTML page, in a frame that cannot reach the notebook."""
        from html import escape
        from importlib import import_module

        # By name: the rooms that draw reports import this one.
        page = escape(import_module("doctor.report.html.document").render_html(self), quote=True)
        frame = (
            '<iframe title="rankdoctor report" sandbox="allow-scripts" style="width: 100%; height: 40rem; border: 0"'
        )
        return f'{frame} srcdoc="{page}"></iframe>'


class RunReport(msgspec.Struct, frozen=True):
    """The report on one of several runs, and the name of the run."""

    name: str
    report: Report


class RunReports(msgspec.Struct, frozen=True):
    """The document of ``doctor diagnose`` for inputs from several runs, with the verdict of the worst run. Findings of
    one run never explain those of another."""

    schema: int
    tool: ReportTool
    started: str
    seconds: float
    exit_code: int
    verdict: VerdictWord
    runs: tuple[RunReport, ...]
