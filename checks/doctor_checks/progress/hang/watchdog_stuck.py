"""RUN016: a thread holds the interpreter's lock, or the heartbeat monitor ended a process whose watchdog was stuck."""

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
from doctor_checks.progress.hang._stall_text import stall_evidence, stall_ranks, stall_source, stall_waiters

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
            f"the watchdog made no progress{f' for {seconds} s' if seconds else ''}, and the monitor ended the process"
            + (": a thread holds the interpreter's lock" if holds_lock else "")
            + (", after a collective had run out of time" if is_consequence else ""),
            evidence={"lock_held": holds_lock},
            fix="A thread holds the interpreter's lock in C code that waits for the device: see it with "
            "`py-spy dump --native --pid PID`; give the lock up around long work."
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
        Passes("a collective ran out of time", logged(_TIMED_OUT)),
        Passes("a collective ran out of time, and the monitor after it", logged(_TIMED_OUT, _STUCK), silent=False),
        Fails("the interpreter's lock is held", logged(_STUCK, _GIL), ranks=(1, 2)),
        Passes("a run that moves", running(1, 4)),
        Passes(
            "a rank that a peer got no answer from is RUN001's",
            with_late_ranks(stalled(1, 4), (2,), _SLEEPS, state="silent", stack_from="signal"),
        ),
        Fails(
            "stacks of a rank whose interpreter native code holds",
            with_late_ranks(stalled(1, 4), (2,), _SLEEPS, state="silent", stack_from="py-spy", sampled=True),
            ranks=(2,),
        ),
    ),
)
def watchdog_stuck(job: Job) -> Iterator[Verdict]:
    """Ask whether a process was ended because its watchdog did not answer.

    Why it hurts: the process is killed without an error of its own, and the others report lost peers. No collective
    ran out of time: a call of CUDA or NCCL does not return, or C code holds the interpreter's lock.
    Fix: `py-spy dump --native --pid PID` while it stands; `dmesg -T | grep -i xid` for the driver. Where the work only
    takes that long, `export TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC=1800`.
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
        f"{stall_ranks(found)} {verb} blocked in the GPU driver ({found.driver}){f' at {place}' if place else ''}"
        f"{stall_waiters(found)}",
        ranks=found.ranks,
        evidence={**stall_evidence(found), "kernel_function": found.driver},
        effect="A driver call that does not return blocks the NCCL watchdog too, and the heartbeat monitor ends the "
        "process after 480 s.",
        fix=f"On {host}: see `dmesg -T | grep -iE 'xid|nvrm|amdgpu' | tail`, and whether `nvidia-smi` responds. If the "
        "call does not return, take the host out of the job and reset the GPU.",
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
        f"Native code holds the interpreter lock (GIL) of {stall_ranks(found)}{f' at {place}' if place else ''}"
        f"{stall_waiters(found)}",
        ranks=found.ranks,
        evidence={**stall_evidence(found), "lock_held": True},
        effect="No Python code of that process runs. If the NCCL watchdog blocks too, the heartbeat monitor ends the "
        "process after 480 s, and the other ranks report a lost peer.",
        fix=f"On {next(iter(found.hosts), 'its host')}, `py-spy dump --native --pid {pid}` shows the native call. "
        "Release the lock around long native work: `ctypes.CDLL` instead of `PyDLL`, `Py_BEGIN_ALLOW_THREADS`, "
        "`gil_scoped_release` of pybind11.",
        confidence=found.confidence,
        explains=("RUN001", "RUN004", "RUN012"),
        source=stall_source(found),
    )
