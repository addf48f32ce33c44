"""Formatting that all reports share: ranges of ranks, locations, counts, evidence, and text of Markdown and JSON."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from importlib.machinery import all_suffixes
from typing import Any

import msgspec

from doctor.core.decoding import prepared
from doctor.core.finding import Severity, Status
from doctor.core.job import UNKNOWN_HOST
from doctor.core.report_document import CheckResult, Report, ReportFinding, RunOutcome
from doctor.core.text import counted, lazy_compile, ranges

_UNPRINTABLE = lazy_compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, except tabs and line breaks, and characters that change the direction of text."""

INLINE_CODE = lazy_compile(r"`([^`]+)`")
_MARKDOWN_CODE = lazy_compile("(?<!`)(`(?!`)[^`]+`)(?!`)")
"""Between single backticks: a run of several has another meaning in Markdown."""
_ADDRESS = lazy_compile(r"(?:https?://|ftp://|www\.)[^\s`]+|[\w.+-]{1,64}@[\w-]{1,63}\.[\w.-]{1,190}", re.IGNORECASE)
"""Extended autolinks of GitHub Flavored Markdown."""
_MARKUP = lazy_compile(r"[\\`<*&]|(?<=\])[(\[:]")
"""Starts of code, HTML, character references and emphasis, and what turns a word in brackets into a link."""
_REFERENCES = {"<": "&lt;", "&": "&amp;"}
_MENTION = lazy_compile(r"(?<![\w`])@(?=\w)")
_BARE_COMMAND = lazy_compile(r"(?:export|unset|sudo|pip|rm|mkdir|chmod) (?:[^`,:]|[,:](?=\S))*")
"""A fix that is a single command: without backticks, and without a comma or colon before a blank."""
NO_FINDING = "no finding"
"""The counts of a report without findings."""
LONGEST = 240
"""Characters of a line of evidence in a terminal."""


CODE_EVIDENCE = ("code", "column", "end_column", "end_line", "line_in_cell", "cell", "fixable", "flow", "preview")
"""Names of evidence by which rules of ``doctor lint`` locate a line; reports show the line instead."""


class CodeExcerpt(msgspec.Struct, frozen=True):
    """A source line with its number (``margin``), and below it the mark of the part that is at fault."""

    margin: str
    code: str
    blank: str
    lead: str
    mark: str


def code_excerpt(finding: ReportFinding) -> CodeExcerpt | None:
    """Return the source line that a finding of ``doctor lint`` is about, if it has one."""

    def number(name: str) -> int:
        value = finding.evidence.get(name)
        return value if isinstance(value, int) else 0

    code = str(finding.evidence.get("code", ""))
    line = finding.source.line if finding.source is not None else None
    if not code.strip() or not line:
        return None
    margin = f"{number('line_in_cell') or line:>6} | "
    column = number("column") - 1
    end = min(number("end_column") - 1 if number("end_line") == line else len(code), len(code))
    if not 0 <= column < len(code):
        return CodeExcerpt(margin, code, "", "", "")
    lead = "".join(sign if sign == "\t" else " " for sign in code[:column])
    return CodeExcerpt(margin, code, " " * (len(margin) - 2) + "| ", lead, "^" * max(end - column, 1))


def spelt_out(text: str) -> str:
    r"""Escape control characters as ``\x1b``: a host name of a capture must not control the reader's terminal."""
    return _UNPRINTABLE.sub(lambda match: ascii(match[0])[1:-1], text)


def as_json(document: object, indent: int = 2) -> str:
    """Encode a document as JSON in which control characters are escaped."""
    return escaped(msgspec.json.format(msgspec.json.encode(document), indent=indent).decode())


def escaped(text: str) -> str:
    r"""Escape in JSON the control characters that JSON allows (C1, bidirectional ones) as ``\u009b``."""
    return _UNPRINTABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def printable(report: Report) -> Report:
    """Return the report with control characters escaped in every text; only JSON has its own escapes."""
    return msgspec.convert(_printable(msgspec.to_builtins(report)), prepared(Report))


def _printable(value: Any) -> Any:
    if isinstance(value, str):
        return spelt_out(value)
    if isinstance(value, dict):
        return {_printable(key): _printable(inner) for key, inner in value.items()}
    return [_printable(item) for item in value] if isinstance(value, (list, tuple)) else value


def explaining(result: CheckResult) -> str:
    """Return the command that explains a check; for a check from a file, with the option that loads the file."""
    origin = result.origin or ""
    plugin = f" --plugin {shlex.quote(origin)}" if origin.endswith(tuple(all_suffixes())) else ""
    return f"doctor explain {result.id}{plugin}"


def line_of(text: str) -> str:
    """Return ``text`` as one line of Markdown in which all markup except inline code is escaped."""
    return "".join(part if is_code else _prose(part) for is_code, part in _parts(text))


def cell(text: str) -> str:
    """Return ``text`` as a cell of a Markdown table."""
    parts = (part.replace("\\", "\\\\") if is_code else _prose(part) for is_code, part in _parts(text))
    return "".join(parts).replace("|", "\\|")


def markdown_table(head: Sequence[str], rows: Iterable[Iterable[str]], *, rule: str = "---") -> Iterator[str]:
    """Return the lines of a Markdown table. ``rule``: the delimiter cell of all columns but the first."""
    for row in (head, ["---", *[rule] * (len(head) - 1)], *rows):
        yield "| " + " | ".join(map(cell, row)) + " |"


def _parts(text: str) -> Iterator[tuple[bool, str]]:
    """Return pairs (is code, text). Addresses count as code, because GitHub and GitLab turn bare ones into links."""
    for position, part in enumerate(_MARKDOWN_CODE.split(" ".join(text.split()))):
        if position % 2:
            yield True, part
            continue
        end = 0
        for match in _ADDRESS.finditer(part):
            yield False, part[end : match.start()]
            yield True, f"`{match[0]}`"
            end = match.end()
        yield False, part[end:]


def _prose(text: str) -> str:
    plain = _MARKUP.sub(lambda match: _REFERENCES.get(match[0]) or f"\\{match[0]}", text)
    # A zero-width space: GitHub and GitLab would notify the user of that name.
    return _MENTION.sub("@\u200b", plain)


def fix_parts(fix: str) -> tuple[str, list[str]]:
    """Split a fix into its prose and its commands.

    A fix of several lines holds one command per line, after an optional line of prose that ends with a colon."""
    first, *rest = fix.split("\n")
    if not rest:
        return ("", [fix]) if _BARE_COMMAND.fullmatch(fix) else (fix, [])
    return (first, rest) if first.endswith(":") else ("", [first, *rest])


def some(words: Sequence[str], most: int = 4) -> str:
    """Join the first words, and count the others."""
    shown = ", ".join(words[:most])
    return f"{shown} and {len(words) - most} more" if len(words) > most else shown


def other_places(finding: ReportFinding) -> list[tuple[str, int]]:
    """Return the other files and lines of a finding of ``doctor lint``, after its own."""
    places = finding.evidence.get("also")
    if not isinstance(places, (list, tuple)):
        return []
    parted = (str(one).rpartition(":") for one in places)
    return [(file, int(line)) for file, _, line in parted if line.isdecimal()]


def place(finding: ReportFinding, report: Report) -> str:
    """Return the location of a finding: ``ranks 0-7 (node0)``; the host if the job is one process; file and line."""
    if report.job is None and finding.source is not None:
        return f"{finding.source.file}:{finding.source.line}" if finding.source.line else finding.source.file
    hosts = some(named_hosts(finding))
    job = report.job
    if job is not None and job.world_size == report.coverage.ranks_seen == 1:
        if all(host.name != UNKNOWN_HOST for host in job.hosts):
            return hosts or "this process"
    if not finding.ranks:
        return hosts or "the whole job"
    word = "rank" if len(finding.ranks) == 1 else "ranks"
    return f"{word} {ranges(finding.ranks)}" + (f" ({hosts})" if hosts else "")


def named_hosts(finding: ReportFinding) -> list[str]:
    """Return the hosts that a finding names, without unknown ones."""
    return [host for host in finding.hosts if host != UNKNOWN_HOST]


def shortened(line: str) -> str:
    """Return the start and the end of a long line: a message often says first what failed, and last why."""
    if len(line) <= LONGEST:
        return line
    tail = LONGEST // 3
    return f"{line[: LONGEST - tail - 3]} … {line[-tail:]}"


def job_words(report: Report) -> list[str]:
    """Return the number of ranks, the launcher and the hosts; nothing without a job."""
    if report.stacks is not None and report.stacks.job:
        return [report.stacks.job]
    if report.job is None:
        return []
    size = report.job.world_size
    count = f"{_least(report)}{size} ranks" if size > 1 else "1 process" if size else "ranks unknown"
    launcher = report.job.launcher
    if launcher == "none":
        launcher = "no launcher" if size else "launcher unknown"
    hosts = [host.name for host in report.job.hosts if host.name != UNKNOWN_HOST]
    return [word for word in (count, launcher, some(hosts, 3)) if word]


def counts_line(report: Report) -> str:
    """Return ``2 errors, 1 warning (1 ignored)``."""
    findings = [finding for result in report.results for finding in result.findings]
    parts = []
    for severity in ("error", "warning", "info"):
        count = sum(finding.severity.value == severity and finding.stands for finding in findings)
        if count:
            parts.append(f"{count} {severity if severity == 'info' or count == 1 else severity + 's'}")
    ignored = sum(not finding.stands for finding in findings)
    hidden = hidden_previews(report)
    rest = [f"{ignored} ignored"] if ignored else []
    rest += [f"{hidden} in preview not shown"] if hidden else []
    in_tests = left_out_in_tests(report)
    rest += [f"{in_tests} in tests not shown"] if in_tests else []
    return (", ".join(parts) or NO_FINDING) + (f" ({', '.join(rest)})" if rest else "")


def hidden_previews(report: Report) -> int:
    """Return how many findings of ``doctor lint`` are left out because they are in preview."""
    return sum(result.hidden for result in report.results)


def left_out_in_tests(report: Report) -> int:
    """Return how many findings of ``doctor lint`` are left out because they are in tests."""
    return sum(result.in_tests for result in report.results)


def coverage_line(report: Report) -> str:
    """Return ``checks: 17 applied, 0 unknown, 36 skipped, 0 failed to run; 2 of 2 ranks seen``."""
    counts = report.coverage.checks
    applied = counts["pass"] + counts["fail"]
    others = f"{counts['unknown']} unknown, {counts['skip']} skipped, {counts['error']} failed to run"
    checks = f"checks: {applied} applied, {others}"
    if not report.coverage.ranks_expected:
        return checks if report.job is None else f"{checks}; ranks unknown"
    ranks = f"{report.coverage.ranks_seen} of {_least(report)}{report.coverage.ranks_expected}"
    word = "rank" if report.coverage.ranks_expected == 1 else "ranks"
    return f"{checks}; {ranks} {word} seen"


def sentence(text: str) -> str:
    """Return ``text`` with a capital and a full stop."""
    return f"{text[:1].upper()}{text[1:]}."


def _least(report: Report) -> str:
    """``at least ``, if the number of ranks is a lower bound."""
    return "at least " if report.job is not None and report.job.at_least and report.job.world_size > 1 else ""


def coverage_in_words(report: Report) -> str:
    """Return ``14 of 139 checks applied``."""
    counts = report.coverage.checks
    total = sum(counts.values())
    return f"{counts['pass'] + counts['fail']} of {total} {'check' if total == 1 else 'checks'} applied"


def crash_of(result: CheckResult) -> str | None:
    """Return the exception that a check raised, if any."""
    return result.reason if result.status is Status.ERROR else result.crash


def state_of(result: CheckResult) -> str:
    """Return the status of a check, or the severity of its worst finding.

    ``crashed`` replaces the status ``error``, because ``error`` is a severity, too."""
    if result.status is Status.FAIL:
        return result.severity.value
    if result.status is Status.ERROR:
        return "crashed"
    return "ignored" if result.findings and result.status is Status.PASS else result.status.value


def states_of(report: Report) -> dict[str, int]:
    """Return the number of checks in each state, the most severe first."""
    counts = Counter(map(state_of, report.results))
    order = ("error", "warning", "crashed", "info", "unknown", "ignored", "pass", "skip")
    return {state: counts[state] for state in order if counts[state]}


def families(report: Report) -> dict[str, list[CheckResult]]:
    """Return the results by family, in the order of the report."""
    grouped: dict[str, list[CheckResult]] = {}
    for result in report.results:
        grouped.setdefault(result.family, []).append(result)
    return grouped


UNEXPLAINED = "RUN019"
"""The check of errors that no check explains: its finding is not a cause."""


def unclear_outcome(report: Report) -> RunOutcome | None:
    """Return the outcome of the run if it is why the report is inconclusive: neither evidence of a healthy run nor a
    finding that explains its end, other than that errors are unexplained."""
    if report.verdict != "inconclusive" or report.outcome is None or report.outcome.is_orderly:
        return None
    findings = (one for result in report.results if result.id != UNEXPLAINED for one in result.findings)
    is_symptom = any(one.stands and one.severity is not Severity.INFO for one in findings)
    return None if is_symptom else report.outcome


def why_inconclusive(report: Report) -> str:
    """Return why there is no verdict."""
    missing, expected = report.coverage.ranks_expected - report.coverage.ranks_seen, report.coverage.ranks_expected
    crashed = [result.id for result in report.results if result.status is Status.ERROR or result.crash is not None]
    if missing > 0 and not report.inputs:
        return f"{missing} of {counted(expected, 'rank')} {'was' if missing == 1 else 'were'} not gathered"
    if crashed:
        return f"{some(crashed)} failed to run"
    if (outcome := unclear_outcome(report)) is not None:
        return outcome.reason
    if unread := [one.path for one in report.inputs if one.decisive is True]:
        return f"{some(unread)} could not be checked"
    if any(one.skipped is None and one.kind not in ("capture", "record") for one in report.inputs):
        left = f", and there is no evidence of {missing} of {_least(report)}{expected} ranks" if missing > 0 else ""
        return f"the run failed, but the inputs do not show what failed first{left}"
    unknown = [result.reason for result in report.results if result.status.value == "unknown" and result.reason]
    return unknown[0] if unknown else "required facts are missing"
