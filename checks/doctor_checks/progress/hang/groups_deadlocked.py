"""RUN015: ranks wait for each other in different groups, or a send has no receive."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.analysis.call_sites import POINT_TO_POINT, CallSite
from doctor.analysis.hang.diagnosis import Diagnosis
from doctor.analysis.hang.diagnosis_rules import diagnose_stall
from doctor.api import Finding, Job, Scope, Severity, Verdict, check, conjunction, ranks_in_words
from doctor.facts import Collective, Frame, ProgressFacts, RecorderFacts
from doctor.testing import Fails, JobBuilder, Passes, package_frame, running, stalled, user_frame
from doctor.testing.stalled_run import with_group_call, with_late_ranks, without_recorders
from doctor_checks.progress.hang._stall_text import stall_evidence, stall_source


def _crossed(world: int) -> JobBuilder:
    first = with_group_call(stalled(1, world), (0,), "1", (0, 1), user_frame(30))
    return with_group_call(first, (1,), "2", (0, 1), user_frame(31))


def _one_crosses() -> JobBuilder:
    first = with_group_call(stalled(1, 3), (0, 2), "1", (0, 1, 2), user_frame(30))
    return with_group_call(first, (1,), "2", (0, 1, 2), user_frame(30))


def _transfer(operation: str, rank: int, peer: int, frame: Frame) -> Collective:
    source = rank if operation == "send" else peer
    return Collective("0", 9, operation, "nccl", is_p2p=True, source=source, peer=peer, frames=(frame,))


def _transfers(sketch: JobBuilder, rank: int, *calls: Collective) -> JobBuilder:
    inside = package_frame("torch/distributed/distributed_c10d.py", 2500, calls[0].operation)
    late = with_late_ranks(sketch, (rank,), inside)
    return late.alter(RecorderFacts, ranks=(rank,), collectives=lambda old: (*old, *calls))


def _over_gloo(idle: float) -> JobBuilder:
    """Rank 0 sends to rank 1, which receives from rank 0, for so many seconds."""
    file = "torch/distributed/distributed_c10d.py"
    sends, receives = ((package_frame(file, line, name), user_frame(30)) for line, name in ((1, "send"), (2, "recv")))
    sketch = without_recorders(stalled()).alter(ProgressFacts, idle=idle, stack=sends, root=1)
    return sketch.alter(ProgressFacts, ranks=(1,), stack=receives, root=0)


def _creating(idle: float) -> JobBuilder:
    """Both ranks create a group for so many seconds."""
    file = "torch/distributed/distributed_c10d.py"
    names = ("_new_process_group_helper", "_new_group_with_tag", "new_group")
    stack = (*(package_frame(file, 1, name) for name in names), user_frame(30))
    return without_recorders(stalled()).alter(ProgressFacts, idle=idle, stack=stack)


@check(
    id="RUN015",
    severity=Severity.ERROR,
    scope=Scope.JOB,
    when="RM",
    needs=(ProgressFacts,),
    or_needs=(RecorderFacts,),
    needs_peers=True,
    impacts={
        r"without a matching send": "The rank waits until the timeout for a message that no rank sends.",
        r", but ranks? [-\d, and]+ in .* for its (?:send|recv)$": (
            "The ranks wait for each other until the timeout, which ends the job."
        ),
        r"without a matching recv": "The rank waits until the timeout for a rank that receives its message.",
    },
    cases=lambda: (
        Passes("a run that moves", running(hosts=2, per_host=2)),
        Passes("all in the same call", stalled(2, 2)),
        Passes(
            "a transfer with both of its ends",
            _transfers(
                _transfers(stalled(), 0, _transfer("send", 0, 1, user_frame(30))),
                1,
                _transfer("recv", 1, 0, user_frame(31)),
            ),
        ),
        Fails("two groups in different order", _crossed(2), ranks=(0, 1)),
        Fails(
            "two groups in different order, by dumps",
            _crossed(2).drop(ProgressFacts, reason="no such evidence"),
            ranks=(0, 1),
        ),
        Fails("two groups in different order, and others that wait for both", _crossed(4), ranks=(0, 1)),
        Fails("one of three ranks reduces over two groups in another order", _one_crosses(), ranks=(1,)),
        Fails(
            "two ranks that send to each other and never receive",
            _transfers(
                _transfers(stalled(1, 3), 0, _transfer("send", 0, 1, user_frame(30))),
                1,
                _transfer("send", 1, 0, user_frame(30)),
            ),
            ranks=(0, 1),
        ),
        Fails(
            "a send to a rank that waits for the sender",
            _transfers(stalled(1, 3), 2, _transfer("send", 2, 0, user_frame(30))),
            ranks=(0, 2),
        ),
        Fails(
            "a receive that no rank sends, over Gloo, whose recorder does not show it",
            with_late_ranks(
                stalled(1, 3),
                (1,),
                package_frame("torch/distributed/distributed_c10d.py", 2500, "recv"),
                user_frame(30),
            ),
            ranks=(1,),
        ),
        Fails(
            "a send that no rank receives, over Gloo",
            with_late_ranks(
                stalled(1, 3),
                (1,),
                package_frame("torch/distributed/distributed_c10d.py", 2300, "send"),
                user_frame(30),
            ),
            ranks=(1,),
        ),
        Fails(
            "a receive whose send the other rank left out for a collective, over Gloo",
            with_late_ranks(
                stalled(1, 3),
                (1,),
                package_frame("torch/distributed/distributed_c10d.py", 2500, "recv"),
                user_frame(30, answered=True),
                root=2,
                at=None,
            ),
            ranks=(2,),
        ),
        Fails(
            "a receive too many from a rank that went on to a collective, over Gloo",
            with_late_ranks(
                stalled(1, 3),
                (1,),
                package_frame("torch/distributed/distributed_c10d.py", 2500, "recv"),
                user_frame(30),
                root=2,
                at=None,
            ),
            ranks=(1,),
        ),
        Passes("a group that all ranks create for 8 s", _creating(8.0)),
        Fails("groups that ranks create in different orders", _creating(16.0), ranks=(0, 1)),
        Passes("a send and its receive that take 12 s, over Gloo", _over_gloo(12.0)),
        Fails("a send and a receive that do not fit to one another, over Gloo", _over_gloo(40.0), ranks=(0, 1)),
        Fails(
            "two receives, and no recorder",
            without_recorders(stalled()).alter(
                ProgressFacts,
                stack=(package_frame("torch/distributed/distributed_c10d.py", 2500, "recv"), user_frame(30)),
            ),
            ranks=(0, 1),
        ),
    ),
)
def groups_deadlocked(job: Job) -> Iterator[Verdict]:
    """Ask whether ranks wait for each other in a cycle.

    Why it hurts: the ranks in the cycle block until the timeout, which ends the job.
    Fix: Call collectives of the groups in the same order on all ranks, and match every send with a receive.
    """
    found = diagnose_stall(job)
    if found is not None and found.kind == "deadlock":
        transfers = any(one.transfers or one.stack_wait in POINT_TO_POINT for one in found.known)
        claim, fix = _of_awaited(found) or (_claim(found, transfers), _fix(found, transfers))
        yield Finding(
            claim,
            ranks=found.ranks,
            evidence=stall_evidence(found),
            fix=fix,
            confidence=found.confidence,
            explains=("RUN001", "RUN004", "RUN012"),
            source=stall_source(found),
        )


def _of_awaited(found: Diagnosis) -> tuple[str, str] | None:
    """Claim and fix if ranks wait in a send or receive for others that wait in a collective."""
    waiting = [found.states.ranks[rank] for rank in found.awaited_by]
    first, site = found.first, waiting[0].site if waiting else None
    if first is None or first.site is None or site is None:
        return None
    call, who, them = _counterpart(site), ranks_in_words(found.ranks), ranks_in_words(found.awaited_by)
    wait = "waits" if len(found.ranks) == 1 else "wait"
    return (
        f"{who[:1].upper()}{who[1:]} {wait} in {_short(first.site)}, but {them} in {_short(site)} for its {call}",
        f"Add the {call} on {who} that belongs to the {_short(site)} of {them}, or remove that call.",
    )


def _claim(found: Diagnosis, transfers: bool, most: int = 4) -> str:
    known = found.known
    if not transfers and found.waiting and all(one.wait for one in known):
        odd, others = known[0], found.states.ranks[found.waiting[0]]
        groups = [found.states.name_of(one.wait.group) for one in (odd, others) if one.wait is not None]
        if len(set(groups)) > 1 and odd.site is not None:
            who, wait = ranks_in_words(found.ranks), "wait" if len(found.ranks) > 1 else "waits"
            rest = ranks_in_words(found.waiting)
            return f"{who[:1].upper()}{who[1:]} {wait} in {_short(odd.site)} ({groups[0]}), {rest} in {groups[1]}"
    places = [f"rank {one.rank} in {_short(one.site)}" for one in known[:most] if one.site is not None]
    if len(found.ranks) > 1:
        sites = {_short(one.site) for one in known[:most] if one.site is not None}
        if len(sites) == 1 and len(places) == len(known):
            who = ranks_in_words(tuple(one.rank for one in known))
            return f"{who[:1].upper()}{who[1:]} wait for each other in {sites.pop()}"
        named = [*places, *([f"{len(known) - most} more"] if len(known) > most else [])]
        who = conjunction(named) if len(named) > 1 else ranks_in_words(found.ranks)
        return f"{who} wait for each other"
    place = places[0].replace(" in ", " waits in ", 1) if places else ranks_in_words(found.ranks)
    return f"{place} without a matching {_counterpart(known[0].site)}" if transfers and known else f"Only {place}"


def _counterpart(site: CallSite | None) -> str:
    """The operation of the other rank of a transfer."""
    operation = site.operation if site is not None else ""
    return "recv" if operation.startswith("send") else "send" if operation.startswith("recv") else "call"


def _short(site: CallSite) -> str:
    """``all_reduce at train.py:30``."""
    place = site.place.partition(" (")[0]
    return f"{site.operation} at {place}" if site.operation and place else site.text


def _fix_of_order(found: Diagnosis, most: int = 4) -> str:
    """``Run all_reduce at train.py:30 (group 1) and all_reduce at train.py:31 (group 2) in the same order …``."""
    waiting = (found.states.ranks[number] for number in found.waiting[:1])
    calls: dict[str, dict[str, None]] = {}
    for one in (*found.known, *waiting):
        if one.site is not None:
            groups = calls.setdefault(_short(one.site), {})
            groups |= {found.states.name_of(one.wait.group): None} if one.wait is not None else {}
    named = [f"{call} ({conjunction(tuple(groups))})" if groups else call for call, groups in calls.items()]
    several = len(named) > 1 or any(len(groups) > 1 for groups in calls.values())
    if not several or len(named) > most:
        return "Make the collective calls of different groups in the same order on all ranks."
    return f"Run {conjunction(named)} in the same order on all ranks."


def _fix(found: Diagnosis, transfers: bool) -> str:
    sites = [(one.rank, one.site) for one in found.known if one.site is not None]
    if not transfers:
        return _fix_of_order(found)
    lone = [(rank, site) for rank, site in sites if site.operation in POINT_TO_POINT]
    if len({_counterpart(site) for _, site in lone}) > 1:
        return "Pass the same tag and group, and tensors of one size, to a send and its receive on the two ranks."
    if len(lone) > 1:
        (first, _), (second, _), *more = lone
        one, other = ("one rank", "the others") if more else (f"rank {first}", f"rank {second}")
        return (
            f"Let {one} send first and {other} receive first, or exchange the data with "
            "`torch.distributed.batch_isend_irecv`."
        )
    if not lone:
        return "Match every send with a receive, with the same peer and in the same order."
    rank, site = lone[0]
    others = [other for other in found.ranks if other != rank]
    peer = f"rank {others[0]}" if len(others) == 1 else "the peer"
    return f"Add a matching {_counterpart(site)} on {peer} for the {_short(site)} of rank {rank}, or remove the call."
