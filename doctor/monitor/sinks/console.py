"""Prints each finding of a run once, in blocks that survive progress bars, rate-limited."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import IO

import msgspec

from doctor.core.capture import EARLIER
from doctor.core.clock import monotonic, strftime
from doctor.core.files.own_folder import OwnFile
from doctor.core.job import Job
from doctor.core.masking import mask_text
from doctor.core.report_document import CheckResult, Report
from doctor.monitor.sinks.finding_sink import FindingEvent, FindingSink
from doctor.monitor.sinks.rate_limit import REGAIN, RateLimit
from doctor.report.finding_lines import draw_findings
from doctor.report.formatting import counts_line, place, some, spelt_out, why_inconclusive
from doctor.report.lost_time import lost_headline
from doctor.report.styled_text import look_of

MOST_LINES = 100
"""Maximum lines of one block: a few findings with stacks and tables. The rest is in the report file."""

LEAST_LOST, LEAST_LOST_SHARE = 60.0, 0.1
"""Rank-seconds, and their share, from which lost time is printed at the end of a run."""

CONCLUSION = ".conclusion"
"""The file in the folder of a run that has the conclusion a rank printed. Rank 0 evaluates the end itself unless the
messages of the others are signed, and reaches the same conclusion as a rank that failed a moment before."""
LARGEST_CONCLUSION = 1 << 16

RANK_DIED = "RUN004"
"""The check that names the rank that failed first; at the end of a run it is printed even if it has another cause."""


def print_status(line: str) -> None:
    """Write one status line to stderr with a single write, with secrets masked."""
    try:
        sys.stderr.write(f"rankdoctor: {mask_text(line.removeprefix('rankdoctor: '))}\n")
        sys.stderr.flush()
    except (OSError, ValueError):  # stderr is closed
        return


class ConsoleSink(FindingSink):
    """Prints findings to a terminal or log.

    ``report``: the file that the final summary refers to; ``is_written``: returns whether it holds the report, and
    ``page`` the path of the report as a page, if it was written. ``printed``: :data:`CONCLUSION`; an equal conclusion
    of the same run is not printed again. ``leads``: no rank prints one after this one.
    ``stream``: ``None`` for the current ``sys.stderr``, because progress bars replace it by a stream that writes above
    them. A block is one write, and begins with a line break, because a bar leaves its line open. A stream that cannot
    be written is not used again.
    """

    def __init__(
        self,
        report: Path,
        stream: IO[str] | None = None,
        rate_limit: RateLimit | None = None,
        is_written: Callable[[], bool] = lambda: True,
        page: Callable[[], Path | None] = lambda: None,
        *,
        printed: OwnFile | None = None,
        leads: bool = True,
    ) -> None:
        self._path = spelt_out(str(report))
        self._is_written = is_written
        self._page = page
        self._printed = printed
        self._leads = leads
        self._stream = stream
        self._rate_limit = rate_limit or RateLimit()
        self._held_back: Counter[str] = Counter()
        self._reported_at = -REGAIN
        self._is_broken = False

    def found(self, events: Sequence[FindingEvent], report: Report) -> None:
        """Print new findings as far as the rate limit allows, and count the rest."""
        shown, held_back = self._rate_limit.split(events)
        self._held_back.update(one.result.id for one in held_back)
        stream = self._open()
        if shown and stream is not None:
            self._write(stream, _block(shown, report, stream) + self._held_back_line())
        else:
            self._report_held_back()

    def round(self, job: Job, report: Report) -> None:
        """Print the number of findings held back, if it is due."""
        self._report_held_back()

    def ended(self, report: Report) -> None:
        """Print the number of findings, what to fix first, and the path of the report."""
        stream = self._open()
        if stream is None:
            return
        path = self._path if self._is_written() else "not written"
        if (page := self._page()) is not None:
            path += f", page: {spelt_out(str(page))}"
        if report.run and self._is_written():
            path += f" (moved to {EARLIER}/{spelt_out(report.run)}/ when the next run starts)"
        first, *others = lines = [spelt_out(line) for line in _conclusion(report)]
        if (
            report.run
            and self._printed is not None
            and self._is_printed(self._printed, "\n".join([report.run, *lines]))
        ):
            return
        if others:
            text = "\n".join(("", f"rankdoctor: {first}", *(f"  {line}" for line in others), f"  report: {path}", ""))
        else:
            text = ("\n" if stream.isatty() else "") + f"rankdoctor: {first}; report: {path}\n"
        self._write(stream, text)

    def _is_printed(self, printed: OwnFile, conclusion: str) -> bool:
        """Return whether another rank has printed this conclusion; else keep it for those that may print theirs later.

        A folder that cannot be used, or a file of another user in it, only means that it is printed twice.
        """
        with contextlib.suppress(OSError):
            if printed.read(LARGEST_CONCLUSION) == conclusion.encode():
                return self._is_written()
        if not self._leads:
            with contextlib.suppress(OSError):
                printed.folder.write(printed.name, conclusion.encode())
        return False

    def _report_held_back(self) -> None:
        stream = self._open()
        if self._held_back and stream is not None and monotonic() - self._reported_at >= REGAIN:
            self._write(stream, "\n" + self._held_back_line())

    def _held_back_line(self) -> str:
        if not self._held_back:
            return ""
        count, names = self._held_back.total(), some(list(self._held_back))
        self._held_back, self._reported_at = Counter(), monotonic()
        word = "finding" if count == 1 else "findings"
        where = f"all in {self._path}" if self._is_written() else "the report file could not be written"
        return f"rankdoctor: {count} more {word} ({spelt_out(names)}); {where}\n"

    def _open(self) -> IO[str] | None:
        stream = self._stream or sys.stderr
        return None if self._is_broken or stream is None or stream.closed else stream

    def _write(self, stream: IO[str], text: str) -> None:
        try:
            stream.write(text)
            stream.flush()
        except (OSError, ValueError):  # the stream was closed
            self._is_broken = True


def _block(events: Sequence[FindingEvent], report: Report, stream: IO[str]) -> str:
    """Render findings as in the terminal report, under a line with program name and time."""
    shown = msgspec.structs.replace(report, results=tuple(_results(events)))
    lines = draw_findings(shown, look_of(stream)).rstrip("\n").splitlines()
    if len(lines) > MOST_LINES:
        lines[MOST_LINES:] = [f"… {len(lines) - MOST_LINES} more lines in the report"]
    return "\n".join(("", f"rankdoctor {strftime('%H:%M:%S')}: {counts_line(shown)}", *lines, ""))


def _results(events: Iterable[FindingEvent]) -> Iterable[CheckResult]:
    by_check: dict[str, list[FindingEvent]] = {}
    for one in events:
        by_check.setdefault(one.result.id, []).append(one)
    for same in by_check.values():
        findings = tuple(one.finding for one in same)
        worst = max((finding.severity for finding in findings), key=lambda severity: severity.weight)
        yield msgspec.structs.replace(same[0].result, findings=findings, severity=worst, crash=None)


def _conclusion(report: Report) -> Iterable[str]:
    """Yield the number of findings, the rank that failed first and what to fix first."""
    expected = report.coverage.ranks_expected
    count = f"{counts_line(report)} on {expected} {'rank' if expected == 1 else 'ranks'}"
    yield count if report.verdict != "inconclusive" else f"{count}, but {why_inconclusive(report)}"
    if report.primary != RANK_DIED:
        yield from _headline(report, RANK_DIED, "failed first")
    if report.primary is not None:
        yield from _headline(report, report.primary, "start with")
    lost = report.lost_time
    if lost is not None and lost.lost >= max(LEAST_LOST, LEAST_LOST_SHARE * lost.rank_seconds) and lost.largest:
        yield f"lost time: {lost_headline(lost)}; most of it: {lost.largest[0].summary}"


def _headline(report: Report, check_id: str, label: str) -> Iterable[str]:
    result = report.result(check_id)
    standing = [finding for finding in result.findings if finding.stands] if result is not None else []
    if result is not None and standing:
        finding = max(standing, key=lambda finding: finding.severity.weight)
        claim = " ".join(finding.summary.split())
        yield f"{label} {result.id} {result.name}: {claim} ({place(finding, report)})"
