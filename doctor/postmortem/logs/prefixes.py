"""Parser of line prefixes of launchers, schedulers, containers and loggers: origin and time.

Prefixes occur in any order and number, so they are removed one by one from the left. Each form is one regular
expression, tried only on its first character. The rest is the message.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from doctor.knowledge.launcher_index import LOG_PREFIXES
from doctor.postmortem.logs.timestamps import AMERICAN, DATED_SYSLOG, ISO, SYSLOG, Calendar

MOST = 12
"""Maximum number of prefixes that are removed from one line."""


class LineOrigin(NamedTuple):
    """The process that logged a line, as far as the line names it.

    ``task``: number of a Slurm or MPI process, which is a rank unless these processes are launchers. ``tag``: any other
    name of a stream.
    """

    rank: int | None = None
    local_rank: int | None = None
    host: str | None = None
    pid: int | None = None
    task: int | None = None
    tag: str | None = None


UNKNOWN_ORIGIN = LineOrigin()


class PrefixedLine(NamedTuple):
    """A parsed line.

    ``text``: the line without prefixes that name origin or time. ``body``: also without logger, level and source
    location. ``weak_rank``: rank in a process group that seems to be the whole job. ``record``: a logger began a record
    here, so the line continues no other; ``mild``: the level is below error. ``message``: the field of a line of JSON
    that was read instead of it.
    """

    origin: LineOrigin
    at: float | None
    text: str
    body: str
    weak_rank: int | None = None
    record: bool = False
    mild: bool = False
    message: str | None = None


class PrefixStyle(NamedTuple):
    """Prefixes accepted only if nearly all lines have one.

    ``3: a``, ``[3] a``, ``node7: a``; ``pods``: ``pod container a`` (stern); ``streams``: ``group/name a``
    (``aws logs tail``); ``barred``: ``name | a`` or ``name || a`` (docker compose, Determined, foreman).
    """

    numbered: bool = False
    bracketed: bool = False
    hosts: bool = False
    pods: bool = False
    streams: bool = False
    barred: bool = False


PLAIN = PrefixStyle()


@dataclass(slots=True)
class _PrefixFields:
    calendar: Calendar
    style: PrefixStyle
    rank: int | None = None
    local_rank: int | None = None
    host: str | None = None
    pid: int | None = None
    task: int | None = None
    tag: str | None = None
    weak: int | None = None
    at: float | None = None
    record: bool = False
    mild: bool = False
    message: str | None = None

    def result(self, text: str, body: str) -> PrefixedLine:
        origin = LineOrigin(self.rank, self.local_rank, self.host, self.pid, self.task, self.tag)
        return PrefixedLine(origin, self.at, text, body, self.weak, self.record, self.mild, self.message)


_Match = re.Match[str]
_Taker = Callable[[_PrefixFields, _Match], None]


class _PrefixForm(NamedTuple):
    """A form of prefix. ``soft``: it stays part of ``text``, as patterns of messages contain it."""

    pattern: re.Pattern[str]
    take: _Taker
    soft: bool = False
    when: str = ""


def _group_rank(parts: _PrefixFields, found: _Match) -> None:
    """Take the rank in a group from c10d's prefix: only the default group's are global."""
    group, name, rank = found["group"], found["name"], found["rank"]
    if name == "default_pg" or group == "0" or not (group or name):
        parts.weak = int(rank)


def _c10(parts: _PrefixFields, found: _Match) -> None:
    parts.record = True
    parts.mild = found[0][1] not in "EF"
    if found[1]:
        parts.at = parts.calendar.yearless(int(found[1]), int(found[2]), found[3])


def _glog(parts: _PrefixFields, found: _Match) -> None:
    parts.record = True
    parts.mild = found[0][0] not in "EFC"
    year, month, day = found[1], int(found[2]), int(found[3])
    if year:
        parts.at = parts.calendar.dated(f"{year}-{month:02}-{day:02} {found[4]}")
    else:
        parts.at = parts.calendar.yearless(month, day, found[4])


def _dated(parts: _PrefixFields, found: _Match) -> None:
    parts.record = True
    parts.at = parts.calendar.dated(found[1]) or parts.at
    _named(parts, found)


def _stamped(parse: Callable[[Calendar, str], float | None]) -> _Taker:
    def take(parts: _PrefixFields, found: _Match) -> None:
        parts.record = True
        parts.at = parse(parts.calendar, found[1])
        _named(parts, found)

    return take


def _short(parts: _PrefixFields, found: _Match) -> None:
    parts.record = True
    parts.at = parts.calendar.yearless(int(found[1]), int(found[2]), found[3])


def _named(parts: _PrefixFields, found: _Match) -> None:
    """Set the fields that the groups of the pattern are named after."""
    for name, value in found.groupdict().items():
        if value is not None:
            setattr(parts, name, int(value) if name in _NUMBERS else value)


def _form(pattern: str, take: _Taker = _named, *, soft: bool = False, when: str = "") -> _PrefixForm:
    return _PrefixForm(re.compile(pattern), take, soft, when)


def _launcher_forms(first: str) -> tuple[_PrefixForm, ...]:
    return tuple(_form(pattern) for pattern in LOG_PREFIXES if pattern.startswith(f"\\{first}"))


def _begins(parts: _PrefixFields, found: _Match) -> None:
    parts.record = True


def _level(parts: _PrefixFields, found: _Match) -> None:
    parts.record = True
    parts.mild = _MILD.search(found[0]) is not None and _SEVERE.search(found[0]) is None


def _labels(parts: _PrefixFields, found: _Match) -> None:
    """Take the host from the labels of Loki, as ``logcli`` prints them."""
    parts.record = True
    parts.host = host_in(dict(_LABEL.findall(found[0]))) or parts.host


_LABEL = re.compile(r'(\w{1,64})="([^"]{0,512})"')
_LEVEL = r"(?:DEBUG|INFO|NOTICE|WARNING|WARN|ERROR|CRITICAL|FATAL|TRACE|SUCCESS|EXCEPTION)"
_LOWER = r"(?:debug|info|notice|warning|warn|error|critical|fatal|trace)"
_MILD = re.compile("TRACE|DEBUG|INFO|NOTICE|WARN|SUCCESS", re.IGNORECASE)
_SEVERE = re.compile("ERR|CRIT|FATAL|EXC", re.IGNORECASE)
_NUMBERS = frozenset({"rank", "local_rank", "pid", "task"})
_N = r"\d{1,7}"

_BRACKETS = (
    # torch since 2.3 (excepthook and c10 logging), Lightning ("[rank: 3] Seed set to 42"), and own ones.
    _form(rf"\[(?:rank|RANK|global_rank) ?[:=]? ?(?P<rank>{_N})\]:? ?"),
    _form(r"\[TC\]\[rank=(?P<rank>\d{1,7})\](?:\[name=(?P<name>[^\]]*)\])?(?P<group>)? ?", _group_rank, soft=True),
    _form(
        r"\[PG (?:ID )?(?P<group>\w+)(?: \([^)]*\))?(?: PG GUID \w*(?:\((?P<name>[^)]*)\))?)?(?: \((?:[^)]*)\))? "
        r"Rank (?P<rank>\d{1,7})\] ?",
        _group_rank,
        soft=True,
    ),
    _form(r"\[(?P<group>)?(?P<name>)?Rank (?P<rank>\d{1,7})\]:? ?", _group_rank, soft=True),
    *_launcher_forms("["),
    _form(
        r"\[[IWEFVD](?:(\d{1,2})(\d\d) (\d\d:\d\d:\d\d(?:\.\d{1,9})?))?(?: +\d{1,12}(?= ))?"
        r" ?[\w./+-]+:\d{1,7}\] ?(?:\[c10d\] ?)?",
        _c10,
    ),
    _form(rf"\[NeMo [A-Z] ({ISO})[^\]]*\] ?", _dated),
    _form(rf"\[({ISO})\]:? ?", _dated),
    _form(rf"\[({ISO})[ ,|][^\]]{{0,120}}\]:? ?", _dated),
    _form(rf"\[({AMERICAN})\]:? ?", _stamped(Calendar.american)),
    _form(rf"\[({DATED_SYSLOG})\] ?", _stamped(Calendar.dated_syslog)),
    _form(r"\[ *\d{1,9}\.\d{3,9}\](?:\[[ \w]*\])? ?", _begins),
    # UCX (ucs_log_default_handler): seconds, host, process and thread.
    _form(r"\[\d{10}\.\d{6}\] \[(?P<host>[\w.-]{1,255}):(?P<pid>\d{1,9}) ?:[\w-]{1,20}\] +", soft=True),
    # UCX (ucs_log_fatal_error): host, process, and the name or number and the id of the thread.
    _form(r"\[(?P<host>[\w.-]{1,255}):(?P<pid>\d{1,9}) {0,5}:[\w-]{1,20}:\d{1,9}\] +", soft=True),
    # A logger whose format is "[%(name)s, rank=%(rank)s]".
    _form(rf"\[[\w.]{{1,80}}, ?rank[=:] ?(?P<rank>{_N})\]:? ?", soft=True),
    _form(r"\[(?:pod/)?(?P<host>[a-z0-9][\w.-]*)/[\w.-]+\] "),
    _form(rf"\[(?P<task>{_N})\] ?", when="bracketed"),
    _form(rf"\[ ?(?:{_LEVEL}|{_LOWER}) *\]:? ?(?:- )?", _level, soft=True),
    _form(r"\[[\w./<>-]+:\d+(?::[\w<>]+)?\]:? ?", soft=True),
    _form(r"\[std(?:out|err)\]:?", soft=True),
    _form(r"\[(?:c10d|__main__|root|titan|[a-z_]\w*(?:\.\w+)+)\]:? ?(?:- )?", soft=True),
)
_STREAMS = (
    _form(r"(?P<host>[a-z0-9][a-z0-9.-]{0,252}) [a-z0-9][a-z0-9-]{0,62}(?: |$)", when="pods"),
    _form(r"[\w.-]{1,255}(?:/[\w.#-]{1,255}){0,8}/(?P<host>[\w.-]{1,255})(?: |$)", when="streams"),
    _form(r"(?P<tag>[\w./-]{1,64}) {1,40}\|{1,2}(?: |$)", when="barred"),
)
_DIGITS = (
    *_STREAMS,
    # Kubernetes: "2024-01-02T03:04:05.678901234Z stderr F text".
    _form(rf"({ISO}) std(?:out|err) [FP] ", _dated),
    _form(
        rf"({ISO}) (?!(?:{_LEVEL}|{_LOWER})\b)(?P<host>[\w.-]+) [A-Za-z_/][\w./@-]*(?:\[(?P<pid>\d{{1,9}})\])?: ",
        _dated,
    ),
    # torch_npu (formatErrorCode): time, process, device and rank; the rank is -1 if it is unknown.
    _form(
        rf"\d{{4}}-\d\d-\d\d-\d\d:\d\d:\d\d \(PID:(?P<pid>\d{{1,9}}), Device:-?\d+, RankID:(?P<rank>{_N})\) ", soft=True
    ),
    _form(rf"({ISO})(?:(?=[\s\]:|,-])|$)[\s:|,]*(?:- )?", _dated),
    _form(rf"({AMERICAN})[\s:|,]*(?:- )?", _stamped(Calendar.american)),
    _form(r"(\d\d)-(\d\d) (\d\d:\d\d:\d\d(?:[.,]\d{1,9})?) ", _short),
    _form(r"\d\d:\d\d:\d\d(?:[.,]\d{1,9})? (?:\| |- )?", _begins),
    # srun --label before the prefix of torch's excepthook.
    _form(rf"(?P<task>{_N}): (?=\[rank ?\d)", soft=True),
    _form(rf"(?P<task>{_N}): ?", when="numbered"),
    _form(r"(?P<host>\d{1,3}(?:\.\d{1,3}){3}): ", when="hosts"),
)
_LETTERS = (
    *_STREAMS,
    _form(r"[IWEFVC](\d{4})?(\d\d)(\d\d) (\d\d:\d\d:\d\d(?:\.\d{1,9})?) +\d+ [^\]\s]+\] ?(?:\[\d+/\d+\] ?)?", _glog),
    _form(rf"({SYSLOG}) (?P<host>[\w.:-]+) [\w./@()-]+(?:\[(?P<pid>\d{{1,9}})\])?: ", _stamped(Calendar.syslog)),
    _form(rf"({DATED_SYSLOG})(?::? |(?=\[))", _stamped(Calendar.dated_syslog)),
    _form(rf"{_LEVEL}:[\w.]+:", _level, soft=True),
    _form(
        rf"(?:[\w.$<>]+ (?:-|\|) )?{_LEVEL}\b *(?:[:|-] *)?(?:[\w./<>]+(?::[\w<>]+)*(?::\d+)? --? )*", _level, soft=True
    ),
    _form(r"std(?:out|err): ", soft=True),  # a program that prints the output of another
    # Megatron-LM (rerun_state_machine.py).
    _form(rf"Rank (?P<rank>{_N}), node (?P<host>[\w.-]{{1,255}}), device \d+, ", soft=True),
    # docker compose: the name of the container.
    _form(r"(?P<host>[\w.-]+-\d+) +\| "),
    _form(r"(?P<host>[A-Za-z][\w-]{0,100}\d[\w.-]{0,100}): ", when="hosts"),
    # vLLM: "ERROR 10-27 07:48:16 worker_base.py:464] ...".
    _form(r"[\w./-]+\.(?:py|cc|cpp|cu):\d+\] ?", soft=True),
    _form(r"what\(\): +", soft=True),
    # torchx: "trainer/3 ...".
    _form(r"(?P<tag>[a-z_]\w{0,40}/\d{1,6}) (?=\S)", soft=True),
)
_FORMS: dict[str, tuple[_PrefixForm, ...]] = {
    "[": _BRACKETS,
    "(": _launcher_forms("("),
    "{": (_form(r'\{(?:\w{1,64}="[^"]{0,512}",? ?){1,40}\} ?', _labels),),
    "<": (
        _form(r"<\d{1,3}>", _begins),
        # Determined: level, time, container, and the rank if there are several.
        _form(rf"<\w{{0,10}}> {{1,9}}\[({ISO})\] (?P<tag>[\w-]{{1,64}}) (?:\[rank=(?P<rank>{_N})\] )?\|\| ", _dated),
    ),
    " ": (_form(r" {1,8}what\(\): +", soft=True),),
    "|": (_form(rf"\| *(?:{_LEVEL} *\| *)?(?:[\w.]+:[\w<>]+:\d+ - )?", _level, soft=True),),
    "-": (_form(rf"- (?:[\w.]+ - )?{_LEVEL} - (?:[\w./]+ - [\w<>]+ - \d+ - )?", _level, soft=True),),
    **dict.fromkeys("0123456789", _DIGITS),
    **dict.fromkeys("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz_", _LETTERS),
}

# src/debug.cc of NCCL: host, process, thread, device, then "file:line (function)" for warnings.
_NCCL = re.compile(r"([^\s:\[\]]{1,255}):(\d{1,9}):\d{1,9} (?:\[-?\d+\] )?(?=.{0,200}NCCL )(?:\d+\.\d+ )?")
_NCCL_INSIDE = re.compile(
    r"^.{0,300}?[\s>\]:|](?P<host>[\w.-]{1,255}:\d{1,9}:\d{1,9} \[-?\d+\] (?:[\w./<>-]+:\d+ )?NCCL )"
)
_NCCL_MESSAGE = re.compile(r"(?:[\w./<>-]+:\d+ (?:\([^)]*\) )?)?NCCL (?:INFO|WARN|TRACE|ABORT|CALL|ERROR) ")
_NUMBERED = re.compile(r"\s{0,8}(\d{1,7}): ?")
_PROGRESS = re.compile(r"[^|]{0,300}?\d{1,3}%\|[^|]{0,300}\|[^\[\]]{0,80}\[[^\]]{0,400}\]")


def parse_line(line: str, calendar: Calendar, style: PrefixStyle = PLAIN) -> PrefixedLine:
    """Remove the prefixes from a line. Never raises."""
    parts = _PrefixFields(calendar, style)
    if "%|" in line and (bar := _PROGRESS.match(line)):
        line = line[bar.end() :].lstrip(" ") or line  # no separator is between a progress bar and a message
    if style.numbered and (task := _NUMBERED.match(line)):
        parts.task = int(task[1])
        line = line[task.end() :]
    return _parse(parts, line, depth=0)


def _parse(parts: _PrefixFields, line: str, depth: int) -> PrefixedLine:
    text, body = line, line
    hard = True
    for _ in range(MOST):
        if body.startswith("{") and depth < 2 and (inner := _unwrapped(parts, body)) is not None:
            parts.message = inner
            return _parse(parts, inner, depth + 1)
        if "NCCL " in body and _NCCL.match(body):
            return _nccl_prefix(parts, body)
        form, match = _first_form(parts.style, body)
        if form is None or match is None:
            if "NCCL " in body and (inside := _NCCL_INSIDE.search(body)):
                return _nccl_prefix(parts, body[inside.start("host") :])
            break
        form.take(parts, match)
        body = body[match.end() :]
        hard = hard and not form.soft
        if hard:
            text = body
    return parts.result(text, _after_nccl(body))


def _nccl_prefix(parts: _PrefixFields, body: str) -> PrefixedLine:
    found = _NCCL.match(body)
    if found:
        parts.host, parts.pid, parts.record = found[1], int(found[2]), True
        body = body[found.end() :]
    return parts.result(body, _after_nccl(body))


def _after_nccl(text: str) -> str:
    found = _NCCL_MESSAGE.match(text)
    return text[found.end() :] if found else text


def _first_form(style: PrefixStyle, body: str) -> tuple[_PrefixForm | None, _Match | None]:
    for form in _FORMS.get(body[:1], ()):
        if form.when and not getattr(style, form.when):
            continue
        match = form.pattern.match(body)
        if match and match.end():
            return form, match
    return None, None


TEXTS = ("log", "message", "@message", "msg", "MESSAGE", "text", "textPayload", "body", "line", "Line")
"""Fields of structured logs that hold the message."""
TIMES = ("time", "timestamp", "ts", "@timestamp", "asctime", "datetime", "date", "Time", "__REALTIME_TIMESTAMP")
_PODS = ("pod", "podName", "pod_name", "kubernetes_pod_name", "k8s_pod_name")
_HOSTS = ("hostname", "host", "_HOSTNAME", "instance", "nodeName", "node_name", "logStreamName", "@logStream")
_NESTED = ("labels", "stream", "kubernetes", "fields", "resource")
"""Fields with further fields about the origin."""


def _unwrapped(parts: _PrefixFields, line: str) -> str | None:
    """Return the message in a line of JSON, as docker, fluentd and structured loggers write it."""
    try:
        record = msgspec.json.decode(line.encode())
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    text = next((record[key] for key in TEXTS if isinstance(record.get(key), str)), None)
    if text is None:
        return None
    parts.at = time_in(record, parts.calendar) or parts.at
    parts.host = host_in(record) or parts.host
    ranks = (record[key] for key in ("rank", "global_rank") if type(record.get(key)) is int)
    parts.rank = next((rank for rank in ranks if 0 <= rank < 10_000_000), parts.rank)
    return str(text).rstrip()


def time_in(record: Mapping[str, object], calendar: Calendar) -> float | None:
    """Return the time in a record of a structured log, in seconds since the epoch."""
    for key in TIMES:
        value = record.get(key)
        if isinstance(value, str) and (at := calendar.dated(value)) is not None:
            return at
        if isinstance(value, str) and value.isdecimal() and len(value) < 20:
            value = int(value)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            # Seconds, milliseconds, microseconds or nanoseconds.
            seconds = next((value / unit for unit in (1, 1e3, 1e6, 1e9) if 1e8 < value / unit < 1e11), None)
            if seconds is not None:
                return seconds
    return None


def host_in(record: Mapping[str, object]) -> str | None:
    """Return the pod, else the host, that a record of a structured log names as its origin.

    A pod has its own host name, which NCCL and torchrun log.
    """
    nested = [inner for key in _NESTED if isinstance(inner := record.get(key), dict)]
    records = [record, *nested, *(inner for one in nested if isinstance(inner := one.get("labels"), dict))]
    names = (one.get(key) for keys in (_PODS, _HOSTS) for one in records for key in keys)
    found = next((name for name in names if isinstance(name, str) and name), None)
    return found.rpartition("/")[2] if found else None


_TASK_LINE = re.compile(r"\s{0,8}(\d{1,7}):(?: |$)")
_BRACKET_LINE = re.compile(r"\[(\d{1,7})\](?: |$)")
_HOST_LINE = re.compile(r"([A-Za-z][\w-]{0,100}\d[\w.-]{0,100}|\d{1,3}(?:\.\d{1,3}){3}):(?: |$)")
# Pods of a StatefulSet or an indexed Job end with a number, others with letters that Kubernetes draws.
_POD_LINE = re.compile(
    r"([a-z0-9][a-z0-9.-]{0,252}-(?:\d{1,6}|[bcdfghjklmnpqrstvwxz2456789]{5}) [a-z0-9][a-z0-9-]{0,62})(?: |$)"
)
_STREAM_LINE = re.compile(
    r"([\w.-]{1,255}(?:/[\w.#-]{1,255}){0,8}/(?:[\w.]{1,200}-[\w.-]{1,200}|[0-9a-f]{16,64}))(?: |$)"
)
_BARRED_LINE = re.compile(r"([\w./-]{1,64}) {1,40}\|{1,2}(?: |$)")
_COUNTED = 8
_MOST_LINES = 0.8
"""Minimum share of sampled lines with the same form of prefix."""


def style_of(sample: Iterable[str]) -> PrefixStyle:
    """Return the ambiguous prefixes that nearly all of these lines have."""
    lines = [line for line in sample if line.strip()]
    if len(lines) < 2:
        return PLAIN
    return PrefixStyle(
        numbered=_all_begin(_TASK_LINE, lines),
        bracketed=_all_begin(_BRACKET_LINE, lines),
        hosts=_all_begin(_HOST_LINE, lines),
        pods=_all_repeat(_POD_LINE, lines),
        streams=_all_repeat(_STREAM_LINE, lines),
        barred=_all_repeat(_BARRED_LINE, lines),
    )


def _all_repeat(form: re.Pattern[str], lines: list[str]) -> bool:
    """Return whether nearly all lines begin with one of a few names."""
    heads = [found[1] for line in lines if (found := form.match(line))]
    return len(heads) >= _MOST_LINES * len(lines) and 3 * len({*heads}) <= len(heads)


def _all_begin(form: re.Pattern[str], lines: list[str]) -> bool:
    """Return whether nearly all lines begin so. Numbers that only increase are line numbers."""
    heads = [found[1] for line in lines if (found := form.match(line))]
    if len(heads) < _MOST_LINES * len(lines):
        return False
    numbers = [int(head) for head in heads if head.isdigit()]
    return len(numbers) < _COUNTED or any(after <= before for before, after in itertools.pairwise(numbers))
