"""Phrases and evidence of findings about a hang: which ranks, where, for how long, and where the others wait."""

from __future__ import annotations

import re
import textwrap
from math import prod

from doctor.analysis.gpu_activity import activity_text
from doctor.analysis.hang.diagnosis import Diagnosis
from doctor.analysis.hang.exits import nature_of
from doctor.analysis.hang.rank_state import LEAST_STILL, JobState, RankState, repeated, searched, walked_folder
from doctor.api import Source, ranks_in_words
from doctor.facts import Collective

MOST_SITES = 3
"""The number of call sites of waiting ranks that a sentence names."""
_MOST_OF_ERROR = 120
"""Characters of an error that the line of a rank shows."""
SHOWN = 8
"""The number of ranks whose location a finding shows."""


def stall_ranks(found: Diagnosis) -> str:
    """``rank 2``: the faulty ranks; ``rank 2 (guessed; PID 4711)`` if nothing but the order of the processes numbers
    it."""
    progress = found.first.progress if found.first else None
    if progress is None or not progress.guessed:
        return ranks_in_words(found.ranks)
    return f"{ranks_in_words(found.ranks)} (guessed{f'; PID {progress.pid}' if progress.pid else ''})"


def stall_waiters(found: Diagnosis) -> str:
    """``; ranks 0 and 2-7 have waited 12 s in all_reduce``; ``; all_reduce timed out on rank 0`` if they have failed.

    If no other rank waits, ``, for 12 s``; empty if that is unknown too."""
    least = "at least " if found.states.is_sampled else ""
    if not found.waiting:
        return f", for {least}{found.seconds:.0f} s" if found.seconds else ""
    site, verb = found.waiting_at, "have" if len(found.waiting) > 1 else "has"
    waited = f" {least}{found.seconds_waited:.0f} s" if found.seconds_waited else ""
    where = (site.operation or site.text) if site else "a collective"
    if have_timed_out(found):
        return f"; {where} timed out on {ranks_in_words(found.waiting)}"
    sites = found.waiting_sites
    if found.states.is_sampled and len(sites) > 1:
        (first, _), *_ = sites
        has = "are" if found.states.is_snapshot else f"have waited{waited}" if len(first) > 1 else f"has waited{waited}"
        parts = [f"{ranks_in_words(ranks)} in {one.text}" for ranks, one in sites[1:MOST_SITES]]
        more = [f"{len(sites) - MOST_SITES} more elsewhere"] if len(sites) > MOST_SITES else []
        return f"; {ranks_in_words(first)} {has} in {', '.join([sites[0][1].text, *parts, *more])}"
    if found.states.is_snapshot:
        return f"; {ranks_in_words(found.waiting)} {'are' if len(found.waiting) > 1 else 'is'} in {where}"
    return f"; {ranks_in_words(found.waiting)} {verb} waited{waited} in {where}"


def have_timed_out(found: Diagnosis) -> bool:
    """Whether all ranks that waited have failed by a timeout."""
    failures = [found.states.ranks[rank].failure for rank in found.waiting]
    return bool(failures) and all(one is not None and nature_of(one) == "timeout" for one in failures)


def effect_of_abort(found: Diagnosis) -> str:
    """What Gloo does where ranks call it with different sizes; empty if no rank ended."""
    if found.ending is None:
        return ""
    aborted = ranks_in_words(found.ending.ranks)
    return f"Gloo aborts {aborted} because the sizes differ, and the other ranks lose the connection or wait."


def stall_evidence(found: Diagnosis) -> dict[str, object]:
    """The locations of the ranks, the faulty ones first."""
    chosen = [*found.ranks, *(rank for rank in found.states.ranks if rank not in found.ranks)]
    shown = [found.states.ranks[rank] for rank in chosen if rank in found.states.ranks]
    unseen = found.states.unseen[:64] if found.states.is_from_dumps else ()
    waited = None if found.seconds_waited == found.seconds else found.seconds_waited
    times = {"seconds_without_progress": found.seconds, "seconds_waited": waited}
    return {
        **({"ranks_without_dumps": list(unseen)} if unseen and {*unseen} != {*found.ranks} else {}),
        "where": {str(one.rank): place for one in shown[:SHOWN] if (place := _location(found, one))},
        "waiting_ranks": _still_waiting(found)[:64],
        **{name: seconds for name, seconds in times.items() if seconds},
        **({"stacks_of_each_rank": 1} if found.states.is_snapshot else {}),
    }


def stall_source(found: Diagnosis) -> Source | None:
    """The line at which the first faulty rank is."""
    line = found.first.site.frame if found.first and found.first.site else None
    return Source(line.file, line.line) if line and line.line else None


_STATES = {"gone": "exited", "silent": "unresponsive"}
_OVER = frozenset({"ended", "failed", "gone"})
"""States of ranks that do not run any more."""


def _still_waiting(found: Diagnosis) -> list[int]:
    """The ranks that wait, without those that have ended since: they waited when they failed or were aborted."""
    states = found.states.ranks
    return [rank for rank in found.waiting if rank not in states or states[rank].state not in _OVER]


def _location(found: Diagnosis, rank_state: RankState) -> str:
    """The location; of another rank of which only its error is known, as from a log, the error."""
    text, failure = stall_location(rank_state), rank_state.failure
    if failure is None or rank_state.rank in found.ranks or text != rank_state.state:
        return text
    message = failure.message.strip().partition("\n")[0]
    return f"{text}: {textwrap.shorten(terminated(message), _MOST_OF_ERROR, placeholder=' …')}"


def terminated(message: str) -> str:
    """``terminated by signal 11 (SIGSEGV)``: the message of a failure as the manual of signals words it."""
    return message.replace("ended by", "terminated by", 1) if message.startswith("ended by") else message


def stall_location(rank_state: RankState) -> str:
    """``stalled; training, epoch 0, batch 4; waits in all_gather at train.py:62; collective 11 of group 0``."""
    parts = [_STATES.get(rank_state.state, rank_state.state), rank_state.place]
    if rank_state.site is not None:
        verb = "is in" if rank_state.site.operation else "is at"
        verb = "waits in" if rank_state.waits or rank_state.may_wait_in_backward else verb
        verb = "was in" if rank_state.state in _OVER else verb
        parts += [f"{verb} {rank_state.site.text}", condition_in_words(rank_state.site.condition)]
    if rank_state.wait is not None:
        parts.append(numbered_call(rank_state.wait, rank_state))
    if rank_state.blocked:
        kind = "blocked in the kernel" if rank_state.is_sampled else "waits for"
        parts.append(f"{kind}: {rank_state.blocked}")
    if rank_state.progress is not None and rank_state.progress.gpu is not None:
        parts.append(activity_text(rank_state.progress.gpu))
    if rank_state.progress is not None and rank_state.progress.reported:
        parts.append(f"NCCL RAS: {', '.join(rank_state.progress.reported)}")
    return "; ".join(part for part in parts if part)


def condition_in_words(condition: str) -> str:
    """```if rank == 0` (line 40)``, ```else` of `if rank == 0` (line 40)``, ```@rank_zero_only```; empty if empty."""
    if not condition:
        return ""
    tested = condition.removeprefix("else of ")
    words, _, line = tested.rpartition(", line ")
    start = "`else` of " if tested != condition else ""
    return f"{start}`{words}` (line {line})" if words else f"{start}`{tested}`"


def blocked_text(found: Diagnosis) -> str:
    """`` and waits for a lock on /data/x, held by rank 0 (PID 12)``: what the kernel shows of the first faulty rank."""
    progress, has = found.first.progress if found.first else None, "have" if len(found.ranks) > 1 else "has"
    if progress is not None and (folder := walked_folder(progress)):
        return f" and {has} walked{f' for {progress.loops:.0f} s' if progress.loops else ''} through {folder}"
    if progress is not None and (progress.loops or 0.0) >= LEAST_STILL and (search := searched(progress)):
        return f", in {search.partition(' at ')[0]} for {progress.loops:.0f} s"
    if progress is not None and (progress.loops or 0.0) >= LEAST_STILL and (loop := repeated(progress)):
        return f" and {has} got the same {loop.partition(',')[0]} in each answer for {progress.loops:.0f} s"
    if progress is not None and (progress.loops or 0.0) >= LEAST_STILL:
        return f" and {has} been in a loop of a few lines for {progress.loops:.0f} s"
    if progress is None or progress.sampled or not progress.blocked:
        return ""
    pids = {one.progress.pid: rank for rank, one in found.states.ranks.items() if one.progress and one.progress.pid}
    host = found.states.hosts.get(found.first.rank) if found.first else None

    def named(match: re.Match[str]) -> str:
        rank = pids.get(int(match[1]))
        here = rank is not None and found.states.hosts.get(rank) == host
        return f"rank {rank} ({match[0]})" if here else match[0]

    return (
        f" and {'wait' if len(found.ranks) > 1 else 'waits'} for {re.sub(r'PID ([0-9]{1,9})', named, progress.blocked)}"
    )


def numbered_call(entry: Collective, state: JobState | RankState) -> str:
    """``collective 11 of the default group``, ``collective 11 of group 4 (mesh_cp)``."""
    kind = "P2P operation" if entry.is_p2p else "collective"
    return f"{kind} {entry.sequence} of {state.name_of(entry.group)}"


def call_in_words(entry: Collective) -> str:
    """``all_reduce of 12 Float elements``: a call with what it passes."""
    size = sum(map(prod, entry.input_sizes or entry.output_sizes))
    types = "".join(f" {one}" for one in entry.types)
    elements = f" of {size:,}{types} elements" if entry.input_sizes or entry.output_sizes else types
    return f"{entry.operation}{elements}"


def missed_call(found: Diagnosis) -> Collective | None:
    """The call that other ranks wait in and that a faulty rank did not reach."""
    calls = (found.states.ranks[rank].wait for rank in found.waiting)
    for call in calls:
        members = found.states.members.get(call.group, ()) if call is not None and not call.is_p2p else ()
        for rank in found.ranks:
            rank_state = found.states.ranks.get(rank)
            if call and rank in members and (rank_state is None or rank_state.entered(call.group) < call.sequence):
                return call
    return None
