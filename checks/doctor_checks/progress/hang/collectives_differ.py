"""RUN002: ranks issued different collectives at the same point."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping

import msgspec

from doctor.analysis.call_sites import BACKWARD, CallSite, own_line, place_of_frame
from doctor.analysis.hang.collective_mismatch import Divergence, MismatchGroup
from doctor.analysis.hang.diagnosis import Diagnosis
from doctor.analysis.hang.diagnosis_rules import diagnose_stall, silent_mismatches
from doctor.analysis.hang.exits import nature_of
from doctor.analysis.stats.majority import split_values
from doctor.api import (
    EventGroup,
    Finding,
    Job,
    Scope,
    Severity,
    Source,
    Unknown,
    Verdict,
    check,
    event_groups,
    finding_from_logs,
    is_logged,
    ranks_in_words,
)
from doctor.core.text import lazy_compile
from doctor.facts import Collective, ProgressFacts, RecorderFacts
from doctor.testing import Fails, JobBuilder, Passes, logged, package_frame, running, stalled, user_frame
from doctor.testing.stalled_run import over_gloo, with_call, with_failure, without_recorders
from doctor_checks.progress._named_causes import cause_of_calls, with_cause
from doctor_checks.progress.hang._printed_collectives import (
    PrintedCollective,
    differ_in_first_size,
    differing_counts,
    last_calls,
    refused_calls,
)
from doctor_checks.progress.hang._stall_text import (
    call_in_words,
    condition_in_words,
    effect_of_abort,
    stall_evidence,
)

_RUNNING = lazy_compile(
    r"\bRank (\d+) is running collective: (.+?)(?=, but Rank|\.?\s{0,9}Collectives differ|\.?$)", re.DOTALL
)
_PARTS = lazy_compile(r"(SequenceNumber|OpType|TensorShape|TensorDtypes)=(\[[^\]]*\]|\w+)")
_FINGERPRINT = "SequenceNumber=140, OpType=ALLREDUCE, TensorShape=[%d], TensorDtypes=Float"
_TIE = {"majority": "none (tie)"}
_ORDER = "if rank == 0, line 40"


def _mismatch(one: int, other: int) -> str:
    calls = (
        f"Rank {rank} is running collective: CollectiveFingerPrint({_FINGERPRINT % (12 if rank == 1 else 10)})"
        for rank in (one, other)
    )
    return f"Detected mismatch between collectives on ranks. {', but '.join(calls)}.Collectives differ in the following"


def _other_order(world: int) -> JobBuilder:
    first = with_call(stalled(1, world), (0,), "all_reduce", user_frame(41, condition=_ORDER))
    others = tuple(range(1, world))
    return with_call(first, others, "all_gather", user_frame(44, condition=f"else of {_ORDER}"))


def _of_size(ranks: tuple[int, ...], world: int, *, size: int, kind: str = "Float") -> JobBuilder:
    line = user_frame(50)
    sketch = with_call(stalled(1, world), range(world), "all_reduce", line, input_sizes=((10,),), types=("Float",))
    return with_call(sketch, ranks, "all_reduce", line, input_sizes=((size,),), types=(kind,))


def _reshaped(sketch: JobBuilder) -> JobBuilder:
    line = user_frame(50)
    sketch = with_call(sketch, range(3), "all_reduce", line, ago=1, input_sizes=((10,),))
    return with_call(sketch, (1,), "all_reduce", line, ago=1, input_sizes=((2, 5),))


def _making(sketch: JobBuilder, group: str) -> JobBuilder:
    """All ranks make a group."""
    names = ("_new_process_group_helper", "_new_group_with_tag", "new_group")
    stack = (*(package_frame("torch/distributed/distributed_c10d.py", 1, name) for name in names), user_frame(30))
    return without_recorders(sketch).alter(ProgressFacts, idle=9.0, stack=stack, group=group)


def _completed(one: Collective) -> Collective:
    return Collective(
        one.group,
        one.sequence,
        one.operation,
        one.backend,
        input_sizes=one.input_sizes,
        output_sizes=one.output_sizes,
        types=one.types,
        state="completed",
        frames=one.frames,
    )


def _one_further(old: tuple[Collective, ...]) -> tuple[Collective, ...]:
    """The newest call, made once more after it was completed."""
    last = old[-1]
    following = Collective(last.group, last.sequence + 1, last.operation, last.backend, frames=last.frames)
    return (*old[:-1], _completed(last), following)


def _timed_out(rank: int, line: int, error: str = "Timed out waiting 6000ms for recv operation") -> tuple[str, ...]:
    """A traceback of a rank from a collective over Gloo."""
    return (
        f"[rank{rank}]: Traceback (most recent call last):",
        f'[rank{rank}]:   File "/home/user/train.py", line {line}, in train',
        f"[rank{rank}]:     dist.all_reduce(values)",
        f"[rank{rank}]: RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:78] {error} to complete",
    )


_CLOSED = "Connection closed by peer [10.0.0.1]:24984"


def _logged_mismatch(rank: int, shape: str, *, number: str = "SequenceNumber=38, ") -> str:
    return f"[rank{rank}]:[I ProcessGroupWrapper.cpp:587] [{_call_of(rank, shape, '] Running', number)}"


def _call_of(rank: int, shape: str, how: str, number: str) -> str:
    call = f"Rank {rank}{how} collective: CollectiveFingerPrint({number}OpType=ALLREDUCE, TensorShape=[{shape}], "
    return f"{call}TensorDtypes=Float, TensorDeviceTypes=TensorOptions(dtype=float (default), device=cuda))"


_REFUSED = "RuntimeError: Detected mismatch between collectives on ranks. "


def _from_logs(job: Job) -> Iterator[Finding]:
    found = diagnose_stall(job)
    if job.evidence is None or (found and (found.divergence or (found.ending and found.ending.nature == "mismatch"))):
        return
    refused, printed = refused_calls(job.evidence), last_calls(job.evidence)
    kinds = [kind for kind in _NOTICED if is_logged(job, kind)]
    if refused:
        yield _of_printed(job, refused, 0.95, "torch.mismatch")
    elif printed:
        yield _of_printed(job, printed, 0.7, "torch.fingerprint")
    elif counted := differing_counts(job.evidence):
        # Calls that NCCL numbers equally (`NCCL_DEBUG_SUBSYS=COLL`).
        group = EventGroup(counted[0].kind, counted)
        texts = {(event.rank, event.pid): f"{event.value('op')} of {event.value('count')}" for event in counted}
        ranks = {rank: said for (rank, _), said in texts.items() if rank is not None}
        parted = split_values(ranks)
        yield finding_from_logs(
            group,
            f"Call with opCount {group.value('opcount')} differs between ranks: "
            + ", ".join(sorted({*texts.values()})),
            ranks=parted.odd,
            evidence={"calls": {str(rank): said for rank, said in sorted(ranks.items())[:8]}},
            fix=_FIX_OF_CALLS,
            confidence=0.75,
        )
    elif found is None or found.kind in ("undetermined", "elsewhere", "missing"):
        yield from _of_watchdogs(job)
        yield from _of_tracebacks(job)
    for group in event_groups(job, *([] if refused else kinds)):
        yield _refused_shapes(group) or _of_notice(group)


def _of_notice(group: EventGroup) -> Finding:
    """A message of a backend that compares its arguments."""
    words, fix, sure = _NOTICED[group.kind]
    got, want = group.value("got", "local2"), group.value("want", "remote2")
    sent, room = group.value("local"), group.value("remote")
    is_mpi = "message sizes do not match across processes" in group.first.text
    library = "MPI" if is_mpi else words.partition(" ")[0]
    words = words.format(rank=group.value("rank"), op=group.value("op"))
    if got and want:
        words = f"{library} received {int(got):,} bytes for a collective that expects {int(want):,}"
    elif sent and room:
        words = _of_sender(int(sent), int(room))
    elif is_mpi:
        words = "MPI received a message of a different size than its collective expects"
    return finding_from_logs(
        group,
        words,
        fix=_FIX_OF_CALLS if is_mpi else fix.format(rank=group.value("rank")),
        confidence=sure,
    )


def _refused_shapes(group: EventGroup) -> Finding | None:
    """The shapes that ranks name in errors of early releases (torch/csrc/distributed/c10d/ProcessGroupWrapper.cpp)."""
    if group.kind != "run.shapes_refused":
        return None
    named = [(event.value("rank") or "", (event.value("shape") or "").strip(" ,")) for event in group.events]
    shapes = {int(rank): f"[{shape}]" for rank, shape in named if shape and len(rank) < 8}
    if not shapes:
        return None
    operation, by_shape = group.value("op"), split_values(shapes)
    parts = [f"{ranks_in_words(one.ranks)}: {one.value}" for one in by_shape.groups]
    (rank, shape), *more = shapes.items()
    return finding_from_logs(
        group,
        f"Ranks passed tensors of different shapes to {operation} ({'; '.join(parts[:4])})"
        if more
        else f"Rank {rank} passed a tensor of shape {shape} to {operation}, another rank one of a different shape",
        ranks=by_shape.odd or tuple(sorted(shapes)),
        fix=_FIX_OF_SIZE,
        confidence=0.95,
    )


def _of_sender(sent: int, room: int) -> str:
    """NCCL compares its send with the receive that the peer has posted (ncclIbIsend in src/transport/net_ib.cc).

    Earlier releases report a receive with another sequence number in the same words."""
    if sent > room:
        return f"NCCL sends {sent:,} bytes to a rank whose collective expects {room:,}"
    return f"NCCL found a send of {sent:,} bytes and a receive of {room:,} bytes that do not match"


_OF_RANK_ZERO = (
    "Make the call of rank 0 on all ranks: look for a reduction under `if rank == 0`, `is_global_zero` or "
    "`@rank_zero_only`, such as a metric logged with `sync_dist=True` (RUN006)."
)
_FIX_OF_CALLS = "Call the same collectives in the same order on all ranks, each with the same number of elements."
_FIX_OF_SIZE = (
    "Pass the same number of elements on all ranks: pad the tensor to the largest size before the call, or drop the "
    "incomplete last batch."
)
# https://github.com/NVIDIA/nccl/pull/605: different sizes, or different settings of NCCL.
_FIX_OF_SIZE_OR_SETTINGS = (
    "Pass the same number of elements on all ranks, or set NCCL_ALGO, NCCL_PROTO and NCCL_BUFFSIZE to the same values "
    "on all of them if the sizes are equal."
)


def _of_watchdogs(job: Job) -> Iterator[Finding]:
    """Ranks that timed out in different operations of one group, one of which completes on some ranks before others
    enter it."""
    calls: dict[int, Collective] = {}
    for rank in job.ranks:
        recorder = rank.find(RecorderFacts)
        if recorder is not None and recorder.version is None and recorder.collectives:
            calls[rank.number] = recorder.collectives[0]
    operations = {call.operation for call in calls.values()}
    numbers = {call.sequence for call in calls.values()}
    if len({call.group for call in calls.values()}) == 1 and len(operations) > 1 and len(numbers) > 1:
        parted = split_values({rank: f"{call.operation}, number {call.sequence}" for rank, call in calls.items()})
        events = tuple(
            event for reported in event_groups(job, "torch.nccl.watchdog_timeout") for event in reported.events
        )
        yield finding_from_logs(
            EventGroup(events[0].kind, events),
            _calls({group.ranks: str(group.value) for group in reversed(parted.groups)}),
            ranks=parted.odd or tuple(sorted(calls)),
            effect="The ranks waited for each other in different collectives, and failed at the timeout.",
            fix=_fix(""),
            confidence=0.5,
        )


def _of_tracebacks(job: Job) -> Iterator[Finding]:
    """Ranks that timed out at a different line than most: no rank is missing, they wait in different collectives.

    A rank that was late lost its peers, and did not time out itself.
    """
    failures = {rank.number: facts.failure for rank in job.ranks if (facts := rank.find(ProgressFacts)) is not None}
    natures = {rank: nature_of(failure) for rank, failure in failures.items() if failure is not None}
    if len(natures) < max(3, job.world_size) or not {*natures.values()} <= {"timeout", "peer"}:
        return
    lines = {rank: own_line(failure.frames) for rank, failure in failures.items() if failure is not None}
    if None in lines.values():
        return
    parted = split_values({rank: place_of_frame(line) for rank, line in lines.items()})
    if len(parted.groups) != 2 or not parted.odd or any(natures[rank] != "timeout" for rank in parted.odd):
        return
    yield Finding(
        "; ".join(f"{ranks_in_words(group.ranks)} timed out at {group.value}" for group in reversed(parted.groups)),
        ranks=parted.odd,
        evidence={"timed_out_at": {str(rank): place_of_frame(line) for rank, line in sorted(lines.items())[:64]}},
        fix=f"Find the branch that takes {ranks_in_words(parted.odd)} to {place_of_frame(lines[parted.odd[0]])}, and "
        "make all ranks call the same collectives in the same order.",
        confidence=0.65,
        explains=("RUN001", "RUN004", "RUN012"),
        source=Source(line.file, line.line) if (line := lines[parted.odd[0]]) else None,
    )


_NOTICED = {
    "run.shapes_refused": ("Ranks passed tensors of different shapes to {op}", _FIX_OF_SIZE, 0.95),
    "accelerate.shape": (
        "Ranks pass tensors of different shapes to one operation, which Accelerate rejects",
        "Pad the tensor with `accelerator.pad_across_processes` before the operation.",
        0.95,
    ),
    "run.ops_refused": (
        "Ranks call different collectives at the same point",
        "Make all ranks call the same collectives in the same order: look for a branch that only some of them take.",
        0.95,
    ),
    "gloo.size_mismatch": (
        "Gloo received a message of a different size than its collective expects",
        _FIX_OF_CALLS,
        0.9,
    ),
    "nccl.mismatch.old": (
        "NCCL detected that collectives or their sizes differ around rank {rank}",
        "Compare the calls of rank {rank} and its neighbors in the logs of a run with "
        "`NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=COLL`, and make them equal.",
        0.9,
    ),
    "run.net_mismatch": (
        "NCCL sends a message of a different size than the collective of the receiver expects",
        _FIX_OF_SIZE_OR_SETTINGS,
        0.75,
    ),
    "nccl.truncated_data": ("NCCL received more data than its collective expects", _FIX_OF_SIZE_OR_SETTINGS, 0.75),
}
"""Messages of backends that compare their arguments: the claim, the fix, and the confidence."""


def _of_printed(job: Job, calls: Mapping[int, PrintedCollective], sure: float, *kinds: str) -> Finding:
    events = tuple(event for reported in event_groups(job, *kinds) for event in reported.events)
    differ = len({call.call for call in calls.values()}) > 1
    parted = split_values({rank: call.call if differ else call for rank, call in calls.items()})
    numbers = {rank: call.sequence for rank, call in calls.items() if call.sequence}
    number = next(iter(numbers.values()), "")
    if len(set(numbers.values())) > 1:
        number = ", ".join(f"{sequence} on rank {rank}" for rank, sequence in sorted(numbers.items())[:8])
    elif number:
        number = f"{number} of its group"
    batches = differ_in_first_size(calls)
    operations = {call.operation for call in calls.values()}
    others = {call.operation for rank, call in calls.items() if rank != 0}
    is_of_zero = 0 in calls and len(operations) == 2 and len(others) == 1 and calls[0].operation not in others
    claim = _printed(calls, {group.ranks: calls[group.ranks[0]].text for group in reversed(parted.groups)})
    return finding_from_logs(
        EventGroup(events[0].kind, events),
        claim,
        ranks=parted.odd or tuple(sorted(calls)),
        evidence={
            "calls": _beyond(claim, {str(rank): calls[rank].text for rank in sorted(calls)[:8]}),
            **({"batches_differ": True} if batches else {}),
            **({"number": number} if number else {}),
            **(_TIE if parted.even and len(calls) > 1 else {}),
        },
        effect=_REFUSES,
        fix=_OF_A_LONE_CALL
        if len(calls) == 1
        else _BATCHES
        if batches
        else _fix_of_order(numbers)
        if len(set(numbers.values())) > 1 and len(operations) > 1
        else _OF_RANK_ZERO
        if is_of_zero
        else _fix("size" if len(operations) == 1 else ""),
        confidence=sure,
    )


def _fix_of_order(numbers: Mapping[int, str]) -> str:
    """For ranks that have called different numbers of collectives of a group."""
    counts = {rank: int(number) for rank, number in numbers.items() if number.isdecimal() and len(number) < 20}
    least, most = min(counts.values(), default=0), max(counts.values(), default=0)
    ahead = ranks_in_words(tuple(rank for rank, count in counts.items() if count == most))
    behind = tuple(rank for rank, count in counts.items() if count == least)
    return (
        f"Find the first collective that {ahead} called and {ranks_in_words(behind)} did not, and call it on all ranks."
    )


def _printed(calls: Mapping[int, PrintedCollective], shown: Mapping[tuple[int, ...], str]) -> str:
    """``rank 1 calls ALLREDUCE with shape [12]; rank 0 with shape [10]`` if only the shapes differ."""
    shapes = {ranks: calls[ranks[0]].shape for ranks in shown}
    is_one_call = len({msgspec.structs.replace(call, shape="", sequence="") for call in calls.values()}) == 1
    if is_one_call and len(shown) > 1 and all(shapes.values()):
        operation = calls[next(iter(shown))[0]].operation
        return _calls(_by_shape(operation, shapes), verb=False)
    return _calls(shown)


def _by_shape(operation: str, shapes: Mapping[tuple[int, ...], str]) -> dict[tuple[int, ...], str]:
    first, *rest = shapes.items()
    verb = "call" if len(first[0]) > 1 else "calls"
    return {first[0]: f"{verb} {operation} with shape [{first[1]}]"} | {
        ranks: f"with shape [{shape}]" for ranks, shape in rest
    }


_BATCHES = (
    "Drop the incomplete last batch with `DataLoader(..., drop_last=True)`, or replace bad samples in the collate "
    "function instead of dropping them."
)
_OF_A_LONE_CALL = "Find the calls of the other ranks in their logs, and make the call the same on all ranks."
_REFUSES = "PyTorch compares the calls before they start and rejects them with RuntimeError, which ends the job."
"""With ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` (torch/csrc/distributed/c10d/ProcessGroupWrapper.cpp)."""


@check(
    id="RUN002",
    severity=Severity.ERROR,
    scope=Scope.JOB,
    when="RM",
    needs=(ProgressFacts,),
    or_needs=(RecorderFacts,),
    from_logs=_from_logs,
    impacts={
        r"which Accelerate rejects|^Ranks call different collectives|passed (?:a tensor of shape|tensors of diff)": (
            "The call raises an error, which ends the job."
        ),
        r"^(?:NCCL|Gloo|MPI) (?:received|sends|found)": (
            "The collective fails on the rank that logged this, which ends the job."
        ),
        r"^NCCL detected": "The collective fails with an NCCL error, which ends the job.",
        r"timed out at": "The ranks waited for each other in different collectives, and failed at the timeout.",
    },
    cases=lambda: (
        Passes("a run that moves", running(hosts=2, per_host=2)),
        Fails(
            "one rank timed out at another line",
            logged(*_timed_out(0, 40), *_timed_out(1, 40), *_timed_out(2, 57)),
            ranks=(2,),
        ),
        Passes("all timed out at one line", logged(*_timed_out(0, 40), *_timed_out(1, 40), *_timed_out(2, 40))),
        Passes(
            "a rank that came late lost its peers at another line",
            logged(*_timed_out(0, 40), *_timed_out(1, 40), *_timed_out(2, 57, _CLOSED)),
        ),
        Passes("a rank of which nothing is known", logged(*_timed_out(0, 40), *_timed_out(2, 57))),
        Passes("all in the same call", stalled(2, 2)),
        Passes("another shape of as many elements", _reshaped(running(1, 3))),
        Passes(
            "lists of what each rank has",
            with_call(stalled(1, 3), (1,), "all_gather", user_frame(50), input_sizes=((7,),)).alter(
                ProgressFacts, state="running", idle=0.1
            ),
        ),
        Passes(
            "a call under a condition on the rank is RUN006's",
            with_call(stalled(), (0,), "all_gather", user_frame(57, condition="if rank == 0, line 56")),
        ),
        Passes(
            "printed calls that agree",
            logged(*(_logged_mismatch(rank, "100, 1") for rank in range(3))),
        ),
        Passes(
            "ranks at different sequence numbers",
            logged(_logged_mismatch(0, "77"), _logged_mismatch(1, "100", number="SequenceNumber=39, ")),
        ),
        Fails(
            "calls that are printed and differ",
            logged(_logged_mismatch(2, "77, 1"), _logged_mismatch(1, "100, 1"), _logged_mismatch(3, "100, 1")),
            ranks=(2,),
        ),
        Fails(
            "what torch refuses, as before 1.13",
            logged(*(_REFUSED + _call_of(rank, f"4{rank}, 256", " is running inconsistent", "") for rank in range(2))),
            ranks=(0, 1),
        ),
        Fails("one rank of four gives more elements", _of_size((2,), 4, size=12), ranks=(2,)),
        Fails(
            "one rank of four gives more elements, by dumps",
            _of_size((2,), 4, size=12).drop(ProgressFacts, reason="no such evidence"),
            ranks=(2,),
        ),
        Fails("one rank of four gives another type", _of_size((3,), 4, size=10, kind="Double"), ranks=(3,)),
        Fails("one rank of three calls in another order", _other_order(3), ranks=(0,)),
        Fails("two ranks: neither is the odd one", _other_order(2), ranks=(0, 1)),
        Fails(
            "one rank broadcasts where the others reduce",
            with_call(
                with_call(stalled(1, 3), range(3), "all_reduce", user_frame(50)), (1,), "broadcast", user_frame(50)
            ),
            ranks=(1,),
        ),
        Fails(
            "one rank of three broadcasts from itself, as the stacks show",
            with_call(stalled(1, 3), range(3), "broadcast", user_frame(50))
            .alter(ProgressFacts, root=0)
            .alter(ProgressFacts, ranks=(1,), root=1),
            ranks=(1,),
        ),
        Fails(
            "the same, where the third rank has received and waits in the next broadcast",
            with_call(stalled(1, 3), range(3), "broadcast", user_frame(50))
            .alter(ProgressFacts, root=0)
            .alter(ProgressFacts, ranks=(1,), root=1)
            .alter(RecorderFacts, ranks=(2,), collectives=_one_further),
            ranks=(1,),
        ),
        Fails(
            "one of two ranks gathers on itself and not on rank 0",
            with_call(stalled(1, 2), range(2), "gather", user_frame(50))
            .alter(ProgressFacts, root=0)
            .alter(ProgressFacts, ranks=(1,), root=1),
            ranks=(1,),
        ),
        Fails(
            "one of three ranks makes a group of other ranks",
            _making(stalled(1, 3), "4 of ranks 0, 1, 2").alter(ProgressFacts, ranks=(1,), group="4 of ranks 1, 2"),
            ranks=(1,),
        ),
        Fails(
            "each of two ranks makes a group of other ranks",
            _making(stalled(), "4 of ranks 0, 1").alter(ProgressFacts, ranks=(1,), group="4 of ranks 1"),
            ranks=(0, 1),
        ),
        Passes(
            "a rank that makes the next group already",
            _making(stalled(1, 3), "4 of ranks 0, 1, 2").alter(ProgressFacts, ranks=(1,), group="5 of ranks 1, 2"),
        ),
        Fails(
            "integers among floats, which the back end adds up without an error",
            with_call(running(1, 3), (1,), "all_reduce", user_frame(50), ago=1, types=("Int",)),
            ranks=(1,),
        ),
        Fails(
            "more elements on one rank, for which Gloo aborts another one",
            over_gloo(_of_size((2,), 3, size=12)).alter(ProgressFacts, ranks=(1,), state="gone"),
            ranks=(2,),
        ),
        Fails(
            "calls printed by TORCH_DISTRIBUTED_DEBUG=DETAIL",
            with_failure(stalled(), (0, 1), "RuntimeError", _mismatch(1, 0), user_frame(50)),
            ranks=(0, 1),
        ),
        Fails(
            "printed calls of three ranks",
            with_failure(
                with_failure(
                    with_call(stalled(1, 3), (1,), "all_reduce", user_frame(50)),
                    (0,),
                    "RuntimeError",
                    _mismatch(0, 1),
                    user_frame(50),
                ),
                (2,),
                "RuntimeError",
                _mismatch(2, 1),
                user_frame(50),
            ),
            ranks=(1,),
        ),
    ),
)
def collectives_differ(job: Job) -> Iterator[Verdict]:
    """Ask whether all ranks of a group call the same collectives in the same order.

    Why it hurts: the ranks wait for each other until the timeout, abort, or exchange wrong values without an error.
    Fix: Call the same collectives in the same order on all ranks, with the same number of elements and the same type.
    """
    found = diagnose_stall(job)
    if found is None:
        yield from map(_of_silence, silent_mismatches(job))
        return
    if found.kind == "differ" and found.divergence is not None:
        yield with_cause(_of_calls(found, found.divergence), cause_of_calls(job, found))
    elif found.kind == "died" and found.ending and found.ending.nature == "mismatch":
        failures = [one.failure for one in found.states.ranks.values() if one.failure]
        reported = {int(rank): call for failure in failures for rank, call in _RUNNING.findall(failure.message)}
        parted = split_values(reported)
        line = found.first.site.frame if found.first and found.first.site else None
        claim = _refused({group.ranks: str(group.value) for group in reversed(parted.groups)})
        yield Finding(
            claim,
            ranks=parted.odd or found.ranks,
            evidence={
                **stall_evidence(found),
                "calls": _beyond(claim, dict(sorted(_shown_calls(reported).items())[:8])),
                **(_TIE if parted.even else {}),
            },
            effect=_REFUSES,
            fix=_fix_of_refused(reported.values(), place_of_frame(line)),
            confidence=0.7 if parted.even else found.confidence,
            explains=("RUN001", "RUN004", "RUN012"),
            source=Source(line.file, line.line) if line else None,
        )
    elif found.kind in ("together", "undetermined") and not found.states.has_recorder:
        yield Unknown("no flight recorder shows what the ranks called", found.ranks, "export TORCH_FR_BUFFER_SIZE=2000")


def _of_calls(found: Diagnosis, divergence: Divergence) -> Finding:
    variants = divergence.variants
    odd, others = (variants[0], variants[1]) if divergence.is_even else (variants[1], variants[0])
    mine, theirs = call_in_words(odd.entry), call_in_words(others.entry)
    if odd.entry.operation != others.entry.operation or mine == theirs:
        mine, theirs = f"{odd.entry.operation}{_at(odd.site)}", f"{others.entry.operation}{_at(others.site)}"
    if divergence.aspect == "root":
        mine, theirs = _with_root(odd.entry), _with_root(others.entry)
    if divergence.aspect == "members":
        mine, theirs = _with_members(odd.entry), _with_members(others.entry)
    which = f"{divergence.sequence} of {found.states.name_of(divergence.group)}" if divergence.sequence else ""
    claim, stalled_at = _calls({odd.ranks: mine, others.ranks: theirs}), stall_evidence(found)
    return Finding(
        claim,
        ranks=found.ranks,
        evidence={
            **stalled_at,
            **({"number": which} if which else {}),
            **({"aborted_by_gloo": list(found.ending.ranks)} if found.ending else {}),
            **(_TIE if divergence.is_even else {}),
            "calls": {
                ranks_in_words(one.ranks): text
                for one in variants[:8]
                if (text := _rest_of_call(f"{claim}; {_place_in(stalled_at, one)}", one, divergence.aspect))
            },
        },
        effect=effect_of_abort(found) or "The ranks wait for each other in these calls until the timeout.",
        fix=_hint(found, odd, others) or _fix(divergence.aspect, odd, others),
        confidence=found.confidence,
        explains=("RUN001", "RUN004", "RUN012"),
        source=Source(odd.site.frame.file, odd.site.frame.line) if odd.site.frame and odd.site.frame.line else None,
    )


def _place_in(evidence: Mapping[str, object], one: MismatchGroup) -> str:
    """What the evidence shows of the location of a rank of the group."""
    where = evidence.get("where")
    return str(where.get(str(one.ranks[0]), "")) if isinstance(where, dict) else ""


def _rest_of_call(shown: str, one: MismatchGroup, aspect: str) -> str:
    """``all_reduce of 12 Float elements at train.py:62, `if rank == 0` (line 60)`` without the parts that are shown."""
    call = _IN_WORDS.get(aspect, call_in_words)(one.entry)
    place, condition = one.site.place.partition(" (")[0], condition_in_words(one.site.condition)
    parts = ["" if call in shown else call, f"at {one.site.place}" if place and place not in shown else ""]
    return ", ".join(filter(None, (" ".join(filter(None, parts)), "" if condition in shown else condition)))


def _beyond(claim: str, calls: Mapping[str, str]) -> dict[str, str]:
    """The calls of ranks without those that the claim has, in full or by their shape."""
    shapes = {rank: re.search(r" of shape (\[[^]]*\])", call) for rank, call in calls.items()}
    has_shape = {rank for rank, shape in shapes.items() if shape and f" with shape {shape[1]}" in claim}
    return {rank: call for rank, call in calls.items() if call not in claim and rank not in has_shape}


def _hint(found: Diagnosis, odd: MismatchGroup, others: MismatchGroup) -> str:
    """From stacks alone: some ranks may have left the loop, or may be the only ones that reach their line."""
    if not found.states.is_sampled or odd.key == others.key or not odd.site.place or odd.site.condition:
        return ""
    trains = [one for one in (odd, others) if one.site.words == "backward"]
    if len(trains) == 1:
        left = others if trains[0] is odd else odd
        return (
            f"Give all ranks the same number of batches if {ranks_in_words(left.ranks)} "
            f"{'have' if len(left.ranks) > 1 else 'has'} left the training loop (DATA001, DATA010)."
        )
    verb = "reach" if len(odd.ranks) > 1 else "reaches"
    who = ranks_in_words(odd.ranks)
    return f"If only {who} {verb} {odd.site.place}, as under `if rank == 0:`, make that call on all ranks (RUN006)."


def _s(ranks: tuple[int, ...]) -> str:
    return "" if len(ranks) > 1 else "s"


def _at(site: CallSite) -> str:
    if site.words:
        return " in the backward pass" if site.words == BACKWARD else f" in {site.words}"
    return f" at {site.place.partition(' (')[0]}" if site.place else ""


def _calls(calls: Mapping[tuple[int, ...], str], *, verb: bool = True) -> str:
    """``rank 2 calls all_reduce of 12 Float elements; ranks 0 and 1 call all_reduce of 10 Float elements``.

    ``verb``: the calls have no verb yet."""
    if len(calls) == 1:
        ((ranks, call),) = calls.items()
        return f"{ranks_in_words(ranks)} called {call}, but another rank made a different call"
    return "; ".join(
        f"{ranks_in_words(ranks)}{f' call{_s(ranks)}' if verb else ''} {call}" for ranks, call in calls.items()
    )


def _of_silence(divergence: Divergence) -> Finding:
    is_shape = divergence.aspect == "shape"
    calls = {
        tuple(one.ranks): f"{call_in_words(one.entry)}{_shaped(one.entry) if is_shape else ''}"
        for one in divergence.variants[::-1][:4]
    }
    frame = next((one.site.frame for one in divergence.odd if one.site.frame), None)
    return Finding(
        _calls(calls),
        ranks=divergence.odd_ranks,
        evidence={
            "number": f"{divergence.sequence} of {divergence.variants[0].entry.group_words}",
            **(_TIE if divergence.is_even else {}),
            "places": {ranks_in_words(one.ranks): one.site.place for one in divergence.variants[:8] if one.site.place},
        },
        effect=_SILENT[is_shape],
        fix=_fix(divergence.aspect, *divergence.variants[1::-1]),
        severity=Severity.WARNING if is_shape else Severity.ERROR,
        confidence=0.6 if is_shape else 0.7 if divergence.is_even else 0.9,
        source=Source(frame.file, frame.line) if frame else None,
    )


_SILENT = {
    False: "No error is raised, but the results are wrong.",
    True: "No error is raised: elements are matched by position, regardless of their shape.",
}


def _shaped(entry: Collective) -> str:
    return " as " + ", ".join(" x ".join(map(str, sizes)) for sizes in entry.input_sizes)


def _with_root(entry: Collective) -> str:
    return f"{entry.operation} {_ROOTS.get(entry.operation, 'from')} rank {entry.root}"


def _with_members(entry: Collective) -> str:
    """``new_group of ranks 0, 1, 2``"""
    return f"{entry.operation} of {entry.group}"


_IN_WORDS: Mapping[str, Callable[[Collective], str]] = {"root": _with_root, "members": _with_members}
"""How the calls of ranks are worded that differ in neither their sizes nor their types."""
_ROOTS = {"reduce": "to", "gather": "to"}
"""The word before the root of an operation, if it is not ``from``."""


def _fix(aspect: str, odd: MismatchGroup | None = None, others: MismatchGroup | None = None) -> str:
    place = odd.site.place if odd is not None else ""
    at = f" at {place}" if place else ""
    if aspect == "size":
        return (
            f"Pass the same number of elements{at} on all ranks: pad the tensor to the largest size before the call."
            if at
            else _FIX_OF_SIZE
        )
    if aspect == "root":
        name = "`dst`" if odd is not None and odd.entry.operation in _ROOTS else "`src`"
        return f"Pass the same {name}{at} on all ranks, such as 0: it is not the rank of the caller."
    if aspect in _SAME:
        return f"Pass the same {_SAME[aspect].format(at=at)}."
    if aspect == "type" and odd is not None and others is not None:
        kinds = ", ".join(f"`{_TYPES.get(kind, kind)}`" for kind in others.entry.types)
        if place and others.site.place and place != others.site.place:
            return (
                f"Make all ranks reach the same call, {place} or {others.site.place}; convert the tensor{at} to "
                f"{kinds} only if both lines pass the same tensor."
            )
        return f"Convert the tensor{at} to {kinds} on {ranks_in_words(odd.ranks)} before the call."
    if aspect == "type":
        return "Convert the tensor to the same type on all ranks before the call."
    condition = odd.site.condition if odd is not None else ""
    if condition:
        words, _, line = condition.removeprefix("else of ").rpartition(", line ")
        branches = f"`{words}` (line {line})" if words else f"`{line}`"
        return f"Call the same collectives in both branches of {branches}."
    branch = "a branch that only some of them take"
    if odd is not None and others is not None and place and place == others.site.place:
        branch = f"the value that selects {odd.entry.operation}{at} on {ranks_in_words(odd.ranks)}"
    elif odd is not None and place:
        branch = f"the branch that leads {ranks_in_words(odd.ranks)} to {place}"
    return f"Make all ranks call the same collectives in the same order: look for {branch}."


_SAME = {
    "members": "list of ranks{at} on all ranks, including those that are not in it",
    "shape": "shape{at} on all ranks, unless the difference is intended",
}
"""What all ranks have to pass, by the aspect that differs."""
_TYPES = {
    "BFloat16": "torch.bfloat16",
    "Double": "torch.float64",
    "Float": "torch.float32",
    "Half": "torch.float16",
    "Int": "torch.int32",
    "Long": "torch.int64",
}
"""Types of the flight recorder (c10::ScalarType) as they are written in a program."""


def _fix_of_refused(calls: Collection[str], place: str) -> str:
    """How to fix calls that the process group wrapper compared: another size, or another collective."""
    at = f" at {place}" if place else ""
    operations = {dict(_PARTS.findall(call)).get("OpType") for call in calls}
    if len(operations) == 1:
        parts = [dict(_PARTS.findall(call)) for call in calls]
        has_one_type = len({part.get("TensorDtypes") for part in parts}) == 1
        has_one_shape = len({part.get("TensorShape") for part in parts}) == 1
        same = "shape" if has_one_type else "type" if has_one_shape else "shape and type"
        return f"Pass a tensor of the same {same}{at} on all ranks."
    return f"Make all ranks call the same collective{at}: look for a branch that only some of them take."


def _refused(calls: Mapping[tuple[int, ...], str]) -> str:
    """``rank 1 calls ALLREDUCE with shape [12]; rank 0 with shape [10]`` if only the shapes differ."""
    parts = {ranks: dict(_PARTS.findall(call)) for ranks, call in calls.items()}
    shapes = {ranks: (own.get("TensorShape") or "").strip("[] ") for ranks, own in parts.items()}
    kinds = {(own.get("OpType"), own.get("TensorDtypes")) for own in parts.values()}
    if len(kinds) == 1 and len(set(shapes.values())) > 1 and all(shapes.values()):
        return _calls(_by_shape(next(iter(parts.values())).get("OpType") or "", shapes), verb=False)
    return _calls(_headlines(calls))


def _shown_calls(calls: Mapping[int, str]) -> dict[str, str]:
    """The calls by rank, in full if they differ in what their operations, shapes and numbers do not show."""
    short = {str(rank): _headline(call) + _number(call) for rank, call in calls.items()}
    return short if len(set(short.values())) > 1 else {str(rank): call[:400] for rank, call in calls.items()}


def _headlines(calls: Mapping[tuple[int, ...], str]) -> dict[tuple[int, ...], str]:
    """The operation and shape of each call; with its number if only the numbers differ."""
    plain = {ranks: _headline(call) for ranks, call in calls.items()}
    if len(set(plain.values())) > 1 or len(plain) == 1:
        return plain
    return {ranks: _headline(call) + _number(call) for ranks, call in calls.items()}


def _number(call: str) -> str:
    number = dict(_PARTS.findall(call)).get("SequenceNumber", "").strip("[] ")
    return f", sequence number {number}" if number else ""


def _headline(call: str) -> str:
    parts = {name: value.strip("[] ") for name, value in _PARTS.findall(call)}
    shape = parts.get("TensorShape")
    words = parts.get("OpType") or call.partition(",")[0][:80]
    kind = f" ({parts['TensorDtypes']})" if "TensorDtypes" in parts else ""
    return words + (f" of shape [{shape}]{kind}" if shape is not None else "")
