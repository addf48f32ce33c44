"""MEM012: the OOM killer ended a process."""

from __future__ import annotations

import re
from collections.abc import Iterator

from doctor.analysis.logs.oom_events import ended_by_signal
from doctor.analysis.visible_devices import mebibytes
from doctor.api import (
    EventGroup,
    Finding,
    Job,
    Scope,
    Severity,
    Verdict,
    check,
    event_groups,
    finding_from_logs,
    ranks_in_words,
)
from doctor.facts import Event
from doctor.testing import Fails, Passes, logged

_ENDED_BY_OTHERS = ("slurm.cancel", "exit.step_ended", "elastic.force", "elastic.sigkill_left", "pl.child")
"""Messages after which the launcher or the scheduler kills processes."""

_LAUNCHERS = ("ChildFailedError", "SignalException", "ProcessExitedException", "CalledProcessError", "SystemExit")
# Errors of ranks that lost a peer, by type and by text.
_OF_PEERS = (
    "DistBackendError",
    "DistNetworkError",
    "DistStoreError",
    "ConnectionError",
    "ConnectionResetError",
    "ConnectionRefusedError",
    "ConnectionAbortedError",
    "RemoteDisconnected",
    "BrokenPipeError",
    "EOFError",
)
_WORDS_OF_PEERS = ("connection", "nccl", "gloo", "peer", "socket", "dataloader worker", "closed", "sigterm")


@check(
    id="MEM012",
    severity=Severity.ERROR,
    scope=Scope.HOST,
    when="M",
    impacts={
        r"^Ray": "The worker ends, and Ray raises OutOfMemoryError in the program that waits for its result.",
        r"^earlyoom": "The process ends on SIGTERM without a traceback, and the other ranks report a lost peer.",
        r"DataLoader worker": (
            "The rank of the worker fails with a DataLoader error, and the other ranks wait for it until their timeout."
        ),
    },
    cases=lambda: (
        Passes(
            "a launcher that ends the others after an error",
            logged(
                "[rank1]: ValueError: too many values to unpack (expected 2)",
                "Unable to shutdown process 4711 via Signals.SIGTERM, forcefully exiting via Signals.SIGKILL",
                "failed (exitcode: -9) local_rank: 0 (pid: 4711) of binary: /usr/bin/python3",
            ),
        ),
        Passes(
            "a process that torchrun had ended",
            logged(
                "W0102 03:04:05.000 4700 torch/distributed/elastic/multiprocessing/api.py:900] Sending process 4711 "
                "closing signal SIGTERM",
                "E0102 03:04:40.000 4700 torch/distributed/elastic/multiprocessing/api.py:874] failed (exitcode: -9) "
                "local_rank: 0 (pid: 4711) of binary: /usr/bin/python3",
            ),
            silent=False,
        ),
        Passes(
            "processes that torchrun killed after the first one had failed",
            logged(
                "failed (exitcode: 1) local_rank: 1 (pid: 4712) of binary: /usr/bin/python3",
                "Failures:",
                "[1]:",
                "  time      : 2026-01-02_03:04:45",
                "  host      : node1",
                "  rank      : 0 (local_rank: 0)",
                "  exitcode  : -9 (pid: 4711)",
                "Root Cause (first observed failure):",
                "[0]:",
                "  time      : 2026-01-02_03:04:05",
                "  host      : node1",
                "  rank      : 1 (local_rank: 1)",
                "  exitcode  : 1 (pid: 4712)",
            ),
            silent=False,
        ),
        Passes(
            "a job that was cancelled",
            logged(
                "slurmstepd: error: *** STEP 4242.0 ON node7 CANCELLED AT 2026-01-02T03:04:05 DUE TO TIME LIMIT ***",
                "srun: error: node7: task 3: Killed",
            ),
        ),
        Passes(
            "a step that SLURM ends because a task failed",
            logged(
                "srun: error: node7: task 1: Exited with exit code 1",
                "srun: Terminating StepId=42.0",
                "srun: error: node7: task 0: Killed",
            ),
        ),
        Fails(
            "a data worker that was killed, which may have had another reason",
            logged("RuntimeError: DataLoader worker (pid 4242) is killed by signal: Killed. "),
        ),
        Fails(
            "Kubernetes", logged("    Last State:  Terminated", "      Reason:    OOMKilled", "      Exit Code: 137")
        ),
    ),
)
def host_exhausted(job: Job) -> Iterator[Verdict]:
    """Ask whether a process was killed because the host or its cgroup ran out of memory.

    Why it hurts: the process ends immediately (exit code -9 or 137) without a traceback, and the other ranks report a
    lost peer.
    Fix: Request more memory from the scheduler (`--mem=0` for the whole host), or use fewer DataLoader workers.
    """
    named = list(event_groups(job, "oom.host"))
    for group in named:
        yield _by_name(job, group)
    workers = list(event_groups(job, "worker.killed"))
    for group in workers:
        # Launchers and schedulers kill ranks, not single data workers; the OOM killer does.
        pid = group.value("pid")
        yield finding_from_logs(
            group,
            f"A DataLoader worker{f' (PID {pid})' if pid else ''} was killed by SIGKILL, probably by the OOM killer",
            fix=_CHECK.format(at=_place(group, group.ranks)),
            confidence=0.95 if named else 0.75,
            explains=("DATA012",),
        )
    if not named and not workers:
        yield from (
            _by_signal(job, group)
            for group in event_groups(job, "exit.killed")
            if not _has_another_cause(job, group.first)
        )


_FEWER = "or use fewer DataLoader workers."
_BY_SENDER = (
    (
        ("node running low on memory", "due to memory pressure", "ray-oom-prevention"),
        "Ray killed a worker because the host was low on memory",
        "Run fewer tasks per host, or request more memory per task with `@ray.remote(memory=...)`.",
    ),
    (
        ("low on resource: memory",),
        "Kubernetes evicted a pod because its node was low on memory",
        "Raise `resources.requests.memory` of the pod to the memory that it uses.",
    ),
    (
        ("OOMKilled",),
        "A container reached its memory limit and was killed (OOMKilled)",
        f"Raise `resources.limits.memory` of the container, {_FEWER}",
    ),
    # https://www.ibm.com/docs/en/SSWRJV_10.1.0/lsf_command_ref/bsub.__m.1.html
    (
        ("TERM_MEMLIMIT",),
        "LSF killed the job at its memory limit",
        f"Raise the memory limit of the job (`bsub -M`), {_FEWER}",
    ),
    (
        ("PBS: job killed",),
        "PBS killed the job at its memory limit",
        f"Request more memory (`mem` of `qsub -l`), {_FEWER}",
    ),
    (
        ("systemd-oomd",),
        "systemd-oomd killed a process because the host was low on memory",
        "Use fewer DataLoader workers, or load the dataset once per host as a memory map.",
    ),
    (
        ("earlyoom",),
        "earlyoom ended {process} because the host was low on memory",
        "Use fewer DataLoader workers, or load the dataset once per host as a memory map.",
    ),
    (
        ("result 'oom-kill'",),
        "The OOM killer ended a process of {unit}",
        f"Raise `MemoryMax=` of {{unit}} if it is set, {_FEWER}",
    ),
    (
        ("slurmstepd", "srun: ", "OUT_OF_ME", "Out Of Memory", "StepId="),
        "A process reached the memory limit of its SLURM job and was killed",
        f"Request more memory from SLURM (`--mem`, or `--mem=0` for the whole host), {_FEWER}",
    ),
)
"""Words of who killed the process -> a summary and a fix."""

_OF_CGROUP = f"Raise the memory limit of the cgroup (`--mem` in SLURM, `docker run --memory`), {_FEWER}"
_OF_HOST = "Use fewer DataLoader workers, or load the dataset once per host as a memory map."
_OF_EITHER = f"Raise the memory limit of the cgroup if it has one (`--mem` in SLURM, `docker run --memory`), {_FEWER}"
_CHECK = (
    "Check{at} whether the OOM killer ended the process, and request more memory if it did:\n"
    "sudo dmesg -T | grep -iE 'oom|killed process'"
)


def _by_name(job: Job, group: EventGroup) -> Finding:
    texts = [event.text for event in group.events]
    summary, fix = next(
        (
            (claim, advice)
            for words, claim, advice in _BY_SENDER
            if any(word in text for word in words for text in texts)
        ),
        ("", ""),
    )
    command = group.value("command", "command3")
    if command or not summary:
        is_limit = bool(group.value("cgroup")) or any("cgroup" in text or "MEMCG" in text for text in texts)
        # "Killed process" alone follows the message that names the cgroup, or says "Out of memory".
        is_of_host = any("Out of memory: Kill" in text or "CONSTRAINT_NONE" in text for text in texts)
        reason = "A cgroup reached its memory limit: " if is_limit else "The host ran out of memory: " * is_of_host
        killed = f"{_process(group, command)} was killed by the OOM killer"
        summary = f"{reason}{killed}" if reason or not killed.startswith("a ") else f"A{killed[1:]}"
        fix = fix or (_OF_CGROUP if is_limit else _OF_HOST if is_of_host else _OF_EITHER)
    summary = summary.replace("{process}", _process(group, _of_earlyoom(texts))).replace(
        "{unit}", _unit(texts) or "a systemd unit"
    )
    fix = fix.replace("{unit}", _unit(texts) or "the unit")
    evidence = {name: value for name in ("pid", "command", "step") if (value := group.value(name)) and value != "step"}
    return finding_from_logs(
        group,
        summary,
        ranks=group.ranks or _tasks(group) or ended_by_signal(job, "SIGKILL"),
        evidence=evidence,
        fix=fix,
        confidence=0.95,
        explains=("DATA012",),
    )


def _of_earlyoom(texts: list[str]) -> str:
    """``python`` of ``sending SIGTERM to process 4321 uid 1000 "python": badness 900``."""
    return next((found[1] for text in texts if (found := re.search(r'"([^"]{1,40})"', text))), "")


def _unit(texts: list[str]) -> str:
    """``train.service`` of ``systemd[1]: train.service: Failed with result 'oom-kill'``."""
    found = next(
        (found for text in texts if (found := re.search(r"(\S+\.(?:service|scope|slice)): Failed", text))), None
    )
    return found[1] if found else ""


def _process(group: EventGroup, command: str | None) -> str:
    """``python (PID 4321, 94.2 GiB)``."""
    pid, held = group.value("pid", "pid2", "pid3"), group.value("rss", "rss3")
    size = mebibytes(int(held) << 10) if held and int(held) >= 1024 else ""
    known = ", ".join(filter(None, (f"PID {pid}" if pid else "", size)))
    name = command or "a process"
    return f"{name} ({known})" if known else name


def _place(group: EventGroup, ranks: tuple[int, ...]) -> str:
    if len(group.hosts) == 1:
        return f" on {group.hosts[0]}"
    if node := group.value("node", "node2"):
        return f" on {node}"
    return f" on the host of rank {ranks[0]}" if len(ranks) == 1 else " on the affected host"


def _tasks(group: EventGroup) -> tuple[int, ...]:
    """Tasks of srun, which are ranks: ``0-2,5``."""
    found: set[int] = set()
    for part in ",".join((*group.values("task"), *group.values("task2"))).split(","):
        first, _, last = part.partition("-")
        if first.isdigit() and (last.isdigit() or not last):
            # A range counts for at most 4096 ranks.
            found.update(range(int(first), min(int(last or first), int(first) + 4096) + 1))
    return tuple(sorted(found))


def _by_signal(job: Job, group: EventGroup) -> Finding:
    used = max(
        (float(value) for one in event_groups(job, "host.memory_used") for value in one.values("percent")), default=None
    )
    ranks, local = group.ranks or ended_by_signal(job, "SIGKILL"), group.value("local_rank")
    # A local rank is a rank on the first host only.
    who = f"The process of local rank {local}" if local is not None and not ranks else "A process"
    if ranks:
        who = ranks_in_words(ranks, 4)
        who = f"{who[:1].upper()}{who[1:]}"
    pid, node = group.value("pid", "pid2"), group.value("node", "node2")
    known = f"{f' (PID {pid})' if pid else ''}{f' on {node}' if node else ''}" if len(ranks) < 2 else ""
    why = ": the host probably ran out of memory" if (used or 0) >= _NEARLY_ALL else ", possibly by the OOM killer"
    return finding_from_logs(
        group,
        f"{who}{known} {'were' if len(ranks) > 1 else 'was'} killed by SIGKILL{why}",
        ranks=ranks,
        fix=_CHECK.format(at=_place(group, ranks)),
        evidence={"memory_used_percent": used} if used is not None else None,
        confidence=0.8 if (used or 0) >= _NEARLY_ALL else 0.7,
        explains=("DATA012",),
    )


_NEARLY_ALL = 90
"""Percent of the host's memory in use, according to DeepSpeed."""


def _has_another_cause(job: Job, killed: Event) -> bool:
    """Whether an earlier error, or the launcher or scheduler, explains the SIGKILL."""
    events = job.evidence.events if job.evidence else ()
    before = events[: events.index(killed)] if killed in events else events
    if any(event.kind in _ENDED_BY_OTHERS or _is_own_error(event) for event in before):
        return True
    # Whether torchrun itself ended the process: it had sent a closing signal, or its table has another process that
    # failed earlier with its own error. torchrun kills processes that do not exit within 30 s.
    ended = {event.value("pid") for event in events if event.kind == "elastic.closing"}
    reports = [event for event in events if event.kind in ("elastic.failed", "elastic.entry", "elastic.child_line")]
    at_line = [one for one in reports if (one.file, one.line) == (killed.file, killed.line)]
    if any(one.value("pid") in ended for one in at_line):
        return True
    table = [one for one in reports if one.kind == "elastic.entry" and one.at is not None]
    first = min(table, key=lambda one: one.at or 0.0, default=None)
    others = [
        one for one in table if one.value("exitcode") in _KILLED and first and (one.at or 0.0) > (first.at or 0.0)
    ]
    return first is not None and bool(others) and first.value("exitcode") not in (*_KILLED, "-15", "0")


_KILLED = ("-9", "137")


def _is_own_error(event: Event) -> bool:
    if event.kind not in ("python.exception", "py.exc"):
        return False
    name = (event.value("type") or "").rpartition(".")[2]
    words = (event.value("message") or event.value("msg") or "").lower()
    is_of_peers = name in _OF_PEERS or any(word in words for word in _WORDS_OF_PEERS)
    return name not in _LAUNCHERS and not is_of_peers
