"""RUN016: a thread holds the GIL, or the heartbeat monitor terminated a process whose watchdog was stuck."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.analysis.hang.diagnosis import Diagnosis
from doctor.analysis.hang.diagnosis_rules import diagnose_stall
from doctor.api import (
    EventGroup,
    Finding,
    Job,
    Severity,
    Verdict,
    check,
    event_groups,
    finding_from_logs,
    is_logged,
    ranks_in_words,
)
from doctor.facts import ProgressFacts
from doctor.testing import Fails, Passes, logged, running, stalled, user_frame
from doctor.testing.stalled_run import with_late_ranks
from doctor_checks.progress.hang._stall_text import stall_evidence, stall_ranks, stall_source

_STUCK = (
    "[rank1]:[E ProcessGroupNCCL.cpp:1746] [PG ID 0 PG GUID 0(default_pg) Rank 1] ProcessGroupNCCL's watchdog got "
    "stuck for 480 seconds without making progress in monitoring enqueued collectives. This typically indicates a "
    "NCCL/CUDA API (e.g., CudaEventDestroy) hang blocking the watchdog, and could be triggered by another "
    "thread holding the GIL inside a CUDA api"
)
_GIL = "[rank2]:[E ProcessGroupNCCL.cpp:1400] Could not acquire GIL within 300 ms on exit, possible GIL induced hang"
_TIMED_OUT = (
    "[rank1]:[E ProcessGroupNCCL.cpp:616] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=808, "
    "OpType=ALLREDUCE, NumelIn=98, NumelOut=98, Timeout(ms)=600000) ran for 600020 milliseconds before timing out."
)
_SLEEPS = user_frame(58, "training_step")
_KINDS = ("torch.nccl.heartbeat", "run.no_heartbeat", "torch.nccl.gil")


def _from_logs(job: Job) -> Iterator[Finding]:
    events = tuple(event for kind in _KINDS for one in event_groups(job, kind) for event in one.events)
    if events:
        group = EventGroup(events[0].kind, events)
        holds_lock = any(event.kind == "torch.nccl.gil" for event in events)
        seconds = group.value("s")
        stuck = EventGroup(group.kind, tuple(one for one in events if one.kind != "torch.nccl.gil") or events).ranks
        on = f" on {ranks_in_words(stuck)}" if stuck else ""
        is_consequence = is_logged(job, "torch.nccl.watchdog_timeout")
        yield finding_from_logs(
            group,
            _claim(on + (f" for {seconds} s" if seconds else ""), holds_lock, is_consequence),
            fix=f"Run `py-spy dump --native --pid PID`{on} while the process hangs to find the native code that holds "
            "the GIL, and release the GIL around it."
            if holds_lock
            else "Find the rank that did not reach the collective, because the stuck watchdog is a consequence of the "
            "timeout."
            if is_consequence
            else f"Run `py-spy dump --native --pid PID`{on} while the process hangs to find the CUDA or NCCL call that "
            "does not return."
            if on
            else "",
            severity=Severity.INFO if is_consequence else Severity.ERROR,
            confidence=0.85 if holds_lock else 0.75,
            explains=() if is_consequence else ("RUN001", "RUN004", "RUN012"),
            symptoms=False,
        )


def _claim(where: str, holds_lock: bool, is_consequence: bool) -> str:
    """``where``: the ranks and the time."""
    if is_consequence:
        return f"The NCCL watchdog was stuck{where} after a collective timed out"
    if holds_lock:
        return f"The NCCL watchdog was stuck{where}, probably because a thread held the GIL"
    return f"The NCCL watchdog was stuck{where}, so the heartbeat monitor terminated the process"


@check(
    id="RUN016",
    severity=Severity.ERROR,
    when="M",
    needs=(ProgressFacts,),
    from_logs=_from_logs,
    cases=lambda: (
        Passes("a collective timed out", logged(_TIMED_OUT)),
        Passes("a collective timed out before the monitor acted", logged(_TIMED_OUT, _STUCK), silent=False),
        Fails("a thread holds the GIL", logged(_STUCK, _GIL), ranks=(1, 2)),
        Passes("a run that makes progress", running(1, 4)),
        Passes(
            "a rank that does not respond to a peer (RUN001)",
            with_late_ranks(stalled(1, 4), (2,), _SLEEPS, state="silent", stack_from="signal"),
        ),
        Fails(
            "stacks of a rank whose GIL native code holds",
            with_late_ranks(stalled(1, 4), (2,), _SLEEPS, state="silent", stack_from="py-spy", sampled=True),
            ranks=(2,),
        ),
    ),
)
def watchdog_stuck(job: Job) -> Iterator[Verdict]:
    """Ask whether a process was terminated because its NCCL watchdog was stuck.

    Why it hurts: the process is terminated without a Python error, and the other ranks report a lost peer.
    Fix: Run `py-spy dump --native --pid PID` while the process hangs to find the CUDA or NCCL call that does not
    return.
    """
    found = diagnose_stall(job)
    if found is not None and found.holds_lock:
        yield _of_lock(found)
    elif found is not None and found.driver:
        yield _of_driver(found)


def _of_driver(found: Diagnosis) -> Finding:
    place = found.first.site.place if found.first and found.first.site else ""
    host = next(iter(found.hosts), "its host")
    verb = "is" if len(found.ranks) == 1 else "are"
    return Finding(
        f"{stall_ranks(found)} {verb} blocked in the GPU driver ({found.driver}){f' at {place}' if place else ''}",
        ranks=found.ranks,
        evidence={**stall_evidence(found), "kernel_function": found.driver},
        effect="The process does not continue until the driver call returns, and the other ranks wait for it.",
        fix=f"Run `dmesg -T | grep -iE 'xid|nvrm|amdgpu' | tail` on {host}, and exclude the host if the driver reports "
        "an error.",
        severity=Severity.INFO if found.within_limit else Severity.ERROR,
        confidence=found.confidence,
        explains=() if found.within_limit else ("RUN001", "RUN004", "RUN012"),
        source=stall_source(found),
    )


def _of_lock(found: Diagnosis) -> Finding:
    place = found.first.site.place if found.first and found.first.site else ""
    progress = found.first.progress if found.first else None
    pid = progress.pid if progress and progress.pid else "PID"
    return Finding(
        f"Native code holds the interpreter lock (GIL) of {stall_ranks(found)}{f' at {place}' if place else ''}",
        ranks=found.ranks,
        evidence=stall_evidence(found),
        effect="No Python code of the process runs, and the other ranks wait for it.",
        fix=f"Run `py-spy dump --native --pid {pid}` on {next(iter(found.hosts), 'its host')} to find the native call, "
        "and release the GIL around it (`Py_BEGIN_ALLOW_THREADS`, or pybind11's `gil_scoped_release`).",
        confidence=found.confidence,
        explains=("RUN001", "RUN004", "RUN012"),
        source=stall_source(found),
    )
