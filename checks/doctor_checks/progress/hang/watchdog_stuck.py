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
        is_consequence = is_logged(job, "torch.nccl.watchdog_timeout")
        yield finding_from_logs(
            group,
            f"Heartbeat monitor terminated the process: NCCL watchdog stuck{f' for {seconds} s' if seconds else ''}"
            + (", a thread holds the GIL" if holds_lock else "")
            + (" after a collective timed out" if is_consequence else ""),
            evidence={"lock_held": holds_lock},
            fix="Find the native code that holds the GIL with `py-spy dump --native --pid PID`, and release the GIL "
            "around long native work."
            if holds_lock
            else "",
            severity=Severity.INFO if is_consequence else Severity.ERROR,
            confidence=0.85 if holds_lock else 0.75,
            explains=() if is_consequence else ("RUN001", "RUN004", "RUN012"),
            symptoms=False,
        )


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

    Why it hurts: the process is terminated without an error, and the other ranks report a lost peer. No collective
    timed out: a CUDA or NCCL call does not return, or native code holds the interpreter lock (GIL).
    Fix: Run `py-spy dump --native --pid PID` while the process hangs, and check `dmesg -T | grep -i xid`; if the work
    only takes that long, set `TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC=1800`.
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
        effect="A driver call that does not return also blocks the NCCL watchdog, and the heartbeat monitor "
        "terminates the process after 480 s.",
        fix=f"On {host}, check `dmesg -T | grep -iE 'xid|nvrm|amdgpu' | tail` and whether `nvidia-smi` responds; if "
        "the call does not return, exclude the host and reset the GPU.",
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
        evidence={**stall_evidence(found), "lock_held": True},
        effect="No Python code of that process runs. If the NCCL watchdog blocks too, the heartbeat monitor terminates "
        "the process after 480 s, and the other ranks report a lost peer.",
        fix=f"Run `py-spy dump --native --pid {pid}` on {next(iter(found.hosts), 'its host')} to find the native call, "
        "and release the GIL around it: `ctypes.CDLL` instead of `PyDLL`, `Py_BEGIN_ALLOW_THREADS`, or pybind11's "
        "`gil_scoped_release`.",
        confidence=found.confidence,
        explains=("RUN001", "RUN004", "RUN012"),
        source=stall_source(found),
    )
