"""What a report tells, in the order in which people ask: what happened first, what followed from it, what else."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from doctor.core.facts import Event
from doctor.core.finding import Severity
from doctor.core.job import Job
from doctor.core.report_document import CheckResult, QuotedLine, Report, ReportFinding
from doctor.report.formatting import (
    coverage_in_words,
    fix_parts,
    named_hosts,
    place,
    ranges,
    unclear_outcome,
    why_inconclusive,
)

_RANKS = re.compile(r"\branks? (?P<ranks>[0-9]+(?:(?:-|, ?| and )[0-9]+)*)", re.IGNORECASE)
_MANY_AND = re.compile(r", | and ")

_CONFIDENCE = ((0.9, "very high"), (0.75, "high"), (0.5, "moderate"), (0.0, "low"))
"""From which confidence on it is called so: a message that states its cause has 0.9 and more, one that several causes
share less than 0.75, a mere symptom less than 0.5."""


class CheckFinding(NamedTuple):
    """A finding and the check that made it."""

    result: CheckResult
    finding: ReportFinding

    @property
    def id(self) -> str:
        """Of the check."""
        return self.result.id


class Narrative(NamedTuple):
    """The findings of a report by their part in it. ``primary``: what happened first; ``followed``: what it explains;
    ``others``: errors and warnings that stand beside it; ``remarks``: what is good to know, or ignored."""

    primary: CheckFinding | None
    followed: tuple[CheckFinding, ...]
    others: tuple[CheckFinding, ...]
    remarks: tuple[CheckFinding, ...]


def narrative_of(report: Report) -> Narrative:
    """The findings of ``report``, the gravest and surest of each part first."""
    told = sorted(
        (CheckFinding(result, one) for result in report.results for one in result.findings), key=_gravest_first
    )
    loud = [one for one in told if one.finding.stands and one.finding.severity is not Severity.INFO]
    primary = next(_roots(report, [one for one in told if one.finding.stands]), None)
    rest = [one for one in loud if one is not primary]
    followed = tuple(one for one in rest if report.primary and one.finding.explained_by == report.primary)
    others = tuple(one for one in rest if one not in followed)
    return Narrative(primary, followed, others, tuple(one for one in told if one not in loud and one is not primary))


def _roots(report: Report, standing: Iterable[CheckFinding]) -> Iterator[CheckFinding]:
    """The findings of the primary check, those that nothing explains first."""
    own = [one for one in standing if one.id == report.primary]
    yield from (one for one in own if one.finding.explained_by is None)
    yield from own


def _gravest_first(told: CheckFinding) -> tuple[int, float]:
    return (-told.finding.severity.weight, -told.finding.confidence)


def headline(report: Report) -> str:
    """One sentence: what happened first, on which rank and host, and why; or why that can't be told."""
    primary = narrative_of(report).primary
    if primary is not None:
        return claim(primary.finding, report)
    is_unread = report.verdict == "inconclusive" and any(one.decisive is True for one in report.inputs)
    if unclear_outcome(report) is not None or is_unread:
        return f"Inconclusive: {why_inconclusive(report)}."
    if report.verdict == "inconclusive":
        return f"The cause can't be told: {why_inconclusive(report)}."
    if report.verdict == "fail":
        return "Something failed, and the evidence does not tell what came first."
    return f"No problems found ({coverage_in_words(report)})."


def claim(finding: ReportFinding, report: Report) -> str:
    """The summary as a sentence that names rank and host."""
    said = finding.summary.rstrip(" .")
    mention = _RANKS.search(said)
    if finding.ranks and mention is None:
        return _sentence(f"{place(finding, report)}: {said}", finding.hosts)
    unnamed = [host for host in named_hosts(finding) if host not in said]
    if not unnamed or len(unnamed) > _MOST_HOSTS:
        return _sentence(said, finding.hosts)
    hosts = ", ".join(unnamed)
    if mention is None or _MANY_AND.sub(",", mention["ranks"]) != ranges(finding.ranks):
        return _sentence(f"{said} ({hosts})", finding.hosts)
    return _sentence(f"{said[: mention.end()]} on {hosts}{said[mention.end() :]}")


_MOST_HOSTS = 4
"""Hosts that a sentence can bear."""


def _sentence(text: str, hosts: Collection[str] = ()) -> str:
    """With a capital, unless it begins with a name."""
    first = text.split(maxsplit=1)[0].rstrip(",:;") if text.strip() else ""
    is_word = first.isalpha() and first.islower() and first not in hosts
    return f"{text[:1].upper()}{text[1:]}." if is_word else f"{text}."


def confidence(finding: ReportFinding) -> str:
    """``very high (0.95)``."""
    word = next(word for least, word in _CONFIDENCE if finding.confidence >= least or not least)
    return f"{word} ({finding.confidence:.2g})"


_CODE = re.compile(r"`([^`]+)`")
_COMMAND = re.compile(r"[\s=]")


def commands(fix: str) -> list[str]:
    """What of a way out can be pasted into a shell or a script: its code of more than a word."""
    prose, below = fix_parts(fix)
    inline = (code.strip() for code in _CODE.findall(prose) if _COMMAND.search(code.strip()))
    return list(dict.fromkeys([*inline, *below]))


class LogQuote(NamedTuple):
    """A line that was read: where it stands (``job.log:12``), who said it, and what."""

    place: str
    who: str
    text: str


def lines_of_ranks(job: Job | None, ranks: Collection[int]) -> list[LogQuote]:
    """What logs say of these ranks, with the stacks of their errors, newest last."""
    events = [one for one in (job.evidence.events if job and job.evidence else ()) if one.rank in ranks]
    return [quote for event in events[-MOST_EVENTS:] for quote in _lines_of(event)]


MOST_EVENTS = 8
"""Messages of ranks that are quoted."""
MOST_FRAMES = 5


def _lines_of(event: Event) -> Iterator[LogQuote]:
    """A message, and the frames of its traceback below it, innermost first."""
    place = f"{event.file}:{event.line}"
    yield LogQuote(place, f"rank {event.rank}", event.text)
    for frame in event.frames[:MOST_FRAMES]:
        yield LogQuote(
            "", "", f"    at {frame.file}:{frame.line}" + (f" in {frame.function}" if frame.function else "")
        )


_QUOTED = re.compile(r"(?P<place>.+?:[0-9]+):(?: (?P<who>rank [0-9]+):)? (?P<text>.*)", re.DOTALL)


def quotes(finding: ReportFinding) -> list[LogQuote]:
    """The lines on which a finding rests (:func:`doctor.core.logs.event_groups.line_of`)."""
    said = finding.evidence.get("said")
    lines = said if isinstance(said, (list, tuple)) else ()
    return [_quote(str(line)) for line in lines]


def _quote(line: str) -> LogQuote:
    found = _QUOTED.fullmatch(line)
    return LogQuote(found["place"], found["who"] or "", found["text"]) if found else LogQuote("", "", line)


class EvidenceOverview(NamedTuple):
    """What was read of a run whose outcome is unclear: ``facts`` in words, the lines that look like errors, how many
    more there are, and what to collect next."""

    facts: tuple[str, ...]
    lines: list[LogQuote]
    more: int
    collect: tuple[str, ...]


def evidence_overview_of(report: Report) -> EvidenceOverview | None:
    """The same, where the report is inconclusive because nothing shows how the run ended."""
    outcome = unclear_outcome(report)
    if outcome is None:
        return None
    facts = []
    if outcome.lines:
        facts.append(
            f"{outcome.lines} {'line' if outcome.lines == 1 else 'lines'} read, {outcome.recognized} recognized"
        )
    for step in outcome.last_steps:
        who = f" of rank {step.rank}" if step.rank is not None else ""
        facts.append(f"last step{who}: {step.step} ({step.file}:{step.line})")
    quoted = (*outcome.evidence, *outcome.unexplained)
    lines = [LogQuote(f"{one.file}:{one.line}", _who(one), one.text) for one in quoted]
    return EvidenceOverview(tuple(facts), lines, outcome.unexplained_lines - len(outcome.unexplained), outcome.collect)


def _who(line: QuotedLine) -> str:
    return f"rank {line.rank}" if line.rank is not None else line.host or ""


def to_collect(report: Report) -> list[tuple[str, str]]:
    """What would make visible what could not be judged: (ids, what to do), each way once."""
    ways: dict[str, list[str]] = {}
    for result in report.results:
        _, found, way = (result.reason or "").partition("; to see it: ")
        if found:
            ways.setdefault(way, []).append(result.id)
    return [(", ".join(ids), way) for way, ids in ways.items()]
