"""Marks of the outcome of a run: last step of each process, orderly end, lines like errors.

No check needs them; :mod:`doctor.postmortem.run_outcome` uses them if no check found anything.

Marks do not depend on one program: they are progress bars of tqdm and rich, counters named step, iteration, batch or
epoch, levels of loggers, names of exceptions, and messages of shells, the C library and the kernel about a process that
ended.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from doctor.analysis.logs.error_lines import END, ERROR, NAN, STEP
from doctor.core.facts import Event
from doctor.core.facts.log_events import LONGEST
from doctor.knowledge.linear_regex import linear, loose
from doctor.postmortem.logs.prefixes import LineOrigin, PrefixedLine
from doctor.postmortem.logs.rank_attribution import LogProcesses

PREFIX = "mark."
"""Prefix of the kinds of marks, which are kept separate from other events."""

MOST_ERRORS = 200
"""Maximum number of lines like errors; the first ones are kept."""
MOST_OF_ONE = 20
"""Maximum number of them from one process."""
LONGEST_READ = 2000
"""Maximum characters of a line that are read."""
MOST_ORIGINS = 4096
"""Maximum number of processes whose last step is kept."""

# tqdm: "37/370 [00:10<01:31, 3.6it/s]"; rich, as Lightning draws it: "37/370 0:00:10 • 0:01:31 3.5it/s".
_BAR = re.compile(
    r"(?<![\d.:/])(?P<done>\d{1,12})/(?P<total>\d{1,12})\s{1,4}"
    r"(?:\[(?:\d{1,4}:)?\d{1,3}:\d\d<|\d{1,4}:\d\d:\d\d • )"
)
_NAME_OF_BAR = 120
"""Characters before the count of a bar that may contain its name."""
_OF_STEPS = re.compile(
    r"(?<![\w-])(?:global[_ ])?(?P<unit>step|iteration|iter|batch|update)\b(?! ?size)[\"']?\s{0,4}[:=#\[(]{0,2}\s{0,4}"
    r"(?P<n>\d{1,12})(?:\s?(?:/|of)\s?(?P<of>\d{1,12}))?(?![\d.]*\w)",
    re.IGNORECASE,
)
_OF_EPOCHS = re.compile(
    r"(?<![\w-])epoch\b[\"']?\s{0,4}[:=#\[(]{0,2}\s{0,4}(?P<n>\d{1,7})(?:\.\d{1,9})?(?:\s?(?:/|of)\s?(?P<of>\d{1,7}))?",
    re.IGNORECASE,
)
_LOSS = re.compile(r"(?i)loss\w{0,20}[\"']?\s{0,4}[:=]")
_PREPARATION = re.compile(
    r"(?i)\b(?:sanity|valid\w*|eval\w*|test\w*|predict\w*|infer\w*|load\w*|download\w*|map|filter\w*|tokeni\w*|generat\w*|"
    r"prepar\w*|process\w*|sav\w*|cach\w*|shards?|split|fetch\w*|extract\w*|index\w*|build\w*|copy\w*|convert\w*|warm\w*)\b"
)
"""Names of progress bars that are not of the training itself."""

_LEVEL = re.compile(
    r"(?:^|[\s\[(|:<])(?:ERROR|FATAL|CRITICAL|PANIC|EMERG|SEVERE)(?=$|[\s\]):|>,-])|\[[EF](?:\d{3,4})? |^[EF]\d{4} "
    r"|(?:^|: )(?:fatal|panic|error|Fatal|Error|Panic)\b(?: error)?(?: \w+)?\s?:(?! ?[-+]?[\d.])"
)
"""An error by the level that a logger, a kernel or a compiler prints."""
_RAISED = re.compile(
    r"(?:[a-z0-9_](?:Error|Exception|Interrupt)|(?<!\w)(?:OS|IO)Error)(?=:|\s{0,9}$|\()|(?:^|\s)Exception: "
)
_ENDED_BADLY = re.compile(
    r"terminate called |^\s*what\(\):|Assertion [`'\"].{0,300}failed|\bassert \(.{1,200}\) failed"
    r"|\(core dumped\)|Segmentation fault"
    r"|(?<!\w)Bus error|command not found|: not found$|No module named|an't open file"
    r"|annot open (?:file|shared object)|Illegal instruction|stack smashing detected|double free or corruption"
    r"|(?:exit|Exit|return)(?:ed)?(?: with)?(?: exit)? ?(?:[cC]ode|status)[ :=]{1,3}-?[1-9]"
    r"|^(?:[\w./-]+: (?:line \d+: )?)?(?:\d+ )?(?:Killed|Aborted|Terminated)\b|NCCL WARN "
    r"|\bpanicked at |: line \d{1,7}: syntax error |\*\*\* An error occurred in MPI_|MPI_ERRORS_ARE_FATAL"
    r"|^ninja: build stopped: |BUG: unable to handle"
    r"|: (?:No space left on device|Disk quota exceeded|Input/output error|Read-only file system|Stale file handle"
    r"|Cannot allocate memory|File too large)$"
)
"""Messages of shells, the C library, C++ and Python's launcher about a process that failed or did not start."""
_WEAK = re.compile(
    r"(?i)(?<![\w/])(?:failed|failure|timed out|time-?out (?:after|exceeded|expired|in|at|of)|abort(?:ed|ing)|unable to"
    r"|died|(?:is|was|are) dead|crashed|unexpectedly (?:exit\w*|end\w*|terminat\w*|clos\w*)"
    r"|cannot|can't|could not|refused|denied|no such file or directory|out of memory|error)\b(?!\s?[:=]\s?[-+]?[\d.])"
)
"""Words of errors, unless they are part of a path."""
_NO_ERROR = re.compile(
    r"(?i)\b(?:no|without|0|zero) (?:errors?|failures?|failed)\b|\berrors?\s?[:=]\s?[-+]?\d|ErrorHandler|error[_ ]rate"
    r"|_error\b|Warning:|Detected 0 "
)
_HANDLED = re.compile(
    r"(?i)\b(?:retrying|will retry|skipp(?:ed|ing)|ignor(?:ed|ing)|falling back|fallback|no longer reported)\b"
)
"""Words of a process that handled an error and continues."""
_MILD = re.compile(r"NCCL (?:INFO|TRACE)\b|NCCL WARN Failed to open libibverbs|\b[Ww]arning: |^WARNING\b|\bNon-fatal\b")
"""A message below the level of errors, which may quote the text of one: NCCL's search for optional plugins does. NCCL
before 2.9 reports a missing libibverbs as a warning (src/misc/ibvwrap.cc) and uses sockets."""
_NAN = re.compile(
    r"(?i)(?:loss\w{0,20}|grad(?:ient)?[ _]?norm)[\"']?\s{0,4}[:=]?\s{0,4}(?:is )?[\"'(]{0,2}(?:tensor\()?[-+]?"
    r"(?:nan|inf)\b"
)

_ENDED = re.compile(
    r"(?i)\b(?:training|fine-?tuning|pre-?training|the run|run|job|experiment) (?:loop )?(?:is |has |was |has been )?"
    r"(?:complete[d]?|finished|done|ended)\b(?! (?:epoch|step|with (?:error|exit code [1-9])|un))"
    r"|\b(?:finished|completed|done) (?:with )?(?:the )?(?:training|fine-?tuning|pre-?training)\b"
    r"|\btraining (?:has )?succeeded\b|\bjob '?[\w.-]{1,80}'? succeeded\b"
    r"|(?:exit(?:ed)?|return)(?: with)?(?: exit)?[ _]?(?:code|status)[ :=]{1,9}0\b(?![.:]\d*[1-9])"
    r"|\btrain_runtime\s{1,40}=|\b(?:total|overall) training (?:time|speed):|^training time:? [\d:]{4,12}$"
    r"|\bprocess \d{1,10} exits successfully|^\d{1,7} epochs completed in\b|^\*{3} best metric:"
    r"|^State\s?: COMPLETED\b|\bCOMPLETED +0:0\b|^Successfully completed\.?$|\bExit_status ?= ?0\b"
)
"""A trainer, scheduler, launcher or shell that reports the end of a run without an error: "Exit Code: 0" (kubectl, GNU
time, seff), "State: COMPLETED" (seff), "COMPLETED 0:0" (sacct), "Successfully completed." (LSF), "Exit_status=0" (PBS),
"Process 1 exits successfully" (DeepSpeed), "Total training time:" (Detectron2), "train_runtime = " (Transformers)."""
_ANNOUNCED = re.compile(
    r"(?i)\b(?:when|until|till|after|once|if|unless|before|while|as soon as|is|not|never)\s+(?:[\w.'-]{1,20}\s+){0,3}$"
)
"""Words before an end that make it a condition or a question: "saved when training is complete"."""
_DENIED = re.compile(
    r"(?i)^[\s:=(\[]{0,4}(?:false|not?)\b|^\s?\?|^ (?:for|to|at) \d\d?(?:\.\d+)?\s?%|\b\d{1,9} of (?!\d{1,9} epochs)\d"
    r"|\b(?:early(?!.{0,9}stop)|premature|abnormal|unsuccess|unexpect|unclean|partial|interrupt|cancel|abort|kill|crash)"
    r"|\b(?:but|time-?out|timed out|preempted|fail\w{0,4}|errors?|exceptions?)\b(?!\s?[:=]\s?0\b)"
    r"|\b(?:status|code)[ :=]{1,3}[1-9]"
)
"""Words after an end that negate it: "training complete: False", "job finished: FAILED", "ended prematurely"."""

# RE2 searches a line 10 to 100 times as fast as re does, and most lines are not marks.
_ANY = linear("|".join(loose(one.pattern) for one in (_LEVEL, _RAISED, _ENDED_BADLY, _WEAK, _NAN, _ENDED)))
_MAY_HAVE_ENDED = linear(loose(_ENDED.pattern))


class Marks:
    """The marks of one log. Their number is bounded."""

    def __init__(self) -> None:
        self._steps: dict[tuple[LineOrigin, int | None], _Mark] = {}
        self._ends: dict[tuple[str, LineOrigin, int | None], _Mark] = {}
        self._errors: list[_Mark] = []
        self._by_origin: dict[LineOrigin, int] = {}
        self._began_again: set[tuple[LineOrigin, int | None]] = set()

    def read(self, parsed: PrefixedLine, whole: str, line: int) -> bool:
        """Process a line with a cue; return whether it is a mark.

        ``whole``: the line with its prefixes, because "step 3:" may be taken for one.
        """
        marks = [(*_mark_of(text, parsed.mild), text) for text in _beginnings(parsed, whole)]
        # Without its prefix, a line may lack the level that makes it an error.
        found = sorted(
            (mark for mark in marks if mark[0]), key=lambda mark: mark[0] == ERROR and "strong" not in mark[1]
        )
        for kind, values, text in found[:1]:
            store = self._end if kind == END else self._error
            store(_Mark(kind, text[:LONGEST], line, parsed, values))
        return bool(found)

    def read_step(self, parsed: PrefixedLine, whole: str, line: int) -> bool:
        """Process a line that may count steps; return whether it does."""
        steps = ((_step_of(text), text) for text in _beginnings(parsed, whole))
        values, text = next((step for step in steps if step[0]), ({}, ""))
        if values:
            self._step(_Mark(STEP, text[:LONGEST], line, parsed, values))
        return bool(values)

    def _step(self, mark: _Mark) -> None:
        key = (mark.parsed.origin, mark.parsed.weak_rank)
        before = self._steps.get(key)
        if before is None and len(self._steps) >= MOST_ORIGINS:
            return
        is_complete = mark.values.pop("completed", "") != ""
        if before is not None and before.line > mark.line:
            return
        if before is not None:
            mark.count = before.count + 1
            mark.earlier_at = before.parsed.at if before.parsed.at != mark.parsed.at else before.earlier_at
            if _done(mark) < _done(before):
                self._began_again.add(key)
        mark.is_complete = is_complete
        self._steps[key] = mark
        # A bar that began again counts the batches of an epoch, so its end is not that of the run.
        if is_complete and (key not in self._began_again or "epoch" in mark.values):
            self._end(_Mark(END, mark.text, mark.line, mark.parsed, {"bar": "1"}))
        else:
            self._ends.pop(("bar", *key), None)

    def _end(self, mark: _Mark) -> None:
        if len(self._ends) < MOST_ORIGINS:
            how = "bar" if "bar" in mark.values else "words"
            self._ends[how, mark.parsed.origin, mark.parsed.weak_rank] = mark

    def _error(self, mark: _Mark) -> None:
        count = self._by_origin[mark.parsed.origin] = self._by_origin.get(mark.parsed.origin, 0) + 1
        if len(self._errors) < MOST_ERRORS and count <= MOST_OF_ONE:
            self._errors.append(mark)

    def events(self, file: str, processes: LogProcesses) -> Iterator[Event]:
        """Return all marks by line."""
        marks = (*self._steps.values(), *self._ends.values(), *self._errors)
        return (mark.event(file, processes) for mark in sorted(marks, key=lambda one: one.line))


def _beginnings(parsed: PrefixedLine, whole: str) -> Iterable[str]:
    """Return the line without and with its prefixes; the beginning of a very long line suffices."""
    return dict.fromkeys((parsed.text.strip()[:LONGEST_READ], whole.strip()[:LONGEST_READ]))


@dataclass(slots=True)
class _Mark:
    """A line, and the number of lines of its kind that its process wrote."""

    kind: str
    text: str
    line: int
    parsed: PrefixedLine
    values: dict[str, str]
    count: int = 1
    earlier_at: float | None = None
    is_complete: bool = False

    def event(self, file: str, processes: LogProcesses) -> Event:
        earlier = {} if self.earlier_at is None else {"earlier_at": repr(self.earlier_at)}
        return Event(
            self.kind,
            self.text,
            file,
            self.line,
            **processes.of(self.parsed.origin, self.parsed.weak_rank)._asdict(),
            at=self.parsed.at,
            values=tuple({**self.values, **earlier}.items()),
            count=self.count,
        )


def _done(mark: _Mark) -> int:
    counter = mark.values.get("batch") or mark.values.get("step") or "0"
    return int(counter.partition("/")[0])


def _mark_of(text: str, mild: bool) -> tuple[str, dict[str, str]]:
    if _ANY.search(text) is None:
        return "", {}
    if ("oss" in text or "norm" in text) and _NAN.search(text):
        return NAN, {"strong": "1"}
    strength = "" if mild else _strength(text)
    if strength != "strong" and _MAY_HAVE_ENDED.search(text) and (found := _ENDED.search(text)):
        is_announced = _ANNOUNCED.search(text[max(found.start() - 80, 0) : found.start()])
        if not is_announced and not _DENIED.search(_NO_ERROR.sub("", text[found.end() :])):
            return END, {}
    return (ERROR, {strength: "1"}) if strength else ("", {})


def _strength(text: str) -> str:
    is_mild = _MILD.search(text) is not None
    if not is_mild and _ENDED_BADLY.search(text):
        return "strong"
    if _NO_ERROR.search(text):
        return ""
    if not is_mild and (_LEVEL.search(text) or _RAISED.search(text)):
        return "weak" if _HANDLED.search(text) else "strong"
    return "weak" if _WEAK.search(text) else ""


def _step_of(text: str) -> dict[str, str]:
    epoch, step, bar = _OF_EPOCHS.search(text), _OF_STEPS.search(text), _BAR.search(text)
    if bar and _PREPARATION.search(text[max(bar.start() - _NAME_OF_BAR, 0) : bar.start()]):
        return {}
    values: dict[str, str] = {}
    if epoch:
        values["epoch"] = epoch["n"] + (f"/{epoch['of']}" if epoch["of"] else "")
    if bar:
        values["batch"] = f"{bar['done']}/{bar['total']}"
    elif step:
        values["step" if step["unit"].lower() != "batch" else "batch"] = step["n"] + (
            f"/{step['of']}" if step["of"] else ""
        )
    elif not epoch:
        return {}
    if _is_complete(epoch, step, bar, has_loss=_LOSS.search(text) is not None):
        values["completed"] = "1"
    return values


_Match = re.Match[str]


def _is_complete(epoch: _Match | None, step: _Match | None, bar: _Match | None, *, has_loss: bool) -> bool:
    """Return whether every counter of a line has reached its end.

    An epoch without a total may not be the last one, and a line with only an epoch may be its first.
    """
    counters = [(one["n"], one["of"]) for one in (epoch, step) if one]
    counters += [(bar["done"], bar["total"])] if bar else []
    if any(not of or int(done) != int(of) for done, of in counters):
        return False
    return bar is not None or step is not None or has_loss
