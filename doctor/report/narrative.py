"""Orders the findings of a report: the primary one, its consequences, other findings; and words the headline."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import NamedTuple

import msgspec

from doctor.core.finding import Severity
from doctor.core.job import Job
from doctor.core.report_document import CandidateCause, CheckResult, Report, ReportFinding
from doctor.core.text import lazy_compile, ranges, ranks_in_words
from doctor.report.formatting import (
    INLINE_CODE,
    UNEXPLAINED,
    coverage_in_words,
    fix_parts,
    named_hosts,
    place,
    unclear_outcome,
    why_inconclusive,
)

_RANKS = lazy_compile(r"\branks? (?P<ranks>[0-9]+(?:(?:-|, ?| and )[0-9]+)*)", re.IGNORECASE)
_MANY_AND = lazy_compile(r", | and ")

_CONFIDENCE = ((0.9, "very high"), (0.75, "high"), (0.5, "moderate"), (0.0, "low"))
"""Least confidence of each word; that of a primary finding from logs is the share of public failure texts in which such
a finding was right (:mod:`doctor.analysis.differential.measured_confidence`)."""
LEAST_SHOWN = 0.05
"""Least confidence of an alternative that is shown; the document has all."""
_ROUNDED = 0.02
"""What rounded confidences may sum to beyond 1."""
_MOST_HOSTS = 4
"""Hosts that a sentence may name."""
MOST_EVENTS = 8
"""Log events of ranks that are quoted."""
MOST_FRAMES = 5
_QUOTED = lazy_compile(r"(?P<place>.+?:[0-9]+):(?: (?P<who>rank [0-9]+):)? (?P<text>.*)", re.DOTALL)


class ShownCandidates(NamedTuple):
    """The candidate causes that a report shows, and their heading."""

    heading: str
    causes: tuple[CandidateCause, ...]


def shown_candidates(report: Report, story: Narrative) -> ShownCandidates:
    """Confidences that sum to at most 1 are those of alternatives to the verdict, of which those of
    :data:`LEAST_SHOWN` or more are shown; else the verdict is a symptom, and the candidates are its causes."""
    primary = story.primary
    stated = primary.finding.confidence if primary is not None and primary.id != UNEXPLAINED else 1.0
    if stated + sum(one.confidence for one in report.candidates) > 1 + _ROUNDED:
        return ShownCandidates("Possible causes, most likely first", report.candidates)
    shown = tuple(one for one in report.candidates if one.confidence >= LEAST_SHOWN)
    return ShownCandidates("Less likely alternatives", shown)


class CheckFinding(msgspec.Struct, frozen=True):
    """A finding and the result of its check."""

    result: CheckResult
    finding: ReportFinding

    @property
    def id(self) -> str:
        """The id of the check."""
        return self.result.id


class Narrative(msgspec.Struct, frozen=True):
    """The findings of a report by role. ``primary``: what happened first; ``followed``: its consequences; ``others``:
    other errors and warnings; ``remarks``: infos, and ignored findings."""

    primary: CheckFinding | None
    followed: tuple[CheckFinding, ...]
    others: tuple[CheckFinding, ...]
    remarks: tuple[CheckFinding, ...]

    @property
    def faults(self) -> tuple[CheckFinding, ...]:
        """All findings but remarks."""
        return (*((self.primary,) if self.primary else ()), *self.followed, *self.others)


def narrative_of(report: Report) -> Narrative:
    """Return the findings of ``report``, by severity and confidence in each role."""
    findings = sorted(
        (CheckFinding(result, one) for result in report.results for one in result.findings),
        key=lambda one: (-one.finding.severity.weight, -one.finding.confidence),
    )
    loud = [one for one in findings if one.finding.stands and one.finding.severity is not Severity.INFO]
    own = [one for one in findings if one.id == report.primary and one.finding.stands]
    primary = next((one for one in own if one.finding.explained_by is None), own[0] if own else None)
    rest = [one for one in loud if one is not primary]
    followed = tuple(one for one in rest if report.primary and one.finding.explained_by == report.primary)
    others = tuple(one for one in rest if one not in followed)
    remarks = tuple(one for one in findings if one not in loud and one is not primary)
    return Narrative(primary, followed, others, remarks)


def headline(report: Report) -> str:
    """Return one sentence: what happened first, on which rank and host, and why; or why that is unknown."""
    primary = narrative_of(report).primary
    if primary is not None:
        return claim(primary.finding, report)
    is_unread = report.verdict == "inconclusive" and any(one.decisive is True for one in report.inputs)
    if unclear_outcome(report) is not None or is_unread:
        return f"Inconclusive: {why_inconclusive(report)}."
    if report.verdict == "inconclusive":
        return f"The cause could not be determined: {why_inconclusive(report)}."
    if report.verdict == "fail":
        return "The run failed, but the evidence does not show what failed first."
    return f"No problems found ({coverage_in_words(report)})."


def claim(finding: ReportFinding, report: Report) -> str:
    """Return the summary as a sentence that names rank and host."""
    summary = finding.summary.rstrip(" .")
    mention = _RANKS.search(summary)
    if finding.ranks and mention is None:
        return _sentence(f"{place(finding, report)}: {summary}", finding.hosts)
    unnamed = [host for host in named_hosts(finding) if host not in summary]
    if not unnamed or len(unnamed) > _MOST_HOSTS:
        return _sentence(summary, finding.hosts)
    hosts = ", ".join(unnamed)
    if mention is None or not _is_all_of(mention["ranks"], finding.ranks):
        return _sentence(f"{summary} ({hosts})", finding.hosts)
    return _sentence(f"{summary[: mention.end()]} on {hosts}{summary[mention.end() :]}")


def _is_all_of(named: str, ranks: Sequence[int]) -> bool:
    """Whether a summary names just these ranks: ``0-3,6``, ``0-3 and 6`` or ``2 and 3``."""
    words = ranks_in_words(tuple(ranks)).partition(" ")[2]
    return _MANY_AND.sub(",", named) in (ranges(ranks), _MANY_AND.sub(",", words))


def _sentence(text: str, hosts: Collection[str] = ()) -> str:
    """Return ``text`` with a capital, unless its first word is a name."""
    first = text.split(maxsplit=1)[0].rstrip(",:;") if text.strip() else ""
    is_word = first.isalpha() and first.islower() and first not in hosts
    return f"{text[:1].upper()}{text[1:]}." if is_word else f"{text}."


def confidence(finding: ReportFinding) -> str:
    """Return ``very high (0.95)``."""
    word = next(word for least, word in _CONFIDENCE if finding.confidence >= least or not least)
    return f"{word} ({finding.confidence:.2g})"


def commands(fix: str) -> list[str]:
    """Return what can be pasted into a shell or a script: inline code of more than one word, and command lines."""
    prose, below = fix_parts(fix)
    inline = (code.strip() for code in INLINE_CODE.findall(prose) if re.search(r"[\s=]", code.strip()))
    return list(dict.fromkeys([*inline, *below]))


class LogQuote(msgspec.Struct, frozen=True):
    """A line of a log: its location (``job.log:12``), its writer, and its text."""

    place: str
    who: str
    text: str


def lines_of_ranks(job: Job | None, ranks: Collection[int]) -> list[LogQuote]:
    """Return the newest log events of these ranks, each with the frames of its traceback, innermost first."""
    quoted = []
    events = [one for one in (job.evidence.events if job and job.evidence else ()) if one.rank in ranks]
    for event in events[-MOST_EVENTS:]:
        quoted.append(LogQuote(f"{event.file}:{event.line}", f"rank {event.rank}", event.text))
        for frame in event.frames[:MOST_FRAMES]:
            function = f" in {frame.function}" if frame.function else ""
            quoted.append(LogQuote("", "", f"    at {frame.file}:{frame.line}{function}"))
    return quoted


def quotes(finding: ReportFinding) -> list[LogQuote]:
    """Return the lines that prove a finding (:func:`doctor.core.logs.event_groups.line_of`)."""
    lines = finding.evidence.get("said")
    quoted = []
    for line in map(str, lines if isinstance(lines, (list, tuple)) else ()):
        match = _QUOTED.fullmatch(line)
        quoted.append(LogQuote(match["place"], match["who"] or "", match["text"]) if match else LogQuote("", "", line))
    return quoted


class EvidenceOverview(msgspec.Struct, frozen=True):
    """What the inputs show of a run whose outcome is unclear: ``facts`` as sentences, the lines that look like errors,
    how many more there are, and what to collect next."""

    facts: tuple[str, ...]
    lines: list[LogQuote]
    more: int
    collect: tuple[str, ...]


def evidence_overview_of(report: Report) -> EvidenceOverview | None:
    """Return the overview if the report is inconclusive because nothing shows how the run ended."""
    outcome = unclear_outcome(report)
    if outcome is None:
        return None
    facts = []
    if outcome.lines:
        word = "line" if outcome.lines == 1 else "lines"
        facts.append(f"{outcome.lines} {word} read, {outcome.recognized} recognized")
    for step in outcome.last_steps:
        who = f" of rank {step.rank}" if step.rank is not None else ""
        facts.append(f"last step{who}: {step.step} ({step.file}:{step.line})")
    lines = []
    primary = narrative_of(report).primary
    quoted = {quote.place for quote in quotes(primary.finding)} if primary is not None else set()
    for one in (*outcome.evidence, *outcome.unexplained):
        if f"{one.file}:{one.line}" in quoted:
            continue
        writer = f"rank {one.rank}" if one.rank is not None else one.host or ""
        lines.append(LogQuote(f"{one.file}:{one.line}", writer, one.text))
    return EvidenceOverview(tuple(facts), lines, outcome.unexplained_lines - len(outcome.unexplained), outcome.collect)


def to_collect(report: Report) -> list[tuple[str, str]]:
    """Return what to collect for the checks that could not be evaluated: pairs of their ids and what to do."""
    ways: dict[str, list[str]] = {}
    for result in report.results:
        _, found, way = (result.reason or "").partition("; to see it: ")
        if found:
            ways.setdefault(way, []).append(result.id)
    return [(", ".join(ids), way) for way, ids in ways.items()]
