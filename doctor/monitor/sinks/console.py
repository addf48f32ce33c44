"""Findings of a run on its console: each once, in blocks that survive progress bars, and not too many at once."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import IO

import msgspec

from doctor.core.capture import EARLIER, REPORT
from doctor.core.job import Job
from doctor.core.masking import mask_text
from doctor.core.report_document import CheckResult, Report, ReportFinding
from doctor.monitor.sinks.finding_sink import FindingEvent
from doctor.monitor.sinks.rate_limit import REGAIN, RateLimit
from doctor.report.formatting import counts_line, place, some, spelt_out, why_inconclusive
from doctor.report.terminal import draw_findings, make_console

MOST_LINES = 100
"""Lines of one block: a few findings with stacks and tables. The rest stands in the report file."""

RANK_DIED = "RUN004"
"""Names the rank that failed first. At the end of a run it is told even where something else explains it."""


def print_status(line: str) -> None:
    """Write one status line to stderr with a single write, with secrets masked."""
    try:
        sys.stderr.write(f"rankdoctor: {mask_text(line.removeprefix('rankdoctor: '))}\n")
        sys.stderr.flush()
    except (OSError, ValueError):  # stderr is closed
        return


class ConsoleSink:
    """Tells people at the terminal, or whoever reads the log. ``report``: the file that the end refers to;
    ``is_written``: whether it holds the report.

    ``stream``: ``None`` for whatever ``sys.stderr`` is at the time: progress bars put their own in its place, which
    writes above them. A block is one write, and begins with a line break, because a bar leaves its line open. A stream
    that can't be written is left alone from then on.
    """

    def __init__(
        self,
        report: Path,
        stream: IO[str] | None = None,
        ration: RateLimit | None = None,
        is_written: Callable[[], bool] = lambda: True,
    ) -> None:
        self._path = spelt_out(str(report))
        self._is_written = is_written
        self._stream = stream
        self._ration = ration or RateLimit()
        self._kept: Counter[str] = Counter()
        self._told = -REGAIN
        self._mute = False

    def found(self, news: Sequence[FindingEvent], report: Report) -> None:
        """Show what is new, as far as the ration goes, and count the rest."""
        shown, kept = self._ration.split(news)
        self._kept.update(one.result.id for one in kept)
        stream = self._open()
        if shown and stream is not None:
            self._say(stream, _block(shown, report, stream) + self._rest())
        else:
            self._tell_rest()

    def round(self, job: Job, report: Report) -> None:
        """Count what was kept back for a while."""
        self._tell_rest()

    def ended(self, report: Report) -> None:
        """What was found in all, what to begin with, and where the report lies."""
        stream = self._open()
        if stream is not None:
            self._say(stream, _summary(report, self._where(report), stream.isatty()))

    def _where(self, report: Report) -> str:
        """Where the report lies, now and once another run has begun here; that it could not be written, if so."""
        if not self._is_written():
            return "not written"
        later = f" (from the next run on: {EARLIER}/{spelt_out(report.run)}/{REPORT})" if report.run else ""
        return self._path + later

    def close(self) -> None:
        """Nothing is held: the stream is the process's own."""

    def _tell_rest(self) -> None:
        stream = self._open()
        if self._kept and stream is not None and time.monotonic() - self._told >= REGAIN:
            self._say(stream, "\n" + self._rest())

    def _rest(self) -> str:
        """One line for all that is kept back; ``""`` where there is none."""
        if not self._kept:
            return ""
        count, names = self._kept.total(), some(list(self._kept))
        self._kept, self._told = Counter(), time.monotonic()
        word = "finding" if count == 1 else "findings"
        where = f"all in {self._path}" if self._is_written() else "the report file could not be written"
        return f"rankdoctor: {count} more {word} ({spelt_out(names)}); {where}\n"

    def _open(self) -> IO[str] | None:
        stream = self._stream or sys.stderr
        return None if self._mute or stream is None or stream.closed else stream

    def _say(self, stream: IO[str], text: str) -> None:
        try:
            stream.write(text)
            stream.flush()
        except (OSError, ValueError):  # nobody reads any more, or it was closed
            self._mute = True


def _block(news: Sequence[FindingEvent], report: Report, stream: IO[str]) -> str:
    """The findings as the terminal report shows them, under a line that says who speaks and when."""
    shown = msgspec.structs.replace(report, results=tuple(_results(news)))
    lines = draw_findings(shown, make_console(stream)).rstrip("\n").splitlines()
    if len(lines) > MOST_LINES:
        lines[MOST_LINES:] = [f"… {len(lines) - MOST_LINES} more lines in the report"]
    return "\n".join(("", f"rankdoctor {time.strftime('%H:%M:%S')}: {counts_line(shown)}", *lines, ""))


def _results(news: Iterable[FindingEvent]) -> Iterable[CheckResult]:
    """A result a check, with the findings that are shown and the worst of their severities."""
    by_check: dict[str, list[FindingEvent]] = {}
    for one in news:
        by_check.setdefault(one.result.id, []).append(one)
    for same in by_check.values():
        findings = tuple(one.finding for one in same)
        worst = max((finding.severity for finding in findings), key=lambda severity: severity.weight)
        yield msgspec.structs.replace(same[0].result, findings=findings, severity=worst, crash=None)


def _summary(report: Report, path: str, on_terminal: bool) -> str:
    lines = [spelt_out(line) for line in _conclusion(report)]
    if len(lines) == 1:
        return ("\n" if on_terminal else "") + f"rankdoctor: {lines[0]}; report: {path}\n"
    return "\n".join(("", f"rankdoctor: {lines[0]}", *(f"  {line}" for line in lines[1:]), f"  report: {path}", ""))


def _conclusion(report: Report) -> Iterable[str]:
    """The count, and where something is wrong: who failed first, and what to begin with."""
    expected = report.coverage.ranks_expected
    count = f"{counts_line(report)} on {expected} {'rank' if expected == 1 else 'ranks'}"
    yield count if report.verdict != "inconclusive" else f"{count}, but {why_inconclusive(report)}"
    if report.primary != RANK_DIED:
        yield from _told(report, RANK_DIED, "failed first")
    if report.primary is not None:
        yield from _told(report, report.primary, "start with")


def _told(report: Report, check_id: str, opening: str) -> Iterable[str]:
    result = report.result(check_id)
    finding = _gravest(result) if result is not None else None
    if result is not None and finding is not None:
        claim = " ".join(finding.summary.split())
        yield f"{opening} {result.id} {result.name}: {claim} ({place(finding, report)})"


def _gravest(result: CheckResult) -> ReportFinding | None:
    standing = [finding for finding in result.findings if finding.stands]
    return max(standing, key=lambda finding: finding.severity.weight, default=None)
