"""Work of one rank while the others waited, from logs: progress bars outside of training, and messages near them."""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from doctor.analysis.logs.root_event import EXCEPTION, TIMED_OUT, nature_of_exception
from doctor.facts import Event, LogEvidence

BARS = ("run.bar", "run.bar_named")
LIMITS = (600.0, 1800.0)
"""Default timeouts of process groups in seconds: NCCL's since torch 2.2, and that of all other backends."""
REACHED = 0.9
"""Share of the limit from which the duration of the work explains the timeout."""
AT = 0.015
"""Largest deviation from a limit, as a share of it, at which a bar counts as ended by that timeout."""
CLOSE = 15
"""Lines before a timeout within which a message shows what a rank was doing when the others began to wait."""

_TIMEOUTS = (
    *TIMED_OUT,
    "torch.nccl.storekey",
    "torch.nccl.init_timeout",
    "torch.monitored_barrier.nonzero",
)
_FIRST = frozenset(
    {"main_process_first", "local_main_process_first", "torch_distributed_zero_first", "rank_zero_first"}
)
"""Functions in which all ranks but the first wait until it has done some work for all."""
_KINDS = (
    ("evaluating", r"(?i)evaluat|validati"),
    ("saving", r"(?i)sav(?:e|ing)\b"),
    ("downloading", r"(?i)download"),
    ("reading", r"(?i)checkpoint shards|safetensors|loading (?:weights|checkpoint)"),
    ("tokenizing", r"(?i)tokeni[sz]|^map\b|^running \w+ on dataset"),
)


class BusyRank(msgspec.Struct, frozen=True):
    """Work of one rank. ``kind``: a key of the check's fixes; ``text`` of the message itself; ``events``: the evidence,
    the work first; ``rank``: ``None`` if unknown; ``seconds`` since it began, and ``limit`` in seconds after which the
    others timed out; ``confidence`` that it caused the timeout."""

    kind: str
    text: str
    events: tuple[Event, ...]
    rank: int | None
    seconds: float | None
    limit: float | None
    confidence: float


def busy_while_others_waited(evidence: LogEvidence) -> BusyRank | None:
    """The work that most probably caused a timeout, if the log shows both."""
    raised = (one for one in evidence.of(EXCEPTION) if nature_of_exception(one) == "timeout")
    waits = (*evidence.of(*_TIMEOUTS), *raised)
    firsts = tuple(one for one in evidence.of(EXCEPTION) if any(frame.function in _FIRST for frame in one.frames))
    found = [*_by_bars(evidence, waits, firsts), *_by_messages(evidence, waits)]
    if waits and firsts:
        events, text = (*firsts[:1], *waits[:2]), "the work that all others wait for"
        found.append(BusyRank("working", text, events, 0, None, _limit(waits), 0.7))
    return max(found, key=lambda busy: busy.confidence, default=None)


def _by_bars(evidence: LogEvidence, waits: tuple[Event, ...], firsts: tuple[Event, ...]) -> Iterable[BusyRank]:
    limit = _limit(waits)
    done = {
        (bar.file, bar.rank, bar.value("total")): seconds_of(bar.value("elapsed") or "") or 0.0
        for bar in evidence.of(*BARS)
        if bar.value("percent") == "100"
    }
    before = sum(done.values())
    newest: dict[tuple[str, int | None, str], Event] = {}
    for event in sorted(evidence.of(*BARS), key=lambda bar: (bar.line, seconds_of(bar.value("elapsed") or "") or 0)):
        newest[event.file, event.rank, event.value("words") or ""] = event
    for bar in newest.values():
        if bar.value("percent") == "100" or bar.value("left") == "00:00":
            continue
        seconds = seconds_of(bar.value("elapsed") or "")
        sure = _confidence(seconds, before, limit, bool(waits), bool(firsts)) if seconds is not None else 0.0
        if sure:
            rank = bar.rank if bar.rank is not None else 0 if firsts else None
            text = (bar.value("words") or "").strip() or "a long piece of work"
            yield BusyRank(_kind(text), text, (bar, *firsts[:1], *waits[:2]), rank, seconds, limit, sure)


def _confidence(seconds: float, before: float, limit: float | None, waits: bool, firsts: bool) -> float:
    """A bar that stopped much earlier belongs to a rank that was waiting too. ``before``: seconds of other work."""
    limits = (limit,) if limit else LIMITS
    if firsts:
        return 0.85 if any(REACHED * one <= seconds for one in limits) else 0.75
    if waits:
        if any(REACHED * one <= seconds for one in limits):
            return 0.9
        return 0.7 if any(REACHED * one <= seconds + before for one in limits) else 0.0
    # No rank reported a wait, but the bar stopped at a default timeout.
    return 0.4 if any(abs(seconds - one) <= AT * one for one in LIMITS) else 0.0


def _by_messages(evidence: LogEvidence, waits: tuple[Event, ...]) -> Iterable[BusyRank]:
    """From messages that announce long work, at about the timeout before a rank timed out."""
    limit = _limit(waits)
    for event in evidence.of("run.busy"):
        text = event.value("words") or ""
        for wait in waits:
            gap = wait.at - event.at if wait.at is not None and event.at is not None else None
            by_time = gap is not None and limit is not None and REACHED * limit <= gap <= 1.2 * limit
            by_line = gap is None and wait.file == event.file and 0 < wait.line - event.line <= CLOSE
            if by_time or by_line:
                yield BusyRank(_kind(text), text, (event, wait), event.rank, gap, limit, 0.75 if by_time else 0.45)
                break


def _limit(waits: Iterable[Event]) -> float | None:
    for wait in waits:
        milliseconds = wait.value("timeout") or wait.value("ms")
        if milliseconds and milliseconds.isdigit():
            return int(milliseconds) / 1000
    return None


def _kind(text: str) -> str:
    return next((kind for kind, pattern in _KINDS if re.search(pattern, text)), "working")


def seconds_of(clock: str) -> float | None:
    """``30:01`` and ``1:02:03`` as seconds."""
    parts = clock.split(":")
    if not all(part.isdigit() for part in parts):
        return None
    return float(sum(int(part) * 60**place for place, part in enumerate(reversed(parts))))
