"""Ranks that ended: who was first, and whose end is only the consequence of another's."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from doctor.analysis.call_sites import own_line
from doctor.analysis.hang.rank_state import JobState, RankState
from doctor.core.facts import Failure

Nature = Literal["own", "peer", "timeout", "outside", "mismatch"]
"""Of a failure: the rank's own, a peer's end, a collective that ran out of time, somebody who ended the run, or what
``TORCH_DISTRIBUTED_DEBUG=DETAIL`` says of collectives that differ."""

_OUTSIDE = frozenset({"KeyboardInterrupt", "SIGTERMException", "SignalException", "GeneratorExit"})
_OF_DOCTOR = ("Findings", "doctor.Findings")
"""What the callback raises on ``on_error="raise"``, by its name alone or as a traceback prints it: its findings say
why. A class of that name in another package is a failure like any other."""
_OF_TORCH = re.compile(r"RuntimeError$|Dist\w{0,60}Error$")
"""Kinds of the errors of back ends and stores. A user's own connections fail with kinds of their own."""
_NATURES: tuple[tuple[Nature, re.Pattern[str]], ...] = (
    ("mismatch", re.compile(r"Detected mismatch between collectives on ranks")),
    (
        "timeout",
        re.compile(
            r"Timed out waiting \d+ ?ms for (?:recv|send) operation|Watchdog caught collective operation timeout"
            r"|ncclTimeout|[Ww]ait timeout|Socket Timeout|Timeout waiting for key|monitoredBarrier"
            r"|timed out in blocking wait|retr(?:ie|ei)ving ncclUniqueId from \[\d+\] via c10d"
            r"|NCCL timeout in communicator"
        ),
    ),
    (
        "peer",
        re.compile(
            r"Connection (?:closed|reset) by (?:remote )?peer|Connection was likely closed|Broken pipe"
            r"|ncclRemoteError|remote process exited|NCCL communicator was aborted|Some NCCL operations have failed"
            r"|Application timeout caused pair closure|Connection refused|recvValue(?:WithTimeout)? failed"
            r"|[Ff]ailed to recv, got 0 bytes"
        ),
    ),
    ("outside", re.compile(r"got signal: (?:1|2|15)\b|Received SIGTERM")),
)
_ENDS_WELL = re.compile(r"(?:SystemExit)?:?\s*(?:0|None|False)?\s*")
"""Words of a SystemExit whose code is 0."""
ALIKE = 10.0
"""Seconds within which the same error on several ranks counts as one: a fault of the program, not of a rank."""


class RunEnd(NamedTuple):
    """Why a run ended. ``ranks``: those that ended first, all with the same error where there are several; ``first``
    of them by the clock. ``failure``: ``None`` where the process was gone without one. ``nature`` ``peer``: all that is
    known is that peers were lost. ``left``: ranks that had ended in peace before."""

    ranks: tuple[int, ...]
    first: int
    failure: Failure | None
    nature: Nature
    consequences: tuple[int, ...]
    left: tuple[int, ...] = ()


def nature_of(failure: Failure) -> Nature:
    """What a failure is a sign of."""
    if failure.kind.rpartition(".")[2] in _OUTSIDE or failure.kind in _OF_DOCTOR:
        return "outside"
    found: Nature = next((nature for nature, pattern in _NATURES if pattern.search(failure.message)), "own")
    return found if found == "outside" or _OF_TORCH.search(failure.kind) else "own"


def waited_in_vain(scene: JobState) -> dict[int, str]:
    """Ranks that ended because a collective ran out of time (``timeout``), or lost a peer in it (``peer``)."""
    natures = {rank: _nature(standing) for rank, standing in scene.ranks.items()}
    return {rank: nature for rank, nature in natures.items() if nature in ("timeout", "peer")}


def ending_of(scene: JobState) -> RunEnd | None:
    """The first end that was not another's consequence; ``None`` where there is none."""
    if _leave_together(scene):
        return None
    own = [standing for standing in scene.ranks.values() if _nature(standing) in ("own", "mismatch")]
    gone = tuple(rank for rank, standing in scene.ranks.items() if standing.state == "gone" and not _failure(standing))
    if own:
        return _by_failure(scene, own)
    if gone:
        return RunEnd(gone, gone[0], None, "own", _others(scene, gone))
    return _by_lost_peers(scene)


def _leave_together(scene: JobState) -> bool:
    """Whether ranks end by ``sys.exit(0)``, as all of a job do that is to make room for another, and none is known not
    to do so: one that still runs may be about to."""
    failures = [_failure(standing) for standing in scene.ranks.values()]
    others = [one.state for one, failure in zip(scene.ranks.values(), failures, strict=True) if not _is_exit(failure)]
    return any(map(_is_exit, failures)) and not scene.unseen and all(state == "running" for state in others)


def _is_exit(failure: Failure | None) -> bool:
    return failure is not None and failure.kind == "SystemExit" and _ENDS_WELL.fullmatch(failure.message) is not None


def _by_failure(scene: JobState, own: list[RankState]) -> RunEnd:
    first = min(own, key=_at)
    alike = tuple(sorted(one.rank for one in own if _is_alike(first, one)))
    failure = _failure(first)
    return RunEnd(alike, first.rank, failure, _nature(first) or "own", _others(scene, alike))


def _by_lost_peers(scene: JobState) -> RunEnd | None:
    lost = [standing for standing in scene.ranks.values() if _nature(standing) == "peer"]
    # Where a collective ran out of time first, peers were lost by that: a hang came before. Where others still run, the
    # one whose end it was has not been seen yet.
    if not lost or any(_nature(one) == "timeout" or one.state == "running" for one in scene.ranks.values()):
        return None
    ranks = tuple(standing.rank for standing in lost)
    silent = (*scene.unseen, *(rank for rank, one in scene.ranks.items() if one.state == "silent"))
    left = tuple(rank for rank, standing in scene.ranks.items() if standing.state == "ended")
    if silent and not left:
        return RunEnd(tuple(sorted(silent)), silent[0], None, "own", ranks)
    first = min(lost, key=_at)
    return RunEnd((first.rank,), first.rank, _failure(first), "peer", _others(scene, (first.rank,)), left)


def _others(scene: JobState, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """The other ranks that ended in an error."""
    return tuple(rank for rank, standing in scene.ranks.items() if rank not in ranks and _failure(standing))


def _is_alike(first: RankState, other: RankState) -> bool:
    one, two = _failure(first), _failure(other)
    if one is None or two is None:
        return False
    same_place = own_line(one.frames) == own_line(two.frames) and one.frames[:1] == two.frames[:1]
    return one.kind == two.kind and same_place and not _at(other) > _at(first) + ALIKE


def _at(standing: RankState) -> float:
    failure = _failure(standing)
    return failure.at if failure and failure.at is not None else float("inf")


def _failure(standing: RankState) -> Failure | None:
    return standing.progress.failure if standing.progress else None


def _nature(standing: RankState) -> Nature | None:
    failure = _failure(standing)
    return nature_of(failure) if failure else None
