"""DATA012: a data worker was killed, crashed or raised an error."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.api import EventGroup, Job, Severity, Verdict, check, event_groups, finding_from_logs, is_logged
from doctor.testing import Fails, Passes, logged

_NAMED_ELSEWHERE = (
    "cuda.fork",
    "dl.bus",
    "dl.fds",
    "dl.shmhint",
    "exit.bus_error",
    "host.oom_kernel",
    "oom.host",
    "shm.full",
    "slurm.oom",
)
"""Messages that explain why a worker died: memory, shared memory, open files, a CUDA context after a fork."""
_CRASHED = "ERROR: Unexpected segmentation fault encountered in worker."
_KILLED = "RuntimeError: DataLoader worker (pid 4242) is killed by signal: {}. "
_SIGNALS = {
    "Killed": "SIGKILL",
    "Terminated": "SIGTERM",
    "Aborted": "SIGABRT (abort)",
    "Segmentation fault": "SIGSEGV (segmentation fault)",
    "Floating point exception": "SIGFPE (arithmetic error)",
    "Illegal instruction": "SIGILL (illegal instruction)",
}
"""Descriptions of strsignal() in glibc, which PyTorch prints (torch/csrc/DataLoader.cpp), by signal."""
_FIX_OF_CRASH = "Run with `python -X faulthandler` and `num_workers=0` to find the native code that crashed."


def _workers(group: EventGroup) -> str:
    """``A DataLoader worker (PID 4242) was``."""
    pids = group.values("pid")
    if len(set(pids)) > 1:
        return f"{len(set(pids))} DataLoader workers were"
    return f"A DataLoader worker (PID {pids[0]}) was" if pids else "A DataLoader worker was"


@check(
    id="DATA012",
    severity=Severity.ERROR,
    when="M",
    impacts={
        r"raised ": (
            "The rank that reads the batch raises the exception again and fails, and the other ranks wait for it until "
            "their timeout."
        ),
    },
    cases=lambda: (
        Passes(
            "killed by the OOM killer (MEM012)",
            logged(
                "[Fri Jan  2 03:04:05 2026] Out of memory: Killed process 4242 (python) total-vm:9kB, anon-rss:8kB",
                _KILLED.format("Killed"),
            ),
        ),
        Passes(
            "shared memory is full",
            logged(_KILLED.format("Bus error") + "It is possible that dataloader's workers are out of shared memory."),
        ),
        Fails("a crash in native code", logged(_KILLED.format("Segmentation fault"))),
        Fails("a crash that the signal handler of PyTorch reports", logged(_CRASHED)),
        Fails("killed for an unknown reason", logged(_KILLED.format("Killed"))),
    ),
)
def worker_died(job: Job) -> Iterator[Verdict]:
    """Ask whether a DataLoader worker was killed, crashed or raised an error.

    Why it hurts: the rank of the worker fails, and the other ranks wait for it until their timeout.
    Fix: Iterate over the dataset with `num_workers=0` to see the error and its traceback.
    """
    if is_logged(job, *_NAMED_ELSEWHERE):
        return
    for group in event_groups(job, "dl.killed", by=("sig",)):
        signal = group.value("sig") or "a signal"
        if not signal.startswith("Bus"):
            by_somebody = signal in ("Killed", "Terminated")
            yield finding_from_logs(
                group,
                f"{_workers(group)} terminated by {_SIGNALS.get(signal, f'a signal: {signal}')}",
                fix="Check on the worker's host whether the OOM killer ended it, and use fewer workers if it did:\n"
                "sudo dmesg -T | grep -iE 'oom|killed process'"
                if signal == "Killed"
                else "Find out why the launcher or the scheduler terminated the worker."
                if by_somebody
                else _FIX_OF_CRASH,
                # SIGTERM comes from a launcher or scheduler that ends the whole process group.
                severity=Severity.WARNING if signal == "Terminated" else None,
                confidence={"Killed": 0.75, "Terminated": 0.5}.get(signal, 0.9),
            )
    if not is_logged(job, "dl.killed"):
        for group in event_groups(job, "dl.crashed", by=("what",)):
            yield finding_from_logs(group, f"A DataLoader worker crashed: {group.value('what')}", fix=_FIX_OF_CRASH)
    for group in event_groups(job, "dl.worker_raised", by=("type",)):
        kind = (group.value("type") or "").rpartition(".")[2]
        if kind not in ("MemoryError", "OutOfMemoryError"):
            workers = group.values("worker")
            raiser = (
                f"DataLoader worker {workers[0]}"
                if len(workers) == 1
                else f"{len(workers)} DataLoader workers"
                if workers
                else "The pin-memory thread of a DataLoader"
            )
            yield finding_from_logs(
                group,
                f"{raiser} raised {kind}",
                fix=f"Fix the {kind or 'error'} that the traceback below `Original Traceback` shows.",
                confidence=0.9,
            )
