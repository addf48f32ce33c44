"""ENV017: the scheduler ended the job."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from typing import NamedTuple

from doctor.analysis.logs.error_lines import has_continued, orderly_ends
from doctor.analysis.logs.event_timeline import events_before, events_of_kinds, failed_before, failed_in_another_log
from doctor.api import EventGroup, Finding, Job, Scope, Severity, Verdict, check, finding_from_logs
from doctor.facts import Event
from doctor.testing import Fails, Passes, logged


class EndReason(NamedTuple):
    """Why a scheduler ends jobs: words of its messages, the finding, its confidence, and what to do."""

    words: tuple[str, ...]
    summary: str
    confidence: float
    fix: str


EVICTED = "A pod was evicted"
REASONS = (
    EndReason(
        ("nodenotready",),
        "A Kubernetes node of the job is not ready",
        0.9,
        "Find the node with `kubectl get nodes`, and resume from the last checkpoint on other nodes.",
    ),
    EndReason(
        ("node fail",),
        "A host of the job failed",
        0.9,
        "Resume from the last checkpoint on other hosts, and report the failed host (`sinfo -R` in SLURM) to its "
        "operators.",
    ),
    EndReason(
        ("time limit", "timeout", "runlimit", "walltime", "deadlineexceeded", "longer than specified deadline"),
        "The scheduler ended the job at its time limit",
        0.95,
        "Resume from the last checkpoint with a longer time limit.",
    ),
    *(
        EndReason(
            (word,),
            f"LSF ended the job at its {limit}",
            0.95,
            f"Raise the {limit} of the job with `bsub {option}`, then resume from the last checkpoint.",
        )
        # Options of bsub: https://www.ibm.com/docs/en/spectrum-lsf/10.1.0?topic=bsub-options
        for word, limit, option in (
            ("threadlimit", "thread limit", "-T"),
            ("processlimit", "process limit", "-p"),
            ("cpulimit", "CPU time limit", "-c"),
            ("swap", "virtual memory limit", "-v"),
        )
    ),
    EndReason(
        ("preemptionbyscheduler",),
        "A pod was preempted by the Kubernetes scheduler",
        0.95,
        "Resume from the last checkpoint, or give the job a PriorityClass that no other job preempts.",
    ),
    EndReason(
        ("preempt",),
        "The job was preempted: its hosts were assigned to another job",
        0.95,
        "Resume from the last checkpoint, and write checkpoints more often than jobs are preempted.",
    ),
    EndReason(
        ("requeue",), "The job was requeued", 0.9, "Make the script resume from its last checkpoint when it starts."
    ),
    EndReason(
        ("spot",),
        "The cloud provider reclaims a host of the job (spot interruption)",
        0.95,
        "Resume from the last checkpoint on another host, and write one at each interruption notice.",
    ),
    EndReason(
        ("evict", "kubelet", "taint", "low on resource"),
        EVICTED,
        0.9,
        "Look up the reason with `kubectl get events`, then resume from the last checkpoint.",
    ),
)
CANCELLED = EndReason(
    (),
    "The job was cancelled by its owner, an operator or a script",
    0.7,
    "Find who cancelled the job{how}, then resume from the last checkpoint.",
)

_OTHER_STATES = ("FAILED", "CANCELLED", "BOOT_FAIL")
"""SLURM states that are consequences of the job's own failure, or that a separate log line reports as well."""

_STALLED = ("torch.nccl.watchdog_timeout", "torch.nccl.heartbeat", "torch.monitored_barrier", "gloo.timeout")


@check(
    id="ENV017",
    severity=Severity.ERROR,
    scope=Scope.JOB,
    when="M",
    impacts={
        r"then ran again and completed": (
            "None: the later attempt completed. Errors of the first one are consequences of its end."
        ),
        r"requeued$": (
            "The first attempt ended, and its ranks lost their connections. SLURM starts the batch script again from "
            "the beginning."
        ),
        r"earlier failure": (
            "The ranks were blocked by the earlier failure until the time limit, which used up the allocation."
        ),
        r"time limit": "All ranks receive SIGTERM and then SIGKILL; the steps since the last checkpoint are lost.",
        r"torchrun": (
            "torchrun stops all ranks of its host; lost connections that other hosts log afterwards are consequences."
        ),
        r"^Host|^A host": "The scheduler ends the job on all hosts; the steps since the last checkpoint are lost.",
        r"not ready": (
            "The ranks on this node may have stopped; lost connections that other ranks log afterwards are "
            "consequences."
        ),
        r"spot": (
            "The ranks on this host end with it; lost connections that other ranks log afterwards are consequences."
        ),
        r"evicted|pod was preempted": (
            "The ranks in this pod receive SIGTERM and then SIGKILL; lost connections that other ranks log afterwards "
            "are consequences."
        ),
    },
    cases=lambda: (
        Passes(
            "srun ends the step after a task failed",
            logged(
                "srun: error: node3: task 3: Exited with exit code 1",
                "slurmstepd: error: *** STEP 4711.0 ON node1 CANCELLED AT 2026-01-02T03:04:05 ***",
            ),
        ),
        Passes(
            "SLURM ends the step because a task failed",
            logged(
                "slurmstepd: error: *** STEP 4711.0 ON node1 CANCELLED AT 2026-01-02T03:04:05 DUE TO TASK FAILURE ***"
            ),
        ),
        Passes(
            "torchrun that is ended after a rank failed",
            logged(
                "[rank1]: ValueError: step must be positive",
                "W1130 11:13:49.388000 4711 torch/distributed/elastic/agent/server/api.py:723] Received 15 death "
                "signal, shutting down workers",
            ),
        ),
        Fails(
            "torchrun that receives SIGTERM",
            logged(
                "W1130 11:13:49.388000 4711 torch/distributed/elastic/agent/server/api.py:723] Received 15 death "
                "signal, shutting down workers",
                "torch.distributed.elastic.multiprocessing.api.SignalException: Process 4711 got signal: 15",
            ),
        ),
        Fails(
            "torchrun that is interrupted from its terminal",
            logged("torch.distributed.elastic.multiprocessing.api.SignalException: Process 4711 got signal: 2"),
            severity=Severity.WARNING,
        ),
        Fails(
            "the time limit of a job that stood still",
            logged(
                "ValueError: step must be positive",
                "slurmstepd: error: *** JOB 4711 ON node3 CANCELLED AT 2026-01-02T03:04:05 DUE TO TIME LIMIT ***",
            ),
            severity=Severity.INFO,
        ),
        Fails(
            "a requeued job",
            logged("slurmstepd: error: *** JOB 4711 ON node3 CANCELLED AT 2026-01-02T03:04:05 DUE TO JOB REQUEUE ***"),
        ),
        Fails(
            "a requeued job that ran again and completed",
            logged(
                "slurmstepd: error: *** JOB 4711 ON node3 CANCELLED AT 2026-01-02T03:04:05 DUE TO JOB REQUEUE ***",
                "epoch 0 step 10/10 loss 0.1",
                "exit status 0",
            ),
            severity=Severity.INFO,
        ),
    ),
)
def ended_by_scheduler(job: Job) -> Iterator[Verdict]:
    """Ask whether the scheduler ended the job, and not a fault of the job itself.

    Why it hurts: all ranks receive SIGTERM and then SIGKILL; lost connections that they log afterwards are
    consequences.
    Fix: Look up the reason with `sacct -j JOB --format=JobID,State,ExitCode,Reason`, then resume from the last
    checkpoint.
    """
    ends = [
        event
        for event in events_of_kinds(job, "launch.ended", "slurm.state")
        if event.value("state") not in _OTHER_STATES
    ]
    if not ends:
        yield from _by_signal(job)
        return
    named = [event for event in ends if _reason(event)] or ends
    first = named[0]
    # A watchdog or a barrier timed out before: the scheduler ended a job that was already stalled
    earlier = failed_before(job, first) or next(
        (one for one in events_before(job, first) if one.kind in _STALLED), None
    )
    if not _reason(first) and (earlier or failed_in_another_log(job, first)):
        return
    yield _finding(EventGroup(first.kind, tuple(named)), earlier, completed=_completed_later(job, named[-1]))


def _by_signal(job: Job) -> Iterator[Finding]:
    """Report a termination signal that torchrun received if nothing in the job had failed before."""
    received = events_of_kinds(job, "elastic.sigrecv", "elastic.sigexc")
    signals = [one for one in received if _signal_of(one) != "SIGHUP"]  # ENV016
    if not signals or job.evidence is None or orderly_ends(job.evidence, ()):
        return
    first = signals[0]
    stalled = any(one.kind in _STALLED for one in events_before(job, first))
    if stalled or failed_before(job, first) or failed_in_another_log(job, first):
        return
    name = _signal_of(first)
    if name == "SIGINT":
        (said, fix), severity = _INTERRUPTED, Severity.WARNING
    else:
        said, fix = f"torchrun received {name}, probably from outside the job, and stopped its ranks", _FIX_OF_SIGNAL
        severity = None
    yield finding_from_logs(
        EventGroup(first.kind, tuple(signals)),
        said,
        ranks=(),
        evidence={"signal": name},
        severity=Severity.INFO if has_continued(job.evidence, signals[-1]) else severity,
        confidence=0.65,
        fix=fix,
        explains=("RUN004", "RUN012", "NCCL013"),
        symptoms=False,
    )


_INTERRUPTED = (
    "torchrun was interrupted (SIGINT, for example Ctrl-C) and stopped its ranks",
    "If the job hung before, run `doctor attach` on its hosts before the next interrupt.",
)
_FIX_OF_SIGNAL = (
    "Look for the sender in the scheduler's record of the job, and for an earlier failure in the torchrun logs of the "
    "other hosts."
)


def _signal_of(event: Event) -> str:
    """The name of a signal, which torchrun logs as ``Signals.SIGTERM`` or ``15`` depending on its release."""
    said = (event.value("sig") or "").removeprefix("Signals.")
    return next((one.name for one in signal.Signals if str(one.value) == said), said)


def _completed_later(job: Job, end: Event) -> bool:
    """Whether the log shows that the job ran again afterwards and completed."""
    ends = (mark for mark in (job.evidence.marks if job.evidence else ()) if mark.kind == "mark.end")
    return any(mark.file == end.file and mark.line > end.line for mark in ends)


def _finding(group: EventGroup, earlier: Event | None, *, completed: bool) -> Finding:
    reason = _reason(group.first) or CANCELLED
    after = f", after an earlier failure ({earlier.file}:{earlier.line})" if earlier else ""
    summary, fix = _named(reason, group.first)
    return finding_from_logs(
        group,
        summary + after + (", then ran again and completed" if completed else ""),
        ranks=(),
        severity=Severity.INFO if earlier or completed else None,
        confidence=reason.confidence,
        fix=f"Fix the earlier failure ({earlier.file}:{earlier.line}) first." if earlier else fix,
        explains=() if earlier else ("RUN004", "RUN012", "NCCL013"),
        symptoms=False,
    )


def _named(reason: EndReason, event: Event) -> tuple[str, str]:
    """The summary and the fix, with the host or the pod that the message names."""
    if reason is CANCELLED:
        number = _SLURM_JOB.search(event.text)
        how = f" (`sacct -X -j {number['job']} -o state%40` shows the user ID)" if number else ""
        return _BY_WHOM.get(event.value("why2") or "", (reason.summary, reason.fix.format(how=how)))
    host = event.value("node2")
    if host:
        return reason.summary.replace("A host", f"Host {host}"), reason.fix.replace(
            "the failed host (`sinfo -R` in SLURM)", host
        )
    named = _POD.search(event.text) if reason.summary == EVICTED else None
    if named is None:
        return reason.summary, reason.fix
    pod = named["pod"] or named["row"]
    space, _, name = pod.rpartition("/")
    return f"Pod {pod} was evicted", reason.fix.replace(
        "get events", f"describe pod {name}{f' -n {space}' if space else ''}"
    )


_BY_WHOM = {
    "TERM_ADMIN": (
        "The job was killed by root or an LSF administrator",
        "Ask the administrator for the reason, then resume from the last checkpoint.",
    ),
    "TERM_OWNER": ("The job was killed by its owner", "Resume from the last checkpoint."),
}
"""What LSF says of who ended a job: the summary, and the fix."""
_IS_POD = re.compile(r"\bby pod\b")
_SLURM_JOB = re.compile(r"\*\*\* (?:JOB|STEP) (?P<job>\d{1,12})[ .]")
_POD = re.compile(r"\bPod (?P<pod>[\w.-]{1,253}/[\w.-]{1,253})|^\s*(?P<row>[\w.-]{1,253})\s{1,40}\d{1,3}/\d{1,3}\s")
"""A pod in an event of Kubernetes, or its row of ``kubectl get pods``."""


def _reason(event: Event) -> EndReason | None:
    said = " ".join(event.value(name) or "" for name in ("why", "why2", "state")).strip().lower().replace("_", " ")
    if "preempt" in said and _IS_POD.search(event.text):
        said = "preemptionbyscheduler"
    if not said and "spot" in event.text.lower():  # a notice names no reason of its own
        said = "spot"
    return next((reason for reason in REASONS if any(word in said for word in reason.words)), None)
