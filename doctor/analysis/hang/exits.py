"""Ranks that ended: the first one, and those whose end is a consequence."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from doctor.analysis.call_sites import own_line
from doctor.analysis.hang.rank_state import JobState, RankState
from doctor.core.facts import Failure
from doctor.core.text import lazy_compile

Nature = Literal["own", "peer", "timeout", "outside", "mismatch"]
"""The cause of a failure: the rank itself, a lost peer, a collective that timed out, a user or scheduler that ended the
run, or different collectives found by ``TORCH_DISTRIBUTED_DEBUG=DETAIL``."""

_INTERRUPTED = "KeyboardInterrupt"
_OUTSIDE = frozenset({_INTERRUPTED, "SIGTERMException", "SignalException", "GeneratorExit"})
_OF_DOCTOR = ("Findings", "doctor.Findings")
"""The exception of the callback with ``on_error="raise"``, by its name or as a traceback prints it.

A class of that name in another package is a failure like any other."""
_OF_TORCH = lazy_compile(r"RuntimeError$|Dist\w{0,60}Error$|\b(?:Aborted|Unknown|HorovodInternal)Error$")
"""Exception types of backends and stores, and of Horovod; connections of user code raise other types."""
_NATURES: tuple[tuple[Nature, re.Pattern[str]], ...] = (
    ("mismatch", lazy_compile(r"Detected mismatch between collectives on ranks")),
    (
        "timeout",
        lazy_compile(
            r"Timed out waiting \d+ ?ms for (?:recv|send) operation|[Cc]aught collective operation timeout"
            r"|Timeout at NCCL work|ncclTimeout|[Ww]ait timeout|Socket Timeout|Timeout waiting for key|monitoredBarrier"
            r"|timed out in blocking wait|retr(?:ie|ei)ving ncclUniqueId from \[\d+\] via c10d"
            r"|NCCL timeout in communicator"
        ),
    ),
    (
        "peer",
        lazy_compile(
            r"Connection (?:closed|reset) by (?:remote )?peer|Connection was likely closed|Broken pipe"
            r"|ncclRemoteError|remote process exited|NCCL communicator was aborted|Some NCCL operations have failed"
            r"|Application timeout caused pair closure|Connection refused|recvValue(?:WithTimeout)? failed"
            r"|[Ff]ailed to recv, got 0 bytes"
            # horovod/common/common.h, SHUT_DOWN_ERROR
            r"|Horovod has been shut down"
        ),
    ),
    ("outside", lazy_compile(r"got signal: (?:1|2|15)\b|Received SIGTERM")),
)
_EXIT_0 = lazy_compile(r"(?:SystemExit)?:?\s*(?:0|None|False)?\s*")
"""The message of a SystemExit with code 0."""
SAME_ERROR_SECONDS = 10.0
"""Seconds within which the same error on several ranks counts as one: a fault of the program, not of a rank."""


class RunEnd(msgspec.Struct, frozen=True):
    """Why a run ended. ``ranks``: those that ended first, with the same error; ``first``: the first of them by time.
    ``failure``: ``None`` if the process disappeared without one. ``nature`` ``peer``: only lost peers are known;
    ``outside``: some ranks were interrupted, and others lost them.
    ``left``: ranks that had ended normally before."""

    ranks: tuple[int, ...]
    first: int
    failure: Failure | None
    nature: Nature
    consequences: tuple[int, ...]
    left: tuple[int, ...] = ()


def nature_of(failure: Failure) -> Nature:
    """The cause of a failure."""
    if failure.kind.rpartition(".")[2] in _OUTSIDE or failure.kind in _OF_DOCTOR:
        return "outside"
    found: Nature = next((nature for nature, pattern in _NATURES if pattern.search(failure.message)), "own")
    return found if found == "outside" or _OF_TORCH.search(failure.kind) else "own"


def interrupted_waits(states: JobState) -> dict[int, str]:
    """Ranks that ended because a collective timed out (``timeout``) or lost a peer (``peer``)."""
    natures = {rank: _nature(one) for rank, one in states.ranks.items()}
    return {rank: nature for rank, nature in natures.items() if nature in ("timeout", "peer")}


def ending_of(states: JobState) -> RunEnd | None:
    """The first end that is not a consequence of another; ``None`` if there is none."""
    if _leave_together(states):
        return None
    own = [one for one in states.ranks.values() if _nature(one) in ("own", "mismatch")]
    gone = tuple(rank for rank, one in states.ranks.items() if one.state == "gone" and not one.failure)
    if own:
        first = min(own, key=_at)
        ranks = tuple(sorted(one.rank for one in own if _is_same_error(first, one)))
        return RunEnd(ranks, first.rank, first.failure, _nature(first) or "own", _others(states, ranks))
    if gone:
        return RunEnd(gone, gone[0], None, "own", _others(states, gone))
    return _by_interrupt(states) or _by_lost_peers(states)


def _by_interrupt(states: JobState) -> RunEnd | None:
    """A SIGINT that only some ranks got, before the others lost them; Ctrl-C in a terminal interrupts all of them."""
    failures = {rank: one.failure for rank, one in states.ranks.items() if one.failure is not None}
    interrupted = [states.ranks[rank] for rank, one in failures.items() if one.kind == _INTERRUPTED]
    lost = [states.ranks[rank] for rank, one in failures.items() if nature_of(one) == "peer"]
    if not interrupted or not lost or any(nature_of(one) == "timeout" for one in failures.values()):
        return None
    first = min(interrupted, key=_at)
    # Logs without timestamps tell no order: a lost peer never is the cause.
    if min(map(_at, lost)) < _at(first) < float("inf"):
        return None
    ranks = tuple(sorted(one.rank for one in interrupted))
    return RunEnd(ranks, first.rank, first.failure, "outside", tuple(one.rank for one in lost))


def _leave_together(states: JobState) -> bool:
    """Whether ranks end by ``sys.exit(0)``, as those of a preempted job do, and all others are still running."""
    others = [one.state for one in states.ranks.values() if not _is_exit(one.failure)]
    return len(others) < len(states.ranks) and not states.unseen and all(state == "running" for state in others)


def _is_exit(failure: Failure | None) -> bool:
    return failure is not None and failure.kind == "SystemExit" and _EXIT_0.fullmatch(failure.message) is not None


def _by_lost_peers(states: JobState) -> RunEnd | None:
    lost = [one for one in states.ranks.values() if _nature(one) == "peer"]
    # After a timeout, lost peers are a consequence of that hang. While others still run, the rank that ended first may
    # not be known yet.
    if not lost or any(_nature(one) == "timeout" or one.state == "running" for one in states.ranks.values()):
        return None
    ranks = tuple(one.rank for one in lost)
    silent = (*states.unseen, *(rank for rank, one in states.ranks.items() if one.state == "silent"))
    left = tuple(rank for rank, one in states.ranks.items() if one.state == "ended")
    if silent and not left:
        return RunEnd(tuple(sorted(silent)), silent[0], None, "own", ranks)
    first = min(lost, key=_at)
    return RunEnd((first.rank,), first.rank, first.failure, "peer", _others(states, (first.rank,)), left)


def _others(states: JobState, ranks: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(rank for rank, one in states.ranks.items() if rank not in ranks and one.failure)


def _is_same_error(first: RankState, other: RankState) -> bool:
    one, two = first.failure, other.failure
    if one is None or two is None:
        return False
    same_place = own_line(one.frames) == own_line(two.frames) and one.frames[:1] == two.frames[:1]
    return one.kind == two.kind and same_place and not _at(other) > _at(first) + SAME_ERROR_SECONDS


def _at(rank_state: RankState) -> float:
    failure = rank_state.failure
    return failure.at if failure and failure.at is not None else float("inf")


def _nature(rank_state: RankState) -> Nature | None:
    failure = rank_state.failure
    return nature_of(failure) if failure else None
