"""Small words that all reports share: ranges of ranks, quantities, places."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.machinery import all_suffixes
from typing import Any

import msgspec

from doctor.core.decoding import prepared
from doctor.core.finding import Severity, Status
from doctor.core.job import UNKNOWN_HOST
from doctor.core.report_document import CheckResult, Report, ReportFinding, RunOutcome
from doctor.core.text import byte_size

_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""What a terminal obeys instead of showing it, and what turns the direction of writing; not tabs and line breaks."""

_CODE = re.compile("(?<!`)(`(?!`)[^`]+`)(?!`)")
"""Between single backticks: a run of them means something else to Markdown."""


def spelt_out(text: str) -> str:
    r"""``text`` with control characters as ``\x1b``: a host name of a capture must not steer the reader's terminal."""
    return _UNPRINTABLE.sub(lambda match: ascii(match[0])[1:-1], text)


def as_json(document: object, indent: int = 2) -> str:
    """A document as JSON that a terminal can show: what it would obey is written by JSON's own escapes."""
    return escaped(msgspec.json.format(msgspec.json.encode(document), indent=indent).decode())


def escaped(text: str) -> str:
    r"""``text``, which is JSON, with the controls that JSON lets stand (C1, bidirectional ones) as ``\u009b``."""
    return _UNPRINTABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def printable(report: Report) -> Report:
    """The report with every text spelt out; JSON alone shows them as they are, by its own escapes."""
    return msgspec.convert(_printable(msgspec.to_builtins(report)), prepared(Report))


def _printable(value: Any) -> Any:
    if isinstance(value, str):
        return spelt_out(value)
    if isinstance(value, dict):
        return {_printable(key): _printable(inner) for key, inner in value.items()}
    return [_printable(item) for item in value] if isinstance(value, (list, tuple)) else value


def explaining(result: CheckResult) -> str:
    """The command that explains a check: one from a file is known to those alone who name the file."""
    origin = result.origin or ""
    plugin = f" --plugin {shlex.quote(origin)}" if origin.endswith(tuple(all_suffixes())) else ""
    return f"doctor explain {result.id}{plugin}"


def line_of(text: str) -> str:
    """``text`` as one line of Markdown in which nothing but code is taken for markup, links or names of people."""
    return "".join(part if is_code else _prose(part) for is_code, part in _parts(text))


def cell(text: str) -> str:
    """``text`` as a cell of a table in Markdown."""
    parts = (part.replace("\\", "\\\\") if is_code else _prose(part) for is_code, part in _parts(text))
    return "".join(parts).replace("|", "\\|")


def _parts(text: str) -> Iterator[tuple[bool, str]]:
    """Code and what is between. Addresses are shown as code: GitHub and GitLab make links of bare ones, and a line of a
    log is no place to be sent anywhere from."""
    for position, part in enumerate(_CODE.split(" ".join(text.split()))):
        if position % 2:
            yield True, part
            continue
        end = 0
        for match in _ADDRESS.finditer(part):
            yield False, part[end : match.start()]
            yield True, f"`{match[0]}`"
            end = match.end()
        yield False, part[end:]


_ADDRESS = re.compile(r"(?:https?://|ftp://|www\.)[^\s`]+|[\w.+-]{1,64}@[\w-]{1,63}\.[\w.-]{1,190}", re.IGNORECASE)
"""What GitHub's Markdown makes a link of without any markup (spec of GFM, extended autolinks)."""
_MARKUP = re.compile(r"[\\`<*&]|(?<=\])[(\[:]")
"""What begins code, HTML, a character reference or emphasis, and what makes a link of a word in brackets."""
_REFERENCES = {"<": "&lt;", "&": "&amp;"}
_MENTION = re.compile(r"(?<![\w`])@(?=\w)")


def _prose(text: str) -> str:
    plain = _MARKUP.sub(lambda match: _REFERENCES.get(match[0]) or f"\\{match[0]}", text)
    # A zero-width space: a forge would tell the person of that name.
    return _MENTION.sub("@\u200b", plain)


def fix_parts(fix: str) -> tuple[str, list[str]]:
    """The prose of a fix and the commands below it. A fix of several lines holds one command a line, below a line of
    prose that ends with a colon, if there is one."""
    first, *rest = fix.split("\n")
    if not rest:
        return ("", [fix]) if _BARE_COMMAND.fullmatch(fix) else (fix, [])
    return (first, rest) if first.endswith(":") else ("", [first, *rest])


_BARE_COMMAND = re.compile(r"(?:export|unset|sudo|pip|rm|mkdir|chmod) (?:[^`,:]|[,:](?=\S))*")
"""A fix that is one command and nothing else: without code marks, and without a comma or colon before a blank."""


def ranges(numbers: Iterable[int]) -> str:
    """``0-7,9`` for sorted or unsorted whole numbers."""
    spans: list[list[int]] = []
    for number in sorted(set(numbers)):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)


def some(words: Sequence[str], most: int = 4) -> str:
    """The first few of many words."""
    shown = ", ".join(words[:most])
    return f"{shown} and {len(words) - most} more" if len(words) > most else shown


def place(finding: ReportFinding, report: Report) -> str:
    """``ranks 0-7 (node0)``: who is to blame; a job of one process is named by its host alone, what is found in a file
    by its line."""
    if report.job is None and finding.source is not None:
        return f"{finding.source.file}:{finding.source.line}" if finding.source.line else finding.source.file
    hosts = some(named_hosts(finding))
    if _is_one_process(report):
        return hosts or "this process"
    if not finding.ranks:
        return hosts or "the whole job"
    word = "rank" if len(finding.ranks) == 1 else "ranks"
    return f"{word} {ranges(finding.ranks)}" + (f" ({hosts})" if hosts else "")


def _is_one_process(report: Report) -> bool:
    """Whether it is about a process of no job, that was looked at itself."""
    if report.job is None or report.job.world_size != 1 or report.coverage.ranks_seen != 1:
        return False
    return not any(host.name == UNKNOWN_HOST for host in report.job.hosts)


def named_hosts(finding: ReportFinding) -> list[str]:
    """The hosts that a finding names, those that nobody knows left out."""
    return [host for host in finding.hosts if host != UNKNOWN_HOST]


def evidence_lines(evidence: Mapping[str, object]) -> list[str]:
    """One ``name: value`` a line, with sizes in units that people read. What is empty is left out; where ranks stand
    takes a line a rank, and a line that was read takes one of its own, with its file and line."""
    told = {name: value for name, value in evidence.items() if value not in ("", (), [], {})}
    return [line for name, value in told.items() for line in _evidence(name, value)]


def _evidence(name: str, value: object) -> list[str]:
    if name == "where" and isinstance(value, Mapping):
        return [f"rank {rank}: {_value(name, place)}" for rank, place in value.items()]
    if name == "said" and isinstance(value, (list, tuple)):
        return [str(line) for line in value]
    return [f"{_label(name)}: {_value(name, value)}"]


def _label(name: str) -> str:
    """``free_bytes`` in words; names of variables stay as they are."""
    return name if name.isupper() else name.removesuffix("_bytes").replace("_", " ")


def _value(name: str, value: object) -> str:
    if value is None:
        return "unknown"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name.endswith("_bytes") and isinstance(value, (int, float)):
        return byte_size(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={_value(str(key), inner)}" for key, inner in value.items())
    if isinstance(value, (list, tuple)):
        return _sequence(name, value)
    return str(value)


def _sequence(name: str, values: Sequence[object]) -> str:
    if "rank" in name and values and all(isinstance(item, int) for item in values):
        return ranges(item for item in values if isinstance(item, int))
    return some([_value(name, item) for item in values], most=12) or "none"


LONGEST = 240
"""Characters of a line of evidence that a terminal shows."""


def shortened(line: str) -> str:
    """The begin of a line and its end, where it is long: a message says first what, and last why."""
    if len(line) <= LONGEST:
        return line
    tail = LONGEST // 3
    return f"{line[: LONGEST - tail - 3]} … {line[-tail:]}"


def processes(report: Report) -> str:
    """``8 ranks``; ``1 process`` of a job of its own."""
    if report.job is None or not report.job.world_size:
        return "no rank told"
    return "1 process" if report.job.world_size == 1 else f"{report.job.world_size} ranks"


def counts_line(report: Report) -> str:
    """``2 errors, 1 warning (1 ignored)`` over the findings of a report."""
    findings = [finding for result in report.results for finding in result.findings]
    parts = []
    for severity in ("error", "warning", "info"):
        count = sum(finding.severity.value == severity and finding.stands for finding in findings)
        if count:
            parts.append(f"{count} {severity if severity == 'info' or count == 1 else severity + 's'}")
    ignored = sum(not finding.stands for finding in findings)
    return (", ".join(parts) or "no finding") + (f" ({ignored} ignored)" if ignored else "")


def coverage_line(report: Report) -> str:
    """How many checks could speak, on how many ranks."""
    counts = report.coverage.checks
    judged = counts["pass"] + counts["fail"]
    checks = (
        f"{judged} of {sum(counts.values())} checks judged, {counts['unknown']} unknown, "
        f"{counts['skip']} skipped, {counts['error']} crashed"
    )
    if report.job is None and not report.coverage.ranks_expected:
        return checks
    ranks = f"{report.coverage.ranks_seen} of {report.coverage.ranks_expected}"
    word = "rank" if report.coverage.ranks_expected == 1 else "ranks"
    return f"{checks}; {ranks} {word} seen"


def coverage_in_words(report: Report) -> str:
    """``14 of 139 checks applied``: what a report without findings rests on."""
    counts = report.coverage.checks
    total = sum(counts.values())
    return f"{counts['pass'] + counts['fail']} of {total} {'check' if total == 1 else 'checks'} applied"


def state_of(result: CheckResult) -> str:
    """The status of a check in a word and a color: of one that found something, the severity of its worst finding.
    Of one that raised ``crashed``, since ``error`` is a severity too."""
    if result.status is Status.FAIL:
        return result.severity.value
    if result.status is Status.ERROR:
        return "crashed"
    return "ignored" if result.findings and result.status is Status.PASS else result.status.value


def states_of(report: Report) -> dict[str, int]:
    """How many checks ended in each state, the gravest first."""
    counts = Counter(map(state_of, report.results))
    order = ("error", "warning", "crashed", "info", "unknown", "ignored", "pass", "skip")
    return {state: counts[state] for state in order if counts[state]}


def families(report: Report) -> dict[str, list[CheckResult]]:
    """The results by family, in the order of the report."""
    grouped: dict[str, list[CheckResult]] = {}
    for result in report.results:
        grouped.setdefault(result.family, []).append(result)
    return grouped


_LIVE = ("capture", "record")
"""Kinds of inputs that hold facts of ranks, and not only what is left of them."""


def unclear_outcome(report: Report) -> RunOutcome | None:
    """How the run ended, where that is why the report is inconclusive: nothing shows that it is healthy, and no finding
    tells what happened."""
    if report.verdict != "inconclusive" or report.outcome is None or report.outcome.is_orderly:
        return None
    findings = (finding for result in report.results for finding in result.findings)
    is_symptom = any(one.stands and one.severity is not Severity.INFO for one in findings)
    return None if is_symptom else report.outcome


def why_inconclusive(report: Report) -> str:
    """What stands in the way of a verdict."""
    missing, expected = report.coverage.ranks_expected - report.coverage.ranks_seen, report.coverage.ranks_expected
    crashed = [result.id for result in report.results if result.status is Status.ERROR or result.crash is not None]
    if missing > 0 and not report.inputs:
        return f"{missing} of {expected} ranks were not gathered"
    if crashed:
        return f"{some(crashed)} crashed"
    if (outcome := unclear_outcome(report)) is not None:
        return outcome.reason
    if unread := [one.path for one in report.inputs if one.decisive is True]:
        return f"{some(unread)} could not be checked"
    if any(one.skipped is None and one.kind not in _LIVE for one in report.inputs):
        left = f", and nothing is left of {missing} of {expected} ranks" if missing > 0 else ""
        return f"a failure is seen, nothing that was given tells what came first{left}"
    unknown = [result.reason for result in report.results if result.status.value == "unknown" and result.reason]
    return unknown[0] if unknown else "facts are missing that should be there"
