"""What logs tell of a rank that was busy with something else while the others waited: progress bars of work that is no
training, and the messages beside them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from doctor.analysis.logs.root_event import EXCEPTION, TIMED_OUT, nature_of_exception
from doctor.core.facts import Event, LogEvidence

BARS = ("run.bar", "run.bar_named")
LIMITS = (600.0, 1800.0)
"""Seconds after which process groups give up by default: NCCL's since torch 2.2, and all others."""
REACHED = 0.9
"""Share of the limit that the work has taken, from which it explains the time-out."""
AT = 0.015
"""Share of the limit by which a bar may be off it, to have been cut by those who gave up then."""
CLOSE = 15
"""Lines before a time-out within which a message tells what a rank was at when the others began to wait."""

_TIMEOUTS = (
    *TIMED_OUT,
    "torch.nccl.storekey",
    "run.storekey_misspelt",
    "torch.nccl.init_timeout",
    "torch.monitored_barrier.nonzero",
)
_FIRST = frozenset(
    {"main_process_first", "local_main_process_first", "torch_distributed_zero_first", "rank_zero_first"}
)
"""Functions in which all ranks but the first wait until it has done something for all."""
_KINDS = (
    ("evaluating", r"(?i)evaluat|validati"),
    ("saving", r"(?i)sav(?:e|ing)\b"),
    ("downloading", r"(?i)download"),
    ("reading", r"(?i)checkpoint shards|safetensors|loading (?:weights|checkpoint)"),
    ("tokenising", r"(?i)tokeni[sz]|^map\b|^running \w+ on dataset"),
)


class BusyRank(NamedTuple):
    """What a rank was busy with. ``kind``: a word for it; ``words`` of the message itself; ``events``: those that tell,
    what it was busy with first; ``rank``: ``None`` where it is not told; ``seconds`` that it had taken, and ``limit``
    after which the others gave up; ``confidence`` that the time-out comes from it."""

    kind: str
    words: str
    events: tuple[Event, ...]
    rank: int | None
    seconds: float | None
    limit: float | None
    confidence: float


def busy_while_others_waited(evidence: LogEvidence) -> BusyRank | None:
    """The work that ranks ran out of time for, where a log tells of both; the surest."""
    waits = _waits(evidence)
    firsts = tuple(one for one in evidence.of(EXCEPTION) if _waits_for_first(one))
    found = [*_by_bars(evidence, waits, firsts), *_by_first(waits, firsts), *_by_messages(evidence, waits)]
    return max(found, key=lambda busy: busy.confidence, default=None)


def _waits(evidence: LogEvidence) -> tuple[Event, ...]:
    """Messages of ranks that waited for too long."""
    raised = (one for one in evidence.of(EXCEPTION) if nature_of_exception(one) == "timeout")
    return (*evidence.of(*_TIMEOUTS), *raised)


def _waits_for_first(event: Event) -> bool:
    return any(frame.function in _FIRST for frame in event.frames)


def _by_bars(evidence: LogEvidence, waits: tuple[Event, ...], firsts: tuple[Event, ...]) -> Iterable[BusyRank]:
    limit = _limit(waits)
    before = _seconds_before(evidence)
    for bar in _last_bars(evidence):
        seconds = seconds_of(bar.value("elapsed") or "")
        sure = _sureness(seconds, before, limit, bool(waits), bool(firsts)) if seconds is not None else 0.0
        if sure:
            rank = bar.rank if bar.rank is not None else 0 if firsts else None
            words = (bar.value("words") or "").strip() or "a long piece of work"
            yield BusyRank(_kind(words, "working"), words, (bar, *firsts[:1], *waits[:2]), rank, seconds, limit, sure)


def _sureness(seconds: float, before: float, limit: float | None, waits: bool, firsts: bool) -> float:
    """How surely a bar that stands after ``seconds``, and work of ``before`` seconds that was done, made others run out
    of time. A bar that stands at much less belongs to a rank that waited too: nobody moved it on."""
    limits = (limit,) if limit else LIMITS
    if firsts:
        return 0.85 if any(REACHED * one <= seconds for one in limits) else 0.75
    if waits:
        if any(REACHED * one <= seconds for one in limits):
            return 0.9
        return 0.7 if any(REACHED * one <= seconds + before for one in limits) else 0.0
    # Nothing tells of a wait; a bar that stopped just when the others gave up does by itself.
    return 0.4 if any(abs(seconds - one) <= AT * one for one in LIMITS) else 0.0


def _seconds_before(evidence: LogEvidence) -> float:
    """Seconds of all work that came to its end."""
    done = {
        (bar.file, bar.rank, bar.value("total")): seconds_of(bar.value("elapsed") or "") or 0.0
        for bar in evidence.of(*BARS)
        if bar.value("percent") == "100"
    }
    return sum(done.values())


def _last_bars(evidence: LogEvidence) -> list[Event]:
    """The newest state of each bar that was not at its end yet."""
    newest: dict[tuple[str, int | None, str], Event] = {}
    for event in sorted(evidence.of(*BARS), key=lambda bar: (bar.line, seconds_of(bar.value("elapsed") or "") or 0)):
        newest[event.file, event.rank, event.value("words") or ""] = event
    return [event for event in newest.values() if event.value("percent") != "100" and event.value("left") != "00:00"]


def _by_first(waits: tuple[Event, ...], firsts: tuple[Event, ...]) -> Iterable[BusyRank]:
    if waits and firsts:
        yield BusyRank(
            "working", "the work that all others wait for", (*firsts[:1], *waits[:2]), 0, None, _limit(waits), 0.7
        )


def _by_messages(evidence: LogEvidence, waits: tuple[Event, ...]) -> Iterable[BusyRank]:
    """Of messages that begin a piece of work which takes long at times: as long before a time-out as it takes."""
    limit = _limit(waits)
    for event in evidence.of("run.busy"):
        words = event.value("words") or ""
        for wait in waits:
            gap = wait.at - event.at if wait.at is not None and event.at is not None else None
            by_time = gap is not None and limit is not None and REACHED * limit <= gap <= 1.2 * limit
            by_line = gap is None and wait.file == event.file and 0 < wait.line - event.line <= CLOSE
            if by_time or by_line:
                yield BusyRank(
                    _kind(words, "working"), words, (event, wait), event.rank, gap, limit, 0.75 if by_time else 0.45
                )
                break


def _limit(waits: Iterable[Event]) -> float | None:
    """Seconds after which the first of them gave up."""
    for wait in waits:
        told = wait.value("timeout") or wait.value("ms")
        if told and told.isdigit():
            return int(told) / 1000
    return None


def _kind(words: str, otherwise: str) -> str:
    return next((kind for kind, pattern in _KINDS if re.search(pattern, words)), otherwise)


def seconds_of(clock: str) -> float | None:
    """``30:01`` and ``1:02:03`` as seconds."""
    parts = clock.split(":")
    if not all(part.isdigit() for part in parts):
        return None
    return float(sum(int(part) * 60**place for place, part in enumerate(reversed(parts))))
