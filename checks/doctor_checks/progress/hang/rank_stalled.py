"""RUN001: the run hangs because a rank did not reach a collective that the others wait in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from doctor.analysis.call_sites import place_of_frame
from doctor.analysis.hang.diagnosis import Diagnosis
from doctor.analysis.hang.diagnosis_rules import diagnose_stall
from doctor.analysis.hang.left_loops import RanksThatLeft
from doctor.analysis.hang.rank_state import repeated, searched
from doctor.analysis.hang.uneven_loaders import UnevenLoaders
from doctor.analysis.logs.logging_advice import ENTRIES, recorder_assignments
from doctor.analysis.logs.root_event import first_trouble
from doctor.analysis.stats.rank_roles import uses_lightning
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
from doctor.facts import Collective, EpochEnd, Frame, LeftLoop, PointInTime, ProgressFacts, RecorderFacts
from doctor.testing import Fails, JobBuilder, Passes, logged, package_frame, running, stalled, user_frame
from doctor.testing.stalled_run import with_call, with_failure, with_late_ranks, without_recorders
from doctor.testing.training_run import NOON
from doctor_checks.progress._named_causes import cause_of_calls, with_cause
from doctor_checks.progress.hang._ras_suspects import ras_suspects
from doctor_checks.progress.hang._stall_text import (
    blocked_text,
    condition_in_words,
    missed_call,
    numbered_call,
    stall_evidence,
    stall_ranks,
    stall_source,
    stall_waiters,
)
from doctor_checks.progress.hang._store_waits import STORE_WAITS, waits_for_a_rank

_HELD = (
    package_frame("python3.11/threading.py", 331, "wait"),
    package_frame("doctor/monitor/watchdog/rounds/round_request.py", 41, "wait"),
    user_frame(52, "main"),
)
_HELD_FOR: dict[str, Any] = {
    "state": "running",
    "point": "batch-end",
    "idle": 9.0,
    "still": 8.0,
    "blocked": "an event or a condition (threading), which no other thread can bring about",
}
_SLEEPS = user_frame(58, "training_step")
_SEARCHES: dict[str, Any] = {
    "state": "running",
    "point": "batch-end",
    "idle": 12.0,
    "loops": 10.0,
    "blocked": "the end of a search: a recursion of solve() at train.py:40",
}
_BEFORE: dict[str, Any] = {"state": "running", "stage": "setup", "point": "setup", "step": None}
_TRAINS_ON: dict[str, Any] = {
    "state": "running",
    "point": "step",
    "step": 3000,
    "limit": 60.0,
    "recent": tuple(PointInTime("train", "step", batch, NOON + batch) for batch in range(4)),
}
_EVALUATES_ON: dict[str, Any] = {
    "state": "running",
    "point": "step",
    "batch": 1600,
    "at": NOON,
    "recent": tuple(PointInTime("validate", "step", batch, NOON + batch) for batch in range(4)),
}


def _evaluating(batch: int) -> JobBuilder:
    """Four ranks, which wait after so many batches of an evaluation."""
    return stalled(1, 4).alter(ProgressFacts, stage="validate", epoch=0, loader=0, batch=batch, at=NOON)


_ASLEEP: dict[str, Any] = {"still": 50.0, "blocked": "the end of a sleep"}


def _device_behind(old: tuple[Collective, ...]) -> tuple[Collective, ...]:
    kept = ("group", "sequence", "operation", "backend", "input_sizes", "output_sizes", "types", "at", "frames")
    return (*old[:-2], *(Collective(**{name: getattr(one, name) for name in kept}) for one in old[-2:]))


_WATCHDOG = (
    "[rank{rank}]:[E626 06:24:44 ProcessGroupNCCL.cpp:616] [Rank {rank}] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum={number}, OpType=ALLREDUCE, NumelIn=98, NumelOut=98, Timeout(ms)=600000) ran for 600020 "
    "milliseconds before timing out."
)
_STORE_WAIT = (
    "[rank{rank}]: torch.distributed.DistStoreError: wait timeout after 600000ms, keys: /default_pg/0//cuda//0"
)
_CLOSED = "[pair.cc:553] Connection closed by peer [127.0.0.1]:27845. This is typically caused by a remote worker"
_GLOO = "[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 12000ms for recv operation to complete"


def _from_logs(job: Job) -> Iterator[Finding]:
    for suspect in ras_suspects(job):
        if suspect.state in ("silent", "behind"):
            yield suspect.finding(_RAS_FIX)
    found = diagnose_stall(job)
    if found is not None and found.kind != "undetermined":
        return
    if is_logged(job, *_NAMED_MISSING):
        for group in event_groups(job, *_NAMED_MISSING):
            yield from _of_named(job, group)
        return
    waited = tuple(event for group in event_groups(job, *_TIMEOUTS) for event in group.events)
    ran_out = {event.rank for event in waited if event.rank is not None}
    others = tuple(sorted({rank.number for rank in job.ranks}.difference(ran_out)))
    missing = others if len(others) < len(ran_out) else ()
    if missing:
        yield _of_the_others(job, EventGroup(waited[0].kind, waited), missing)
    elif waited:
        yield _of_timeouts(job, EventGroup(waited[0].kind, waited))
    else:
        yield from waits_for_a_rank(job) if is_logged(job, *STORE_WAITS) else _of_echoes(job)


_RAS_FIX = (
    "Run `py-spy dump --native --pid PID` on the host of {who} to find the blocking call, and query RAS again "
    "(`ncclras -v`) to see whether its counts advance."
)
_NAMED_MISSING = ("torch.monitored_barrier", "torch.nccl.desync.missing")


_TIMEOUTS = (
    "torch.nccl.watchdog_timeout",
    "torch.nccl.blocking_wait",
    "torch.nccl.timeout_frame",
    "torch.nccl2.timeout",
    "torch.monitored_barrier.nonzero",
    "torch.monitored_barrier.rank0",
    "gloo.timeout",
)
_ECHOES = (
    "torch.nccl.dump_signal",
    "torch.nccl.dump_observed",
    "torch.nccl.watchdog_detected",
    "torch.nccl.takedown",
    "torch.nccl.async_danger",
)
"""Messages of ranks after a collective failed or timed out, which do not name it."""


def _of_echoes(job: Job) -> Iterator[Finding]:
    echoes = tuple(event for group in event_groups(job, *_ECHOES) for event in group.events)
    if echoes and first_trouble(job) is None:
        group = EventGroup(echoes[0].kind, echoes)
        on = f" on {ranks_in_words(group.ranks)}" if group.ranks else ""
        yield finding_from_logs(
            group,
            f"A collective failed or timed out{on}, but the message about it is not in this log",
            ranks=(),
            effect="The process ends, and the log does not show which collective or rank caused it.",
            fix=_collect(job),
            severity=Severity.WARNING,
            confidence=0.35,
            explains=("RUN012", "RUN016"),
            symptoms=False,
        )


def _of_named(job: Job, group: EventGroup) -> Iterator[Finding]:
    texts = (*group.values("failed"), *group.values("ranks"))
    missing = tuple(sorted({int(one) for text in texts for one in text.split(",") if one.strip()}))
    is_most = 2 * len(missing) > job.world_size
    if is_most and is_logged(job, "torch.wrapper_barrier"):
        # The present rank made a call that the others did not: RUN006.
        return
    is_barrier = group.kind == "torch.monitored_barrier"
    their, end = ("their", "ends") if len(missing) > 1 else ("its", "end")
    yield finding_from_logs(
        group,
        f"{ranks_in_words(missing)} did not reach "
        f"{f'a barrier{_limit_of_barrier(group)}' if is_barrier else 'any collective'}",
        ranks=missing,
        effect=_effect_of_barrier(group)
        if is_barrier
        else "The collective of the other ranks timed out, which ends the job.",
        fix=f"Read the {end} of the log{end[3:]} of {ranks_in_words(missing)}, and the output of `dmesg -T` on {their} "
        f"host{end[3:]}, to find out what stopped or blocked the process{'es' if len(missing) > 1 else ''}.",
        confidence=0.6 if is_most else 0.8,
        explains=("RUN004", "RUN012", "RUN016"),
        symptoms=False,
    )


def _effect_of_barrier(group: EventGroup) -> str:
    """``The barrier fails on rank 0, which ends the job.``"""
    rank = group.value("rank")
    return f"The barrier fails{f' on rank {rank}' if rank is not None else ''}, which ends the job."


def _limit_of_barrier(group: EventGroup) -> str:
    """`` within 120 s``"""
    ms = group.value("ms")
    return f" within {int(ms) / 1000:g} s" if ms is not None and len(ms) < 12 else ""


def _of_the_others(job: Job, group: EventGroup, missing: tuple[int, ...]) -> Finding:
    return finding_from_logs(
        group,
        f"{ranks_in_words(missing)} did not reach the collective in which {ranks_in_words(group.ranks)} timed out",
        ranks=missing,
        fix=_collect(job, f"Find in the log of {ranks_in_words(missing)} what ended or delayed the process"),
        confidence=0.6,
        explains=("RUN004", "RUN012", "RUN016"),
        symptoms=False,
    )


_OF_WORK = lazy_compile(r"(SeqNum|OpType)=(\w+)")


def _of_timeouts(job: Job, group: EventGroup) -> Finding:
    first = group.first
    # The message of a blocking wait has its collective in one value (Work::toString, ProcessGroupNCCL.cpp).
    work = dict(_OF_WORK.findall(group.value("work") or ""))
    operation, number = group.value("op") or work.get("OpType"), group.value("seq") or work.get("SeqNum")
    what = "1 element" if first.value("nin") == "1" else ""
    counted = ", ".join(part for part in (f"collective {number}" if number else "", what) if part)
    call = f"{operation or 'a collective'}{f' ({counted})' if counted else ''}"
    who = f" on {ranks_in_words(group.ranks)}" if group.ranks else ""
    timeout = group.value("timeout") or ""
    known = {
        "elements": first.value("nin"),
        "timeout_seconds": int(timeout) / 1000 if timeout.isdecimal() and len(timeout) < 12 else None,
    }
    return finding_from_logs(
        group,
        f"{call} timed out{who}; the logs do not show which rank was missing",
        ranks=(),
        evidence={name: value for name, value in known.items() if value},
        # A blocking wait aborts the communicator itself, and writes no dump (WorkNCCL::wait, ProcessGroupNCCL.cpp).
        fix=_collect(job) + ("\nunset TORCH_NCCL_BLOCKING_WAIT NCCL_BLOCKING_WAIT" if group.value("work") else ""),
        severity=Severity.WARNING,  # a failure that is seen, and not explained
        confidence=0.4,
        explains=("RUN012", "RUN016"),
        symptoms=False,
    )


_OF_TORCHCOMMS = ("torch.nccl2.timeout", "torch.nccl2.abort")
"""Messages after ``[TC]``. torchcomms logs this prefix, whose recorder is a hook, and so does torch's backend nccl2,
whose recorder reads TORCH_FR_BUFFER_SIZE and dumps by default (torch/csrc/distributed/c10d/nccl2/HeartbeatMonitor.cpp);
neither reads TORCH_NCCL_DUMP_ON_TIMEOUT."""


def _collect(job: Job | None, first: str = "") -> str:
    run = "run again with these variables, and pass the logs and dumps of all ranks to `doctor diagnose`:"
    if job is not None and is_logged(job, *_OF_TORCHCOMMS):
        run = f"attach torchcomms' `FlightRecorderHook` to the communicator, if the program uses torchcomms, and {run}"
        return (
            f"{f'{first}, or {run}' if first else run[:1].upper() + run[1:]}\n"
            f"export TORCH_FR_BUFFER_SIZE={ENTRIES} TORCHCOMM_FR_DUMP_TEMP_FILE=torchcomm_trace_\n"
            "export NCCL_DEBUG=INFO"
        )
    return (
        f"{f'{first}, or {run}' if first else run.capitalize()}\n"
        f"export {recorder_assignments(job)} TORCH_NCCL_DUMP_ON_TIMEOUT=1\n"
        "export NCCL_DEBUG=INFO TORCH_DISTRIBUTED_DEBUG=DETAIL"
    )


def _leaves(sketch: JobBuilder, statement: str, **progress: Any) -> JobBuilder:
    loop = LeftLoop("train", 0, 1, 40, user_frame(52, "main", "if rank == 2, line 51"), statement)
    return sketch.alter(ProgressFacts, ranks=(2,), left=(loop,), stack=(), **progress)


def _dumps(sketch: JobBuilder) -> JobBuilder:
    return sketch.drop(ProgressFacts, reason="no such evidence")


@check(
    id="RUN001",
    severity=Severity.ERROR,
    scope=Scope.JOB,
    when="RM",
    needs=(ProgressFacts,),
    or_needs=(RecorderFacts,),
    from_logs=_from_logs,
    impacts={
        r"logs do not show which rank": ("The timeout ends the job, and the steps since the last checkpoint are lost."),
        r"^Horovod": "The other ranks wait indefinitely, unless `HOROVOD_STALL_SHUTDOWN_TIME_SECONDS` is set.",
        r"the network or a device (?:is probably|may be) at fault": (
            "Every rank blocks until the timeout of the collective."
        ),
        r"(?:has|have) not finished": "The other ranks wait for this device until the timeout of the collective.",
        r"left no flight-recorder dump": ("If the process has exited, the other ranks wait for it until the timeout."),
        r"to set a key in the store": "The waiting ranks fail in the first collective of their process group.",
    },
    cases=lambda: (
        Passes("a run that moves", running(hosts=2, per_host=2)),
        Passes("a run without a flight recorder that moves", without_recorders(running(1, 4))),
        Passes(
            "all compile: no rank waits",
            with_late_ranks(stalled(), (0, 1), package_frame("torch/_inductor/compile_fx.py", 700, "compile_fx")),
        ),
        Passes(
            "one rank validates slowly, no rank waits for it",
            with_late_ranks(running(1, 4), (2,), user_frame(80, "validation_step"), state="stalled", idle=40.0),
        ),
        Passes("progress went on after a stall", stalled().alter(ProgressFacts, state="running", idle=0.2)),
        Passes(
            "a rank that is within its own pace",
            with_late_ranks(stalled(1, 4), (2,), _SLEEPS, state="running", point="step", limit=60.0),
            silent=False,
        ),
        Passes(
            "a rank that stands before the first batch, beside one that prepares",
            with_late_ranks(stalled(1, 3), (1, 2), user_frame(8, ""), **_BEFORE).alter(
                ProgressFacts, ranks=(1,), **_ASLEEP
            ),
            silent=False,
        ),
        Fails(
            "a rank that stands before the first batch",
            with_late_ranks(stalled(), (1,), user_frame(8, ""), **_BEFORE, **_ASLEEP),
            ranks=(1,),
        ),
        Fails(
            "a rank that trains on without the others",
            with_late_ranks(stalled(1, 4), (2,), _SLEEPS, **_TRAINS_ON, at=NOON),
            ranks=(2,),
        ),
        Fails(
            "a rank whose evaluation has no end",
            with_late_ranks(_evaluating(19), (2,), _SLEEPS, **_EVALUATES_ON),
            ranks=(2,),
        ),
        Passes(
            "a rank with a few more batches to evaluate",
            with_late_ranks(_evaluating(1000), (2,), _SLEEPS, **_EVALUATES_ON),
            silent=False,
        ),
        Passes(
            "a rank that has trained on since the others were heard of",
            with_late_ranks(stalled(1, 4), (2,), _SLEEPS, **_TRAINS_ON, at=NOON + 3600.0),
            silent=False,
        ),
        Passes(
            "ranks that the doctor holds for the first check of all ranks",
            with_late_ranks(stalled(1, 4), (0, 2, 3), *_HELD, **_HELD_FOR),
            silent=False,
        ),
        Passes(
            "ranks that the doctor holds, one of which it has released",
            with_late_ranks(with_late_ranks(stalled(1, 4), (0, 2), *_HELD, **_HELD_FOR), (3,), _SLEEPS, **_TRAINS_ON),
            silent=False,
        ),
        Fails(
            "a rank that stands elsewhere while the doctor holds others",
            with_late_ranks(with_late_ranks(stalled(1, 4), (0, 2), *_HELD, **_HELD_FOR), (3,), _SLEEPS),
            ranks=(3,),
        ),
        Fails(
            "log of one timeout and nothing else",
            logged(_WATCHDOG.format(rank=6, number=4)),
            severity=Severity.WARNING,
        ),
        Fails(
            "log of ranks that waited for the id of a communicator",
            logged(_STORE_WAIT.format(rank=1), _STORE_WAIT.format(rank=2)),
            ranks=(0,),
            severity=Severity.WARNING,
        ),
        Fails(
            "log of a process that ends because a collective failed",
            logged("[Rank 3] To avoid data inconsistency, we are taking the entire process down."),
            severity=Severity.WARNING,
        ),
        Fails(
            "log of a rank that its peers waited for over Gloo",
            logged(*(f"[rank{rank}]: RuntimeError: {_GLOO}" for rank in (0, 2)), "[rank1]: world_size: 3"),
            ranks=(1,),
        ),
        Fails(
            "log of a rank that was behind",
            logged(
                *(_WATCHDOG.format(rank=rank, number=808) for rank in (0, 1, 3)),
                "[rank2]:[E626 06:24:45 ProcessGroupNCCL.cpp:1785] [PG ID 0 PG GUID 0(default_pg) Rank 2] Received a "
                "dump signal due to a collective timeout from rank 0 and we will try our best to dump the debug info. "
                "Last enqueued NCCL work: 807, last completed NCCL work: 807.",
            ),
            ranks=(2,),
        ),
        Fails(
            "a rank that sleeps in its step", with_late_ranks(stalled(1, 4), (2,), _SLEEPS, point="step"), ranks=(2,)
        ),
        Fails(
            "a rank in a search that grows exponentially",
            with_late_ranks(stalled(1, 2), (1,), _SLEEPS, **_SEARCHES),
            ranks=(1,),
        ),
        Fails(
            "a stopped rank",
            with_late_ranks(stalled(2, 2), (0,), state="stopped", seen_by=1, kernel_state="T"),
            ranks=(0,),
        ),
        Fails(
            "a rank whose interpreter is held by C code",
            with_late_ranks(stalled(2, 2), (3,), _SLEEPS, state="silent", stack_from="signal"),
            ranks=(3,),
        ),
        Fails("a rank that reports nothing", stalled(2, 2).only((0, 1, 2), absent=(3,)), ranks=(3,)),
        Fails(
            "without recorders, by stacks",
            without_recorders(with_late_ranks(stalled(1, 4), (1,), _SLEEPS, point="step")).alter(
                ProgressFacts,
                ranks=(0, 2, 3),
                stack=(package_frame("torch/distributed/distributed_c10d.py", 3245, "all_reduce"), user_frame(60)),
            ),
            ranks=(1,),
        ),
        Fails(
            "a device that does not finish",
            stalled(1, 4, gpus=4).alter(RecorderFacts, ranks=(2,), collectives=_device_behind),
            ranks=(2,),
        ),
        Fails(
            "a loader that ended, and others that go on",
            with_call(stalled(1, 3), (1,), "barrier", user_frame(70)).alter(
                ProgressFacts, ranks=(1,), point="epoch-end", ended=(EpochEnd("train", 0, 1, 40),), batch=39
            ),
            ranks=(1,),
        ),
        Fails(
            "a rank that ended its run",
            with_late_ranks(stalled(1, 3), (0,), state="ended", stage="teardown", point="ended"),
            ranks=(0,),
        ),
        Fails(
            "a rank that left its loop, and waits behind it",
            _leaves(with_call(stalled(1, 3), (2,), "barrier", user_frame(70)), "break", point="epoch-end"),
            ranks=(2,),
        ),
        Fails(
            "a rank that returned out of its loop",
            _leaves(with_late_ranks(stalled(1, 3), (2,)), "return", state="ended", point="epoch-end"),
            ranks=(2,),
        ),
        Fails(
            "a rank that returned, which the others lost",
            _leaves(with_failure(running(1, 3), (0, 1), "RuntimeError", _CLOSED), "return", state="ended"),
            ranks=(2,),
        ),
        Fails(
            "the same, before one of the others has lost it",
            _leaves(with_failure(stalled(1, 3), (0,), "RuntimeError", _CLOSED), "return", state="ended").alter(
                ProgressFacts, ranks=(1,), state="running", idle=5.0
            ),
            ranks=(2,),
        ),
        Fails("all in the same call: the network", stalled(2, 2), ranks=(0, 1, 2, 3)),
        Passes("dumps of a moment at which all are in one call, and how long can't be seen", _dumps(stalled(2, 2))),
        Passes("dumps of which most were not collected", _dumps(stalled(1, 4)).only((0,))),
        Fails("dumps of a rank that did not join", _dumps(with_late_ranks(stalled(1, 4), (2,))), ranks=(2,)),
        Fails("dumps of all ranks but one", _dumps(stalled(1, 4)).only((0, 1, 3)), ranks=(2,)),
        Fails(
            "dumps of a device that does not finish",
            _dumps(stalled(1, 4, gpus=4).alter(RecorderFacts, ranks=(2,), collectives=_device_behind)),
            ranks=(2,),
        ),
    ),
)
def rank_stalled(job: Job) -> Iterator[Verdict]:
    """Ask whether a rank has failed to reach a collective that the others are waiting in.

    Why it hurts: the other ranks block in a collective until its timeout and then report errors that do not name the
    missing rank.
    Fix: Find what blocks the missing rank with `py-spy dump --pid PID`, or in the end of its log.
    """
    found = diagnose_stall(job)
    if found is None:
        if _is_snapshot(job):
            yield Unknown(_ONE_STACK, unhide="collect the stacks of all ranks, and again after a minute")
        return
    if found.kind == "undetermined":
        yield Unknown(
            "ranks are blocked, but the missing peer could not be determined",
            found.ranks,
            f"export {recorder_assignments(job)}",
        )
    elif found.holds_lock or found.driver or found.data_ended:
        return  # RUN016, DATA010
    elif found.uneven is not None:
        yield _finding(found, *_loader_ended(found, found.uneven), _effect_of_leaving(found.uneven.ended, found.uneven))
    elif found.left is not None:
        yield with_cause(_of_left(found, found.left, uses_lightning(job)), cause_of_calls(job, found))
    elif found.kind in _SAYINGS:
        claim, fix = _SAYINGS[found.kind](found)
        yield _finding(found, claim, _fix_of_stacks(found, job) or fix)


_ONE_STACK = "one stack of each rank does not show whether the ranks make progress, and no rank differs"


def _is_snapshot(job: Job) -> bool:
    """Whether all that is known of the ranks is one stack of each."""
    known = [progress for progress, _ in job.facts(ProgressFacts)]
    return bool(known) and all(one.sampled and one.idle is None and one.state != "ended" for one in known)


def _fix_of_stacks(found: Diagnosis, job: Job) -> str:
    """What to do about a rank that was read from outside, by ``doctor attach`` or from collected stacks."""
    first = found.first
    if found.kind != "elsewhere" or first is None or not first.is_sampled:
        return ""
    is_collected = job.evidence is not None
    if first.state == "ended" or _has_left_program(first.stack):
        return (
            f"Make {ranks_in_words(found.ranks)} leave the loop after the same batch as the others: look for a "
            "`return` or `break` that depends on the rank, or for data loaders whose length differs between ranks."
        )
    if found.states.is_snapshot:
        return (
            "Collect the stacks again after a minute, and pass both files to `doctor diagnose`"
            if is_collected
            else "Attach again with `--rounds 3`"
        ) + ", because one stack of each rank does not distinguish a stuck rank from a slow one."
    if found.within_limit:
        again = "Collect the stacks again later" if is_collected else "Attach again later, or with `--watch 60`"
        line = first.site.place if first.site is not None and first.site.place else "its line"
        return f"{again}, to see whether rank {first.rank} has left {line}."
    host = f" on {found.hosts[0]}" if found.hosts else ""
    pid = first.progress.pid if first.progress is not None and first.progress.pid else "PID"
    line = f" at {first.site.place}" if first.site is not None and first.site.place else ""
    return f"Find what blocks rank {first.rank}{line} with `py-spy dump --native --pid {pid}`{host}."


def _finding(found: Diagnosis, claim: str, fix: str, effect: str = "") -> Finding:
    remark = found.within_limit
    return Finding(
        claim,
        ranks=found.ranks,
        evidence=stall_evidence(found),
        effect=f"The job is not affected if {ranks_in_words(found.ranks)} "
        f"continue{'' if len(found.ranks) > 1 else 's'} before the collective of the others times out."
        if remark
        else effect,
        fix=fix,
        severity=Severity.INFO if remark else Severity.ERROR,
        confidence=found.confidence,
        explains=() if remark else ("RUN012", "RUN016"),
        source=stall_source(found),
    )


def _unresponsive(found: Diagnosis) -> tuple[str, str]:
    who, several = stall_ranks(found), len(found.ranks) > 1
    first = found.first
    # Whether there are flight-recorder dumps, which have a version, and not only watchdog messages in logs.
    if found.states.is_from_dumps and not any(
        one.recorder is not None and one.recorder.version is not None for one in found.states.ranks.values()
    ):
        return (
            f"{who} did not report the timeout that other ranks report{stall_waiters(found)}",
            _collect(None, f"Check in the log of {ranks_in_words(found.ranks)} whether the process had exited"),
        )
    if found.states.is_from_dumps:
        return (
            f"{who} left no flight-recorder dump: {'they' if several else 'it'} may have exited, or the "
            f"dump{'s were' if several else ' was'} not collected",
            f"Read the end of the log of {ranks_in_words(found.ranks)}, and run `dmesg -T | grep -iE 'killed "
            f"process|xid'` on {'their hosts' if several else 'its host'}, to find out why "
            f"{'they' if several else 'it'} wrote no dump.",
        )
    host = next(iter(found.hosts), f"the host of {ranks_in_words(found.ranks[:1])}")
    progress = first.progress if first else None
    pid = progress.pid if progress and progress.pid else "PID"
    if progress and progress.state == "stopped":
        return (
            f"{who} {'are' if several else 'is'} stopped{stall_waiters(found)}",
            f"Run `kill -CONT {pid}` on {host} to resume {ranks_in_words(found.ranks[:1])}.",
        )
    if progress and (progress.stack_from == "signal" or progress.sampled) and first and first.site:
        return (
            f"{who} {'are' if several else 'is'} unresponsive: native code holds the GIL at {first.site.place}",
            f"Run `py-spy dump --native --pid {pid}` on {host} to find the native call, and release the GIL around it "
            "(`Py_BEGIN_ALLOW_THREADS`, or pybind11's `gil_scoped_release`).",
        )
    if failed := _failed_others(found):
        return (
            f"{who} did not respond; {ranks_in_words(failed)} failed while waiting",
            f"Read the end of the log of {ranks_in_words(found.ranks)}, and run `dmesg -T | grep -iE 'killed "
            f"process|xid'` on {'their hosts' if several else 'its host'}, to find out why "
            f"{'they' if several else 'it'} did not respond.",
        )
    return (
        f"{who} {'are' if several else 'is'} unresponsive{stall_waiters(found)}",
        f"Run `ps -o pid,stat,wchan:32,etime,cmd -p {pid}` on {host} to see whether the process has exited, is stopped "
        "(state T) or is blocked in the kernel (state D).",
    )


def _failed_others(found: Diagnosis) -> tuple[int, ...]:
    """The other ranks, if all of them failed."""
    others = {rank: one for rank, one in found.states.ranks.items() if rank not in found.ranks}
    return tuple(others) if all(one.state == "failed" for one in others.values()) else ()


def _elsewhere(found: Diagnosis) -> tuple[str, str]:
    who, first = stall_ranks(found), found.first
    several = len(found.ranks) > 1
    if first is not None and first.state == "ended":
        return (
            f"{who} {'have' if several else 'has'} finished{stall_waiters(found)}",
            f"Make {ranks_in_words(found.ranks)} leave the loop after the same batch as the others: look for a "
            "`return` or `break` that depends on the rank, or for data loaders whose length differs between ranks.",
        )
    place = f" at {first.site.place}" if first and first.site and first.site.place else ""
    verb = "are" if several else "is"
    if first is not None and first.is_sampled:
        state = f" {_state_of(found)}" if not found.states.is_snapshot else "" if place else " elsewhere"
        return f"{who} {verb}{state}{place}{stall_waiters(found)}", ""
    blocked = blocked_text(found)
    if (fix := _fix_of_loop(found)) and not found.within_limit:
        return f"{who} {verb}{place.partition(' (')[0]}{blocked}{stall_waiters(found)}", fix
    return (
        f"{who} {verb}{place or ' not in a collective'}{blocked}{stall_waiters(found)}",
        f"Check again later whether rank {found.ranks[0]} has left {place.removeprefix(' at ') or 'its line'}."
        if found.within_limit
        else f"Find what blocks rank {found.ranks[0]}{place} with `py-spy dump --pid {_pid(found)}`"
        f"{f' on {found.hosts[0]}' if found.hosts else ''}.",
    )


def _fix_of_loop(found: Diagnosis) -> str:
    """What to do about a search, or a loop that gets the same answer again and again; empty for what is neither."""
    progress = found.first.progress if found.first else None
    if progress is not None and searched(progress):
        return (
            "Limit the depth, the number of results or the time of the search, or run it before the training and load "
            "its result."
        )
    return "End the loop when an answer names what was asked for already." if progress and repeated(progress) else ""


def _pid(found: Diagnosis) -> int | str:
    progress = found.first.progress if found.first else None
    return progress.pid if progress and progress.pid else "PID"


def _state_of(found: Diagnosis) -> str:
    if found.first is not None and _has_left_program(found.first.stack):
        return "at the end of its program and waits for its threads"
    return "busy" if found.within_limit else "stuck"


def _has_left_program(stack: tuple[Frame, ...]) -> bool:
    """Whether a stack is that of an interpreter which joins its threads before it exits."""
    return bool(stack) and stack[0].function == "_shutdown" and not any(frame.user for frame in stack)


def _missing(found: Diagnosis) -> tuple[str, str]:
    if any(one.progress is not None and one.progress.behind for one in found.known):
        return _behind_by_count(found)
    late = tuple(rank for rank in found.ranks if rank not in found.behind)
    several, call = len(late) > 1, missed_call(found)
    what = (
        f"{call.operation} ({numbered_call(call, found.states)})" if call else "the collective that the others wait in"
    )
    hosts = f" on {', '.join(found.hosts)}" if found.hosts else ""
    device = f", and the device of {ranks_in_words(found.behind)} has not finished" if found.behind else ""
    timed = found.seconds_waited and found.waiting and not found.states.is_snapshot
    search = f"Search the end of the log of {ranks_in_words(late)}{hosts} for an exception, a signal or a blocked data "
    if found.waiting and all(found.states.ranks[rank].state == "failed" for rank in found.waiting):
        within = f" within {found.seconds_waited:.0f} s" if timed else ""
        return f"{ranks_in_words(late)} did not reach {what}{within}{device}", f"{search}loader."
    waited = f" after {found.seconds_waited:.0f} s" if timed else ""
    return (
        f"{ranks_in_words(late)} {'have' if several else 'has'} not reached {what}{device}{waited}",
        f"{search}loader, or run `py-spy dump --native --pid PID` if the process still runs.",
    )


def _behind_by_count(found: Diagnosis) -> tuple[str, str]:
    several, who = len(found.ranks) > 1, ranks_in_words(found.ranks)
    reported = found.first.progress.reported[0] if found.first and found.first.progress else ""
    return (
        f"{stall_ranks(found)} {'have' if several else 'has'} launched fewer collectives than the others ({reported})",
        f"Look for a condition, a caught exception or an early `continue` with which {who} skip"
        f"{'' if several else 's'} a collective.",
    )


def _behind(found: Diagnosis) -> tuple[str, str]:
    who, first, several = stall_ranks(found), found.first, len(found.ranks) > 1
    call = first.wait if first else None
    what = f"{call.operation} ({numbered_call(call, found.states)})" if call else "a collective"
    hosts, one = ", ".join(found.hosts) or "its host", len(found.hosts) < 2
    return (
        f"Only the {'devices' if several else 'device'} of {who} {'have' if several else 'has'} not finished {what}",
        f"Run these commands on {hosts}, and exclude {'the host' if one else 'each host'} from the next run "
        f"{'if' if one else 'on which'} they show device errors:\n"
        "dmesg -T | grep -iE 'nvrm|xid'\n"
        "nvidia-smi -q -d ECC,ROW_REMAPPER",
    )


def _loader_ended(found: Diagnosis, uneven: UnevenLoaders) -> tuple[str, str]:
    if not uneven.stage:
        several = len(uneven.ended) > 1
        return (
            f"{ranks_in_words(uneven.ended)} {'have' if several else 'has'} left the loop that "
            f"{ranks_in_words(uneven.continuing)} {'are' if len(uneven.continuing) > 1 else 'is'} still in",
            "End the loop on all ranks after the same number of steps, or wrap it in `model.join()` of DDP.",
        )
    name = {"train": "training", "validate": "validation", "predict": "prediction"}.get(uneven.stage, uneven.stage)
    batches = "1 batch" if uneven.batches == 1 else f"{uneven.batches} batches"
    count = f" after {batches}" if uneven.batches is not None else ""
    longer = f"{ranks_in_words(uneven.continuing)} {'have' if len(uneven.continuing) > 1 else 'has'}"
    return (
        f"{ranks_in_words(uneven.ended)} reached the end of the {name} loader{count}, but {longer} more",
        f"End the loop on all ranks after {batches}, or give every rank the same number of batches."
        if uneven.batches is not None
        else "Give every rank the same number of batches, or end the loop on all ranks with the shortest loader.",
    )


def _of_left(found: Diagnosis, left: RanksThatLeft, lightning: bool) -> Finding:
    line = left.loop.frame if left.loop is not None else None
    return Finding(
        _left_claim(found, left),
        ranks=left.ranks,
        evidence={
            **stall_evidence(found),
            "condition": condition_in_words(line.condition) or None if line is not None else None,
        },
        effect=_effect_of_leaving(left.ranks, left),
        fix=_fix_of_left(left, lightning),
        confidence=found.confidence,
        explains=("RUN002", "RUN004", "RUN006", "RUN012", "RUN016", "DATA010"),
        source=Source(line.file, line.line) if line is not None else None,
    )


def _effect_of_leaving(ended: tuple[int, ...], left: RanksThatLeft | UnevenLoaders) -> str:
    return (
        f"{ranks_in_words(left.continuing).capitalize()} wait{'' if len(left.continuing) > 1 else 's'} in a collective "
        f"that {ranks_in_words(ended)} never join{'' if len(ended) > 1 else 's'}, until the timeout or until the "
        "connection is lost."
    )


def _left_claim(found: Diagnosis, left: RanksThatLeft) -> str:
    first, loop = found.states.ranks[left.ranks[0]], left.loop
    several = len(left.ranks) > 1
    what = f"ended {'their' if several else 'its'} run" if left.ended else "left the training loop"
    progress = first.progress
    batches = loop.batches if loop is not None else _batches_of(progress) if progress is not None else 0
    loaders = found.states.loaders.get(first.rank)
    length = next((one.batches for one in loaders.of("train") if one.batches), None) if loaders else None
    counted = f"{batches} of {length} batches" if length else "1 batch" if batches == 1 else f"{batches} batches"
    where = f" after {counted}" if batches else ""
    by = ""
    if loop is not None and loop.frame is not None:
        by = f"{f'`{loop.statement}` at ' if loop.statement else ''}{place_of_frame(loop.frame).partition(' (')[0]}"
    how = f" ({by})" if by else ""
    return f"{ranks_in_words(left.ranks)} {what}{where}{how}, unlike {ranks_in_words(left.continuing)}"


def _batches_of(progress: ProgressFacts) -> int:
    """Training batches that a rank has begun in its last epoch, which it forgets at the end of a run; 0 if unknown."""
    recent = (one.batch for one in reversed(progress.recent) if one.stage == "train" and one.batch is not None)
    last = progress.batch if progress.batch is not None else next(recent, None)
    return 0 if last is None else last + 1


def _fix_of_left(left: RanksThatLeft, lightning: bool) -> str:
    loop = left.loop
    if loop is not None and loop.frame is not None and loop.statement:
        return (
            f"Execute the `{loop.statement}` at {place_of_frame(loop.frame)} on all ranks after the same batch, or "
            "remove it."
        )
    how = "self.trainer.strategy.reduce_boolean_decision" if lightning else "torch.distributed.all_reduce"
    return (
        f"Make {ranks_in_words(left.ranks)} stop after the same batch as the others: set the same limits on all ranks, "
        f"or reduce the decision to stop over all ranks with `{how}`."
    )


def _together(found: Diagnosis) -> tuple[str, str]:
    site = found.waiting_at
    where = (site.operation or site.text) if site else "the same collective"
    if found.states.is_sampled:
        time = f" for at least {found.seconds:.0f} s" if found.seconds else ""
        return (
            f"all ranks ({ranks_in_words(found.ranks).partition(' ')[2]}) have been in {where}{time}: the network or a "
            "device may be at fault",
            _OF_NETWORK,
        )
    which = f"the first {where} of their group" if _never_worked(found) else where
    time = f" for {found.seconds:.0f} s" if found.seconds else ""
    return (
        f"{ranks_in_words(found.ranks)} have all waited in {which}{time}: the network or a device is probably at fault",
        _OF_NETWORK,
    )


_OF_NETWORK = (
    "Run `doctor check --probe light` with the launcher and on the hosts of this job to find a link that is down, a "
    "firewall or a device that hangs."
)


def _never_worked(found: Diagnosis) -> bool:
    waits = {one.wait.group for one in found.states.ranks.values() if one.wait is not None}
    groups = [
        group
        for one in found.states.ranks.values()
        for group in one.groups
        if group.name in waits and group.enqueued is not None
    ]
    return bool(groups) and all(group.completed is None for group in groups)


_SAYINGS: Mapping[str, Callable[[Diagnosis], tuple[str, str]]] = {
    "unresponsive": _unresponsive,
    "elsewhere": _elsewhere,
    "behind": _behind,
    "missing": _missing,
    "together": _together,
}
