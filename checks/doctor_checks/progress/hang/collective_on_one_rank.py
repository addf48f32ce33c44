"""RUN006: only some ranks call a collective."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.analysis.call_sites import CallSite, conditions_of, site_of_wait
from doctor.analysis.hang.diagnosis import Diagnosis
from doctor.analysis.hang.diagnosis_rules import diagnose_stall
from doctor.analysis.hang.one_sided_calls import OneSidedCall
from doctor.analysis.logs.root_event import exceptions, nature_of_exception
from doctor.api import (
    EventGroup,
    Finding,
    Job,
    Scope,
    Severity,
    Source,
    Verdict,
    check,
    event_groups,
    finding_from_logs,
    ranks_in_words,
)
from doctor.facts import Collective, ProgressFacts, RecorderFacts, ReplicaFacts, TrainingFacts
from doctor.testing import Fails, Passes, logged, package_frame, running, stalled, user_frame
from doctor.testing.stalled_run import over_gloo, with_call, with_group_call, with_late_ranks, without_recorders
from doctor_checks.progress._named_causes import cause_of_calls, with_cause
from doctor_checks.progress.hang._stall_text import (
    call_in_words,
    condition_in_words,
    effect_of_abort,
    stall_evidence,
    stall_ranks,
)

_GATHER = user_frame(57, condition="if self.global_rank == 0, line 56")
_SYNC = package_frame("lightning/fabric/utilities/distributed.py", 213, "_sync_ddp")
_LOG = package_frame("lightning/pytorch/trainer/connectors/logger_connector/result.py", 248, "compute")
_LOOP = package_frame("lightning/pytorch/loops/fit_loop.py", 486, "on_advance_end")
_SAVE = package_frame("lightning/pytorch/trainer/trainer.py", 1465, "save_checkpoint")
_RANK_ZERO = package_frame("lightning_utilities/core/rank_zero.py", 41, "wrapped_fn")
_BACKWARD = package_frame("torch/autograd/graph.py", 829, "_engine_run_backward")
_SIGTERM = package_frame("lightning/pytorch/loops/training_epoch_loop.py", 265, "_broadcast_sigterm_tensor")


def _skipped(old: tuple[Collective, ...]) -> tuple[Collective, ...]:
    flag = (_SIGTERM, _LOOP)
    before = (Collective("0", old[-2].sequence, "broadcast", retired=True, frames=flag),)
    return (*old[:-2], *before, Collective("0", old[-1].sequence, "broadcast", at=old[-1].at, frames=flag))


def _in_backward(old: tuple[Collective, ...]) -> tuple[Collective, ...]:
    last = old[-1]
    call = Collective(last.group, last.sequence, last.operation, at=last.at, frames=(_BACKWARD, user_frame(58)))
    return (*old[:-1], call)


def _with_flag(old: tuple[Collective, ...]) -> tuple[Collective, ...]:
    return (*old[:-2], Collective("0", old[-2].sequence, "broadcast", retired=True, frames=(_SIGTERM, _LOOP)), old[-1])


def _from_logs(job: Job) -> Iterator[Finding]:
    found = diagnose_stall(job)
    if job.evidence is None or (found is not None and found.one_sided is not None):
        return
    for event in exceptions(job.evidence):
        conditions = conditions_of(event.frames)
        if conditions and nature_of_exception(event) in ("timeout", "peer", "mismatch"):
            yield finding_from_logs(
                EventGroup(event.kind, (event,)),
                f"Only some ranks make a collective call: it depends on {condition_in_words(conditions[0])}",
                fix=_fix(site_of_wait(event.frames), True),
                confidence=0.85,
            )
            return
    # A call of a single rank. With `TORCH_DISTRIBUTED_DEBUG=DETAIL` all ranks enter a barrier before each collective.
    barriers = event_groups(job, "torch.monitored_barrier")
    missed = {int(rank) for group in barriers for text in group.values("failed") for rank in text.split(",")}
    for group in event_groups(job, "torch.wrapper_barrier"):
        who = group.ranks or (0,)
        if len(who) == 1 and len(missed) >= max(2, job.world_size - 1):
            call = (group.value("fp") or "a collective").partition(", Tensor")[0].partition("OpType=")
            operation = (call[2] or call[0]).rstrip(")")
            others = ranks_in_words(tuple(sorted(missed)))
            yield finding_from_logs(
                group,
                f"Only {ranks_in_words(who)} reached {operation}; {others} did not arrive in time",
                ranks=who,
                effect=f"{ranks_in_words(who).capitalize()} waits for {others} and fails at the timeout.",
                fix=f"Find in the logs and stacks of {others} whether they failed, were slow or skipped the call, and "
                "move the call out of any rank-dependent branch.",
                evidence={"missing": sorted(missed)[:64]},
                confidence=0.6,
            )


_CREATIONS = ("new_group", "new_process_group_helper", "split_group")
"""Operations of ranks that make a group with others."""
_MAKES = (
    *(
        package_frame("torch/distributed/distributed_c10d.py", 1, name)
        for name in ("_new_process_group_helper", "_new_group_with_tag", "new_group")
    ),
    user_frame(30),
)


@check(
    id="RUN006",
    severity=Severity.ERROR,
    scope=Scope.JOB,
    when="RM",
    needs=(ProgressFacts,),
    from_logs=_from_logs,
    or_needs=(RecorderFacts,),
    needs_peers=True,
    cases=lambda: (
        Passes("a run that moves", running(hosts=2, per_host=2)),
        Passes("all in the same call", stalled(2, 2)),
        Passes(
            "a branch for each rank's part, long since and again and again",
            with_call(
                with_call(stalled(), (0,), "broadcast", user_frame(20, condition="if rank == 0, line 19"), ago=1),
                (1,),
                "broadcast",
                user_frame(22, condition="else of if rank == 0, line 19"),
                ago=1,
            ).alter(ProgressFacts, state="running", idle=0.1),
        ),
        Fails(
            "a rank that has left itself out of a group that the others make",
            with_late_ranks(stalled(1, 3), (0, 2), *_MAKES, group="1 of ranks 0, 1, 2", at=None),
            ranks=(1,),
        ),
        Passes(
            "others that make a group without this rank",
            with_late_ranks(stalled(1, 4), (0, 2), *_MAKES, group="1 of ranks 0, 2", at=None),
        ),
        Fails(
            "self.all_gather() in a condition on the rank",
            with_call(stalled(1, 4), (0,), "all_gather", _GATHER),
            ranks=(0,),
        ),
        Fails(
            "self.log(sync_dist=True) in a condition on the rank",
            with_call(stalled(), (0,), "barrier", _SYNC, _LOG, _GATHER, input_sizes=(), output_sizes=()),
            ranks=(0,),
        ),
        Fails(
            "self.log(sync_dist=True) that only one rank made, at the end of the epoch",
            with_call(stalled(), (1,), "barrier", _SYNC, _LOG, _LOOP, input_sizes=(), output_sizes=()),
            ranks=(1,),
        ),
        Fails(
            "trainer.save_checkpoint() in a function of rank 0",
            with_call(stalled(1, 3), (0,), "barrier", _SAVE, user_frame(70, "save"), _RANK_ZERO, user_frame(71)),
            ranks=(0,),
        ),
        Passes(
            "log of a barrier that all ranks but one reached",
            logged(
                "world_size: 4",
                "[rank0]: RuntimeError: ProcessGroupWrapper: Monitored Barrier encountered error running collective: "
                "CollectiveFingerPrint(SequenceNumber=4, OpType=BARRIER). Error:",
                "[rank0]: [Rank 0]: Ranks 2 failed to pass monitoredBarrier in 60000 ms",
            ),
        ),
        Fails(
            "log of a barrier that only rank 0 reached",
            logged(
                "world_size: 4",
                "[rank0]: RuntimeError: ProcessGroupWrapper: Monitored Barrier encountered error running collective: "
                "CollectiveFingerPrint(SequenceNumber=4, OpType=BARRIER). Error:",
                "[rank0]: [Rank 0]: Ranks 1, 2, 3 failed to pass monitoredBarrier in 60000 ms",
            ),
            ranks=(0,),
        ),
        Fails(
            "a gather that depends on the data",
            with_call(stalled(1, 2), (1,), "all_gather", user_frame(57)),
            ranks=(1,),
        ),
        Fails(
            "a gather that depends on the data, by dumps",
            with_call(stalled(1, 2), (1,), "all_gather", user_frame(57)).drop(ProgressFacts, reason="no such evidence"),
            ranks=(1,),
        ),
        Fails(
            "one rank passes over a batch",
            stalled(1, 3)
            .alter(RecorderFacts, collectives=_with_flag)
            .alter(RecorderFacts, ranks=(2,), collectives=_skipped),
            ranks=(2,),
        ),
        Fails(
            "a call in a group of two that one of them makes",
            with_group_call(stalled(1, 3), (1,), "7", (1, 2), user_frame(57, condition="if rank == 1, line 56")),
            ranks=(1,),
        ),
        Fails(
            "ranks that accumulate gradients of different numbers of batches: the odd one of four",
            with_call(stalled(1, 4), (3,), "barrier", user_frame(57)).alter(TrainingFacts, ranks=(3,), accumulate=4),
            ranks=(3,),
        ),
        Fails(
            "a rank that left a parameter out of its loss",
            with_call(
                stalled(1, 2).alter(RecorderFacts, collectives=_in_backward),
                (1,),
                "broadcast",
                _SIGTERM,
                _LOOP,
            ).alter(ReplicaFacts, ranks=(1,), without_gradient=("head.weight",)),
            ranks=(1,),
        ),
        Fails(
            "a call in a hook of the backward pass, where a rank has gradients yet to compute",
            with_call(
                stalled(1, 3).alter(RecorderFacts, collectives=_in_backward), (0, 2), "all_gather", _GATHER, _BACKWARD
            ).alter(ReplicaFacts, ranks=(2,), without_gradient=("head.weight",)),
            ranks=(1,),
        ),
        Fails(
            "a gather of rank 0 alone, for which Gloo aborts another rank",
            over_gloo(
                with_call(stalled(1, 3), (0,), "all_reduce", user_frame(57), input_sizes=((4096,),), types=("Float",))
            ).alter(ProgressFacts, ranks=(1,), state="gone"),
            ranks=(0,),
        ),
        Fails(
            "without recorders, by stacks",
            without_recorders(with_call(stalled(), (1,), "all_gather", _GATHER)),
            ranks=(1,),
        ),
    ),
)
def collective_on_one_rank(job: Job) -> Iterator[Verdict]:
    """Ask whether every collective is called by all ranks of its group.

    Why it hurts: the ranks wait for each other in different collectives until the timeout, or exchange wrong values.
    Fix: Call the collective on all ranks, and make only the use of its result conditional.
    """
    found = diagnose_stall(job)
    if found is not None and found.one_sided is not None:
        site = found.one_sided.call.site
        finding = Finding(
            _claim(found, found.one_sided),
            ranks=found.ranks,
            evidence={
                **stall_evidence(found),
                **_evidence_of_abort(found, found.one_sided),
            },
            effect=effect_of_abort(found) or _effect(found.one_sided),
            fix=_fix(site, found.one_sided.extra, _group(found, found.one_sided)),
            confidence=found.confidence,
            explains=("RUN001", "RUN004", "RUN012"),
            source=Source(site.frame.file, site.frame.line) if site.frame else None,
        )
        yield with_cause(finding, cause_of_calls(job, found))


def _evidence_of_abort(found: Diagnosis, one_sided: OneSidedCall) -> dict[str, object]:
    """The ranks that Gloo aborted, and the calls whose sizes differ."""
    if found.ending is None:
        return {}
    calls = {ranks_in_words(one.ranks): call_in_words(one.entry) for one in (one_sided.call, one_sided.others)}
    return {"aborted_by_gloo": list(found.ending.ranks), "calls": calls}


def _group(found: Diagnosis, one_sided: OneSidedCall) -> str:
    """The group of the call, if it has not all ranks."""
    entry = one_sided.call.entry
    members = found.states.members.get(entry.group, ())
    is_part = 1 < len(members) < len(found.states.ranks)
    return found.states.name_of(entry.group) if is_part else ""


def _claim(found: Diagnosis, one_sided: OneSidedCall) -> str:
    call, callers = one_sided.call.site, one_sided.call.ranks
    why = f" ({_condition(call.condition)})" if call.condition else ""
    who, several = stall_ranks(found), len(one_sided.ranks) > 1
    if not one_sided.extra and call.operation in _CREATIONS:
        # It may have made the call, with a list of ranks that it is not in.
        them, wait = ("them", "do") if several else ("it", "does")
        claim = f"{who} {wait} not take part in {_short(call)}"
        rest = f", where {ranks_in_words(callers)} wait{'' if len(callers) > 1 else 's'} for {them}"
    elif one_sided.extra:
        claim, rest = f"Only {who} call{'' if several else 's'} {_short(call)}", ""
    else:
        claim = f"{who} skip{'' if several else 's'} {_short(call)}"
        rest = f", which {ranks_in_words(callers)} call{'' if len(callers) > 1 else 's'}"
    # The line of the rank in the evidence has the condition, too.
    return f"{claim}{why if len(claim + why + rest) <= _MOST else ''}{rest}"


_MOST = 100
"""Characters of a summary."""


def _condition(condition: str) -> str:
    """```if rank == 0`, line 40``."""
    words, _, line = condition_in_words(condition).partition(" (line ")
    return f"{words}, line {line.rstrip(')')}" if line else words


def _short(call: CallSite) -> str:
    """``self.log(..., sync_dist=True) at train.py:57``: the call in the code of the user, if there is one."""
    what = call.words if call.words and call.words != "backward" else call.operation
    place = call.place.partition(" ")[0]
    if not place or not what:
        return call.text
    return f"{what} at {place}" if call.own else f"{what} ({place})"


def _effect(one_sided: OneSidedCall) -> str:
    """``Rank 0 waits for the others in all_gather while they wait for it in all_reduce: deadlock.``

    Empty if the calls have no names."""
    call, others = one_sided.call.site.operation, one_sided.others.site.operation
    if not call or not others:
        return ""
    if call == others:
        call, others = f"one {call}", "another"
    mine, theirs = (call, others) if one_sided.extra else (others, call)
    who, several = ranks_in_words(one_sided.ranks), len(one_sided.ranks) > 1
    return (
        f"{who[:1].upper()}{who[1:]} wait{'' if several else 's'} for the others in {mine} while they wait for "
        f"{'them' if several else 'it'} in {theirs}: deadlock."
    )


def _fix(site: CallSite, extra: bool, group: str = "") -> str:
    place = site.place.partition(" ")[0]
    at = f" at {place}" if place and site.own else ""
    for word, fix in _FIXES:
        if word in site.words or (not site.words and word == site.operation):
            return fix.replace("{at}", at)
    if extra and site.operation and place and not site.words:
        members = f"all ranks of {group}" if group else "all ranks"
        return f"Call {site.operation} at {place} on {members}, and make only the use of its result conditional."
    return "" if extra else "Look for a `return`, `continue` or `except` that only some ranks take before the call."


_FIXES = (
    (
        "new_group",
        "Call `new_group`{at} on all ranks with the same list of ranks, also on ranks that are not in it.",
    ),
    (
        "self.log",
        "Call `self.log(..., sync_dist=True)`{at} on all ranks, or log only on rank 0 with `self.log(..., "
        "rank_zero_only=True)`.",
    ),
    ("self.all_gather", "Call `self.all_gather()`{at} on all ranks, and make only the use of its result conditional."),
    (
        "save_checkpoint",
        "Call `trainer.save_checkpoint()`{at} on all ranks: it writes only on rank 0 and ends with a barrier.",
    ),
    (
        "backward",
        "Run backward on all ranks for every batch: multiply the loss of a skipped batch by 0 instead of leaving the "
        "step with `return`, `continue` or `except`.",
    ),
    ("EarlyStopping", "Monitor a value that is the same on all ranks: log it with `sync_dist=True`."),
    ("ModelCheckpoint", "Monitor a value that is the same on all ranks: log it with `sync_dist=True`."),
    ("barrier", "Move the barrier{at} out of the rank-dependent branch, so that all ranks reach it."),
)
