"""Diagnoses of ranks that did not reach a collective, that wait for one another, or that made different calls.

They follow from the wait graph, and without flight recorders from stacks alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from doctor.analysis.call_sites import POINT_TO_POINT, LocalWork, local_work_of, site_key, site_of
from doctor.analysis.hang.collective_mismatch import Divergence, MismatchGroup, divergences, largest_first
from doctor.analysis.hang.diagnosis import Diagnosis, Kind
from doctor.analysis.hang.exits import interrupted_waits
from doctor.analysis.hang.one_sided_calls import OneSidedCall, one_sided_call
from doctor.analysis.hang.rank_state import JobState, RankState
from doctor.analysis.hang.uneven_loaders import is_past_training_epoch, uneven_of_calls
from doctor.analysis.hang.uneven_stacks import uneven_of_stacks
from doctor.analysis.hang.wait_graph import (
    CollectiveNode,
    is_answered,
    is_unrecorded,
    missing_from,
    peer_by_stack,
    roots_of,
)
from doctor.core.facts import Collective, ProgressFacts
from doctor.core.stack_dumps.native_calls import DEVICE_WAIT
from doctor.knowledge.waiting_functions import ANY_COLLECTIVE, OF_GROUPS

_UNNAMED = (DEVICE_WAIT, ANY_COLLECTIVE)
"""Operations behind which any collective may be, so that they don't differ from another one."""
LEAST_AHEAD = 2
"""Optimizer steps by which ranks that wait for one another may differ: some record a step before its collectives."""
LONG_TRANSFER = 30.0
"""Seconds after which a send and a receive that may fit to one another do not complete: 3 GB take as long at 1 Gbit/s.
"""
BY_MAJORITY = 0.8
"""Confidence that the ranks of a cycle are at fault that wait in another call than most of it."""
EVALUATIONS = frozenset({"sanity", "validate", "test", "predict"})
LONG_CREATION = 12.0
"""Seconds, and 0.1 for each rank, after which a group does not come about that all ranks wait for."""
_CREATIONS = ("new_group", "split_group")
_SENDING, _RECEIVING = ("send", "send_object_list"), ("recv", "recv_object_list")


def diverged_ranks(states: JobState) -> Diagnosis | None:
    """The diagnosis of the largest stuck group whose ranks made different calls under one sequence number."""
    stuck = set(states.stuck)
    for divergence in divergences(states):
        if stuck.intersection(states.members.get(divergence.group, ())):
            return _of_divergence(states, divergence, one_sided_call(divergence))
    return None


def _of_divergence(states: JobState, divergence: Divergence, one_sided: OneSidedCall | None) -> Diagnosis:
    if one_sided is None:
        confidence = 0.7 if divergence.is_even else 0.9
        return Diagnosis(states, "differ", divergence.odd_ranks, confidence, divergence=divergence)
    confidence = 0.95 if one_sided.call.site.condition or not divergence.is_even else 0.8
    return Diagnosis(states, "one-sided", one_sided.ranks, confidence, divergence=divergence, one_sided=one_sided)


def late_ranks(states: JobState) -> Diagnosis | None:
    """The diagnosis of the ranks at the end of the wait graph."""
    roots = roots_of(states)
    if not roots:
        return None
    if len(roots[0]) > 1:
        return of_cycle(states, roots[0])
    return _of_late_ranks(states, [root[0] for root in roots if len(root) == 1])


def _of_late_ranks(states: JobState, late: Sequence[int]) -> Diagnosis:
    ahead = _ahead(states, late) or _evaluates_on(states, late)
    kinds: dict[int, Kind] = {rank: "elsewhere" if ahead else _kind_of(states.ranks.get(rank)) for rank in late}
    kind = kinds[late[0]]
    ranks = tuple(sorted(rank for rank in late if kinds[rank] == kind))
    known = [states.ranks[rank] for rank in ranks if rank in states.ranks]
    busy = [one.rank for one in states.ranks.values() if one.rank in late and one.state == "running" and not one.stands]
    # Before training, one that stands may only wait for a busy one.
    prepares = any((one := states.ranks[rank].progress) is not None and one.stage == "setup" for rank in busy)
    is_early = bool(known) and not ahead and (prepares or all(one.rank in busy for one in known))
    is_early = is_early and not states.in_deadlock
    return Diagnosis(
        states,
        kind,
        ranks,
        0.9 if states.has_recorder else 0.75,
        within_limit=is_early and "timeout" not in interrupted_waits(states).values(),
        work=_work(known[0]) if kind == "busy" else None,
    )


def _ahead(states: JobState, late: Sequence[int]) -> bool:
    """Whether all late ranks train on: they are optimizer steps beyond those that wait for them, and have left out the
    collective of these. What is known of the others may be older, so steps that fit into the time between count not."""
    found = [(one.step, one.at) for rank in states.waiting if (one := states.ranks[rank].progress) is not None]
    waiting = [(step, at) for step, at in found if step is not None and at is not None]
    ranks = [states.ranks[rank].progress for rank in late if rank in states.ranks]
    if not waiting or len(ranks) < len(late):
        return False
    last, since = max(step for step, _ in waiting), min(at for _, at in waiting)
    return all(one is not None and _steps_before(one, since) > last + LEAST_AHEAD for one in ranks)


def _evaluates_on(states: JobState, late: Sequence[int]) -> bool:
    """Whether all late ranks are in an evaluation in which those that wait for them had half as many batches at most,
    and no number of batches is known: their data may have no end."""
    waiting = [one for rank in states.waiting if (one := states.ranks[rank].progress) is not None]
    ranks = [(rank, states.ranks[rank].progress) for rank in late if rank in states.ranks]
    passes = {(one.stage, one.epoch, one.loader) for one in waiting}
    if len(passes) != 1 or len(ranks) < len(late) or any(one.batch is None or one.at is None for one in waiting):
        return False
    stage, epoch, loader = passes.pop()
    most, since = max((one.batch or 0) + 1 for one in waiting), min(one.at or 0.0 for one in waiting)
    return stage in EVALUATIONS and all(
        one is not None
        and (one.stage, one.epoch, one.loader) == (stage, epoch, loader)
        and not states.has_length(rank, stage, loader)
        and (one.batch or 0) + 1 - _done_since(one, since) >= 2 * most
        for rank, one in ranks
    )


def _steps_before(progress: ProgressFacts, at: float) -> float:
    """The optimizer steps that a rank had surely done at a time; -1 if unknown."""
    done = _done_since(progress, at)
    return -1.0 if progress.step is None else progress.step - done


def _done_since(progress: ProgressFacts, at: float) -> float:
    """The batches that a rank may have done since a time, by the pace of its newest points; infinite if unknown."""
    times = {one.batch: one.at or 0.0 for one in progress.recent if one.batch is not None}
    spent = max(times.values(), default=0.0) - min(times.values(), default=0.0)
    if progress.at is None or spent <= 0.0:
        return math.inf
    return 1.5 * max(0.0, progress.at - at) * len(times) / spent


def _kind_of(rank_state: RankState | None) -> Kind:
    if rank_state is None:
        return "unresponsive"
    if rank_state.stack_wait in POINT_TO_POINT:
        return "deadlock"
    work = _work(rank_state)
    if rank_state.state == "ended" or rank_state.stack_wait or work is None:
        return "elsewhere"
    return "elsewhere" if work.kind == "setup" and rank_state.stands else "busy"


def _work(rank_state: RankState) -> LocalWork | None:
    return local_work_of(rank_state.progress.stack, rank_state.progress.point) if rank_state.progress else None


def of_cycle(states: JobState, cycle: Sequence[int]) -> Diagnosis:
    """The diagnosis of ranks that wait for one another: a deadlock, or a call that only some of them make."""
    ranks = [states.ranks[rank] for rank in cycle if rank in states.ranks]
    # Sends and receives always differ between ranks.
    if not any(one.transfers or one.stack_wait in POINT_TO_POINT for one in ranks):
        divergence = Divergence("", 0, "site", _variants_in_cycle(states, ranks))
        one_sided = one_sided_call(divergence) if len(divergence.variants) > 1 else None
        if one_sided is not None and (one_sided.call.site.condition or not one_sided.call.is_usual):
            return _of_divergence(states, divergence, one_sided)
    if (left_out := _left_out(states, ranks)) is not None:
        return left_out
    odd = _odd_of_cycle(cycle, ranks)
    return Diagnosis(states, "deadlock", odd, BY_MAJORITY) if odd else Diagnosis(states, "deadlock", tuple(cycle), 0.9)


def _left_out(states: JobState, ranks: Sequence[RankState]) -> Diagnosis | None:
    """Ranks of a cycle that wait in a collective, while others wait in a send or receive for just these, by stacks.

    No recorder shows whether a rank left a call out or another made one too many: if the function that sends or
    receives has the other part of it too, for the peers, the peer that is awaited went on without it."""
    transfers = [one for one in ranks if one.stack_wait in POINT_TO_POINT]
    peers = {one.rank: peer_by_stack(states, one) if is_answered(one) else None for one in transfers}
    if None in peers.values():
        return None
    awaited = {peer for peer in peers.values() if peer is not None and peer not in peers}  # not in a transfer itself
    known = {one.rank for one in ranks if one.wait is not None and not one.wait.is_p2p}
    if not awaited or not awaited <= known or any(_ends_in_cycle(peers, rank) for rank in peers):
        return None
    direct = tuple(sorted(rank for rank, peer in peers.items() if peer in awaited))
    return Diagnosis(states, "deadlock", tuple(sorted(awaited)), 0.7, awaited_by=direct)


def _ends_in_cycle(peers: Mapping[int, int | None], rank: int) -> bool:
    """Whether the peers of transfers, followed from one rank to the next, come to the same rank again."""
    seen, at = set[int](), rank
    while (peer := peers.get(at)) is not None:
        if peer in seen:
            return True
        seen.add(peer)
        at = peer
    return False


def _odd_of_cycle(cycle: Sequence[int], ranks: Sequence[RankState]) -> tuple[int, ...]:
    """The ranks of a cycle that wait in another collective than most of it; empty without a majority."""
    waits = {one.rank: one.wait for one in ranks if one.wait is not None}
    calls = {rank: (wait.group, wait.sequence) for rank, wait in waits.items()}
    if not calls or any(wait.is_p2p for wait in waits.values()):
        return ()
    most, count = Counter(calls.values()).most_common(1)[0]
    return tuple(sorted(rank for rank in cycle if calls.get(rank) != most)) if count * 2 > len(cycle) else ()


def _variants_in_cycle(states: JobState, ranks: Iterable[RankState]) -> tuple[MismatchGroup, ...]:
    waiting: dict[tuple[object, ...], list[tuple[int, Collective]]] = {}
    for one in ranks:
        if one.wait is not None:
            waiting.setdefault(site_key(one.wait), []).append((one.rank, one.wait))
    entries = (entry for one in states.ranks.values() for entry in one.collectives)
    made = Counter(key for entry in entries if (key := site_key(entry)) in waiting)
    return largest_first(
        MismatchGroup(
            tuple(rank for rank, _ in members),
            members[0][1],
            site_of(members[0][1].operation, members[0][1].frames),
            key,
            is_usual=made[key] > len(members),
        )
        for key, members in waiting.items()
    )


def ranks_in_unrecorded_call(states: JobState) -> Diagnosis | None:
    """The diagnosis if all ranks wait, some in a call that no recorder shows, which the others have not reached.

    Either part may be the one that is not where the others are: call sites tell, else the majority."""
    ranks = states.ranks.values()
    recorded = [one for one in ranks if one.wait is not None and not one.wait.is_p2p and one.waits]
    unrecorded = [one for one in ranks if is_unrecorded(one) and _waits_for(one, recorded)]
    if not unrecorded or not recorded or states.unseen or len(unrecorded) + len(recorded) < len(ranks):
        return None
    late = {one.rank for one in unrecorded}
    awaited = (missing_from(states, CollectiveNode(one.wait.group, one.wait.sequence)) for one in recorded if one.wait)
    if not all(late.intersection(missing) for missing in awaited):
        return None
    divergence = Divergence("", 0, "site", _variants_of_calls(states, [*recorded, *unrecorded]))
    if len(divergence.variants) < 2:
        return None
    one_sided = one_sided_call(divergence)
    if one_sided is not None:
        return Diagnosis(states, "one-sided", one_sided.ranks, 0.8, divergence=divergence, one_sided=one_sided)
    odd = tuple(sorted(states.ranks)) if divergence.is_tie else divergence.odd_ranks
    return Diagnosis(states, "deadlock", odd, 0.7)


def _waits_for(unrecorded: RankState, recorded: Iterable[RankState]) -> bool:
    """Whether a rank in a call that no recorder shows waits for these ranks: one that makes a group, for its members.

    A group may just be slow to come about, but not if its members are in a call that waits for this rank."""
    if unrecorded.stack_wait not in OF_GROUPS:
        return True
    made = unrecorded.made_group
    return made is not None and any(one.rank in made[1] for one in recorded)


def _variants_of_calls(states: JobState, ranks: list[RankState]) -> tuple[MismatchGroup, ...]:
    """The calls that ranks wait in: usual is one that a recorder shows more often than the ranks wait in it."""
    made = Counter(site_key(entry) for one in states.ranks.values() for entry in one.collectives)
    found: dict[tuple[str, str], list[tuple[RankState, Collective]]] = {}
    for one in ranks:
        call = one.wait or Collective("", 0, one.stack_wait, frames=one.stack)
        found.setdefault((call.operation, site_of(call.operation, call.frames).text), []).append((one, call))
    return largest_first(
        MismatchGroup(
            tuple(sorted(one.rank for one, _ in members)),
            members[0][1],
            site_of(members[0][1].operation, members[0][1].frames),
            key,
            is_usual=members[0][0].wait is not None and made[site_key(members[0][1])] > len(members),
        )
        for key, members in found.items()
    )


def ranks_by_stack(states: JobState) -> Diagnosis | None:
    """The diagnosis from stacks alone: ranks that do not wait while others do, or that wait in different calls."""
    if not states.waiting:
        return None
    ended = [rank for rank, one in states.ranks.items() if one.is_sampled and one.state == "ended"]
    if ended:
        return _of_late_ranks(states, ended)
    late = [rank for rank, one in states.ranks.items() if one.is_elsewhere]
    if states.is_snapshot and len(late) * 2 > len(states.ranks):
        # Where most ranks are is no fault of theirs: the few others may only be earlier.
        return Diagnosis(states, "undetermined", tuple(late), 0.0)
    if late:
        # A rank that stands still is the cause, and not one that works on its own part meanwhile.
        still = [rank for rank in late if states.ranks[rank].is_sampled and states.ranks[rank].is_stuck]
        return _of_late_ranks(states, still or late)
    return (
        _crossed_creations(states)
        or _unmatched_transfers(states)
        or _loop_left(states)
        or _crossed_groups(states)
        or _diverged_by_stack(states)
    )


def ranks_by_count(states: JobState) -> Diagnosis | None:
    """The diagnosis of ranks that launched fewer collectives than the others, if stacks show no rank elsewhere."""
    behind = tuple(rank for rank, one in states.ranks.items() if one.progress is not None and one.progress.behind)
    if not behind or any(one.is_elsewhere for one in states.ranks.values()) or 2 * len(behind) >= len(states.ranks):
        return None
    return Diagnosis(states, "missing", behind, 0.8 if states.waiting else 0.6)


def ranks_by_gpu(states: JobState) -> Diagnosis | None:
    """The diagnosis of ranks without a known stack whose GPUs compute or are idle, while those of all others only poll;
    a remark, as utilization and power alone are no proof."""
    kinds = {rank: one.progress.gpu.kind for rank, one in states.ranks.items() if one.progress and one.progress.gpu}
    late = tuple(rank for rank, kind in kinds.items() if kind in ("computes", "idle") and not states.ranks[rank].stack)
    if not late or 2 * len(late) >= len(kinds) or any(kinds.get(rank) != "waits" for rank in {*states.ranks} - {*late}):
        return None
    return Diagnosis(states, "missing", late, 0.4, within_limit=True)


def _crossed_creations(states: JobState) -> Diagnosis | None:
    """All ranks of a job create groups, and no group comes about: their orders or members differ."""
    ranks = tuple(rank for rank, one in states.ranks.items() if one.stack_wait in _CREATIONS)
    return _deadlock_of_all(states, ranks, LONG_CREATION + 0.1 * len(ranks)) if len(ranks) > 1 else None


def _deadlock_of_all(states: JobState, ranks: tuple[int, ...], least: float) -> Diagnosis | None:
    """A deadlock of these ranks, if they are all of the job, and each has been idle for so many seconds."""
    idle = [one.progress.idle or 0.0 for one in states.ranks.values() if one.progress is not None]
    is_whole = len(ranks) == len(idle) == len(states.ranks) and not states.unseen and not states.ungathered
    if not ranks or not is_whole or states.is_snapshot or min(idle) < least:
        return None
    return Diagnosis(states, "deadlock", ranks, 0.6)


def _unmatched_transfers(states: JobState) -> Diagnosis | None:
    """Sends without any receive, and receives without any send: Gloo's recorder does not record them."""
    senders = tuple(rank for rank, one in states.ranks.items() if one.stack_wait in _SENDING)
    receivers = tuple(rank for rank, one in states.ranks.items() if one.stack_wait in _RECEIVING)
    if bool(senders) == bool(receivers):
        # If all are in them, their tags, groups or sizes do not fit.
        return _deadlock_of_all(states, tuple(sorted((*senders, *receivers))), LONG_TRANSFER)
    return Diagnosis(states, "deadlock", senders or receivers, 0.7)


def _loop_left(states: JobState) -> Diagnosis | None:
    """Ranks that wait behind a loop in which all others wait: theirs ended earlier."""
    uneven = uneven_of_stacks(states)
    if uneven is None and states.is_sampled and (divergence := _divergence_of_stacks(states)) is not None:
        by_framework = uneven_of_calls(states, divergence)
        if by_framework is not None:
            # A validation within an epoch is not the end of its data.
            stacks = [states.ranks[rank].stack for rank in by_framework.ended]
            uneven = msgspec.structs.replace(by_framework, by_data=all(map(is_past_training_epoch, stacks)))
    return Diagnosis(states, "loader-ended", uneven.odd, 0.7, uneven=uneven) if uneven is not None else None


def _crossed_groups(states: JobState) -> Diagnosis | None:
    """Ranks that wait in groups which the source names differently: each waits for one that is in another group."""
    groups = {rank: one.progress.group for rank, one in states.ranks.items() if one.progress and one.waits}
    groups = {rank: group for rank, group in groups.items() if states.ranks[rank].stack_wait not in OF_GROUPS}
    named = {rank: group for rank, group in groups.items() if group}
    return Diagnosis(states, "deadlock", tuple(sorted(named)), 0.6) if len(set(named.values())) > 1 else None


def _diverged_by_stack(states: JobState) -> Diagnosis | None:
    divergence = _divergence_of_stacks(states)
    if divergence is None:
        return None
    return replace(_of_divergence(states, divergence, one_sided_call(divergence)), confidence=0.6)


def _divergence_of_stacks(states: JobState) -> Divergence | None:
    waiting: dict[tuple[str, str, str], list[RankState]] = {}
    for one in states.ranks.values():
        if one.recorder is None and one.site is not None and (one.waits or one.may_wait_in_backward):
            if one.site.operation in _UNNAMED:
                continue
            waiting.setdefault((one.site.operation, one.site.place, one.site.words), []).append(one)
    if len(waiting) < 2:
        return None
    variants = largest_first(_variant_of_stack(key, members) for key, members in waiting.items())
    return Divergence("", 0, "site", variants)


def _variant_of_stack(key: tuple[str, str, str], members: Sequence[RankState]) -> MismatchGroup:
    call, site = Collective("", 0, key[0], frames=members[0].stack), site_of(key[0], members[0].stack)
    return MismatchGroup(tuple(one.rank for one in members), call, site, key, is_usual=False)
