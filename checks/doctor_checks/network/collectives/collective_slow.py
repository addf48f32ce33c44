"""NET027: a collective on the job's own backend fails or is slow."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterator, Sequence

from doctor.analysis.fabric.group_timings import (
    BrokenCollective,
    SlowGroup,
    TimedGroup,
    broken_collectives,
    culprits_of,
    in_several_groups,
    slow_groups,
    timed_groups,
)
from doctor.api import Finding, Job, Scope, Severity, Verdict, check, correlates, ranks_in_words
from doctor.facts import CollectiveFacts
from doctor.testing import Fails, Passes, healthy
from doctor.testing.collective_timings import breaking, not_set_up, slow_with, timed_on_mesh, usual_seconds
from doctor_checks._trial_conclusions import with_trials
from doctor_checks.network.connectivity._slow_rails import backend_name

_SMALL = 4096
"""Bytes: up to this size the time of a message is its latency."""

_SPEED, _TIME = "B/s", "s"
"""Units of trials: bandwidth of large messages, and time of small ones. A setting may fix only one of them."""

_OTHERWISE_LATE = "Check the links between the GPUs with `nvidia-smi topo -m`."


def _with_small(seconds: float) -> Callable[[str, tuple[int, ...], int, int], float]:
    return lambda axis, group, size, turn: seconds if size <= _SMALL else usual_seconds(axis, group, size, turn)


def _far(axis: str, group: tuple[int, ...], size: int, turn: int) -> float:
    return 60e-6 if size <= _SMALL and axis == "dp" else usual_seconds(axis, group, size, turn)


@check(
    id="NET027",
    severity=Severity.WARNING,
    scope=Scope.JOB,
    needs=(CollectiveFacts,),
    impacts={
        r"could not be created|share a GPU": "init_process_group() fails in the job too, or blocks until its timeout.",
        r"^The mesh": "The process groups of the mesh are not checked.",
        r"failed": "The same collective fails in the job, or blocks until its timeout.",
        r"Small NCCL messages": (
            "Collectives of small tensors, as in tensor or pipeline parallelism, are limited by this latency."
        ),
        r"^Slow \w+ group": "Each step waits for this group, so the whole job runs at its speed.",
    },
    cases=lambda: (
        Passes("not measured", healthy(hosts=2, per_host=2)),
        Passes("all groups equally fast", timed_on_mesh(usual_seconds)),
        Passes("all groups of an axis are slow", timed_on_mesh(slow_with(*range(16), times=9.0, axes=("dp",)))),
        Passes("twice as long, as on a busy host", timed_on_mesh(slow_with(5, times=2.0))),
        Passes("milliseconds more", timed_on_mesh(lambda axis, group, size, turn: 4e-3 if 5 in group else 1e-3)),
        Passes("slow in one of two turns", timed_on_mesh(slow_with(6, times=9.0, turns=(1,)))),
        Passes("NCCL is quick", timed_on_mesh(usual_seconds, backend="nccl")),
        Passes("Gloo need not be", timed_on_mesh(_with_small(900e-6))),
        Passes("NCCL between hosts need not be", timed_on_mesh(_far, backend="nccl")),
        Fails("a rank in slow groups of both axes", timed_on_mesh(slow_with(6)), ranks=(6,)),
        Fails("a slow group within a host", timed_on_mesh(slow_with(8, axes=("tp",))), ranks=(8, 9, 10, 11)),
        Fails("a slow group between hosts", timed_on_mesh(slow_with(5, axes=("dp",))), ranks=(1, 5, 9, 13)),
        Fails("small messages on NCCL", timed_on_mesh(_with_small(80e-6), backend="nccl"), ranks=tuple(range(16))),
        Fails(
            "one does not answer, the others wait for it",
            breaking("no answer within 20 s", (5,), "rank 5 did not join"),
            ranks=(5,),
            severity=Severity.ERROR,
        ),
        Fails(
            "two wait for one another, the rest for them",
            breaking("Timed out waiting 8000ms for recv operation", (2, 3), "ranks 2-3 did not join", awaited=(2, 3)),
            ranks=(2, 3),
            severity=Severity.ERROR,
        ),
        Fails(
            "one rank never joins",
            healthy(2, 2).put(not_set_up("rank 3 did not join", (3,)), ranks=(0, 1, 2)),
            ranks=(3,),
            severity=Severity.ERROR,
        ),
        Fails(
            "two ranks on one GPU",
            healthy(1, 2).put(
                not_set_up("Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1000", backend="nccl")
            ),
            ranks=(0, 1),
            severity=Severity.ERROR,
        ),
        Fails(
            "one rank that NCCL refuses, and others that wait without end",
            healthy(1, 3)
            .put(not_set_up("no answer within 46 s", backend="nccl"))
            .put(not_set_up("unhandled cuda error", backend="nccl"), ranks=(1,)),
            ranks=(1,),
            severity=Severity.ERROR,
        ),
        Fails(
            "the mesh of another job",
            healthy(1, 6).put(not_set_up("the mesh dp=4,tp=2 has 8 ranks, the job 6")),
            ranks=tuple(range(6)),
            severity=Severity.ERROR,
        ),
    ),
)
def collective_slow(
    job: Job,
    *,
    slower_times: float = 2.0,
    least_seconds: float = 0.005,
    sigmas: float = 4.0,
    nccl_latency: float = 50e-6,
) -> Iterator[Verdict]:
    """Ask whether collectives on the backend of the job complete, and are similarly fast in all groups of an axis.

    Why it hurts: each step waits for the slowest group, so one slow rank or link slows down the whole job; a collective
    that fails here fails in the job, after its timeout.
    Fix: Find the slow setting or link with `doctor check --probe full --why` on all ranks.
    """
    broken = broken_collectives(job)
    if broken:
        finding = _broken(job, broken)
        yield with_trials(job, finding, "collective", unit=_SPEED, otherwise=finding.fix)
    timed = timed_groups(job)
    slow = slow_groups(timed, times=slower_times, least=least_seconds, sigmas=sigmas)
    shared = in_several_groups(slow, job)
    if shared:
        finding = _shared(job, [one for one in slow if set(shared).intersection(one.timed.members)], shared)
        yield with_trials(job, finding, "collective", unit=_SPEED)
    for one in slow:
        if not set(shared).intersection(one.timed.members):
            yield with_trials(job, _slow_group(job, one), "collective", unit=_SPEED)
    for finding in _late(job, timed, nccl_latency):
        yield with_trials(job, finding, "collective", otherwise=_OTHERWISE_LATE, unit=_TIME)


_LONGEST = 99
"""Characters of a summary; the evidence has the whole error."""


def _broken(job: Job, broken: Sequence[BrokenCollective]) -> Finding:
    ranks = culprits_of(broken)
    first = next((one for one in broken if one.rank in ranks), broken[0])
    said = {str(one.rank): one.error for one in broken[:16]}
    waiting = tuple(one.rank for one in broken if one.rank not in ranks)
    along = [one.operation for one in broken if one.axis == first.axis and one.operation != "collective"]
    what = f"{along[0] if along else 'A collective'} in a {first.axis} group" if first.axis else "The process group"
    how = "failed" if first.axis else "could not be created"
    of = "" if "did not join" in first.error else f" on {ranks_in_words(ranks)}"
    if first.backend and not first.axis:
        what = f"The {backend_name(first.backend)} process group"
    elif first.backend:
        what += f" over {backend_name(first.backend)}"
    claim = f"{what} {how}{of}:"
    summary = f"{claim} {textwrap.shorten(_shown_error(first.error), max(_LONGEST - len(claim), 30), placeholder=' …')}"
    if "Duplicate GPU" in first.error:
        summary = f"{claim.removesuffix(f'{of}:')}: {ranks_in_words(ranks)} share a GPU"
    if mesh := _MESH.match(first.error):
        summary = f"The mesh {mesh['axes']} has {mesh['size']} ranks, but the job has {mesh['world']}"
    evidence = {
        "said_by_rank": said,
        "waiting_ranks": list(waiting[:64]),
        "goes_along_with": list(correlates(job, ranks)),
    }
    fix = _fix_of_broken(job, first, ranks)
    return Finding(summary, ranks=ranks, evidence=evidence, severity=Severity.ERROR, fix=fix)


_MESH = re.compile(r"the mesh (?P<axes>\S+) has (?P<size>\d+) ranks, the job (?P<world>\d+)")
"""The error of a probe whose ``--mesh`` does not fit the job."""


_EXPIRED = re.compile(r"Timed out waiting (?P<ms>\d{1,12})ms for (?P<operation>\w+) operation")
"""The error of a rank that waits for another one (gloo/transport/tcp/unbound_buffer.cc)."""


def _shown_error(error: str) -> str:
    found = _EXPIRED.search(error)
    return f"{found['operation']} timed out after {int(found['ms']) / 1000:g} s" if found else error


def _fix_of_broken(job: Job, first: BrokenCollective, ranks: tuple[int, ...]) -> str:
    who = f"{ranks_in_words(ranks)} on {', '.join(job.hosts_of(ranks)[:4])}"
    if "Duplicate GPU" in first.error:
        return "Give each rank its own GPU with `torch.cuda.set_device(local_rank)`."
    if mesh := _MESH.match(first.error):
        return f"Pass a mesh of {mesh['world']} ranks with `--mesh`."
    if first.backend == "gloo" and _EXPIRED.search(first.error):  # the rank runs, and reported it
        between = f"connections between {who}" if len(ranks) > 1 else f"connection of {who} to the other ranks"
        return f"Check the Gloo {between}: the interface (GLOO_SOCKET_IFNAME) and the firewall."
    if re.search("did not join|no answer|imed out", first.error):
        verb = "is" if len(ranks) == 1 else "are"
        return f"Check that {who} {verb} running and can connect to the other ranks."
    if first.backend == "nccl":
        return f"Run the job again with `NCCL_DEBUG=INFO`, and find the first NCCL warning in the log of {who}."
    return f"Fix the error of {who}, because the other ranks wait for it."


def _shared(job: Job, slow: Sequence[SlowGroup], ranks: tuple[int, ...]) -> Finding:
    axes = list(dict.fromkeys(one.timed.axis for one in slow))
    hosts = job.hosts_of(ranks)
    evidence: dict[str, object] = {"slow_groups": [_shown(one) for one in slow[:8]]}
    if len(hosts) == 1:
        evidence["exclude"] = list(hosts)
    summary = f"The slow process groups of {' and '.join(axes)} have {ranks_in_words(ranks)} in common"
    effect = f"All ranks of these groups wait for {ranks_in_words(ranks)} in each step."
    return Finding(summary, ranks=ranks, evidence=evidence, confidence=0.9, effect=effect, fix=_excluding(hosts))


def _excluding(hosts: Sequence[str]) -> str:
    """Empty, for the check's own, unless there is one host."""
    if len(hosts) != 1:
        return ""
    return (
        f"Exclude {hosts[0]} (`srun --exclude={hosts[0]}` in SLURM), or find the cause with `doctor check --probe full "
        "--why` on all ranks."
    )


def _slow_group(job: Job, slow: SlowGroup) -> Finding:
    members = slow.timed.members
    evidence = {
        "backend": backend_name(slow.timed.backend),
        "siblings": slow.siblings,
        "turns": slow.timed.turns,
        "goes_along_with": list(correlates(job, members)),
    }
    return Finding(
        f"Slow {slow.timed.axis} group ({ranks_in_words(members)}): {slow.timed.operation} of {_size(slow.timed)} "
        f"takes {_milliseconds(slow.timed.seconds)} (other groups: {_milliseconds(slow.usual)})",
        ranks=members,
        evidence=evidence,
        confidence=0.8,
        fix=_excluding(job.hosts_of(members)),
    )


def _shown(slow: SlowGroup) -> str:
    timed = slow.timed
    what = f"{timed.operation} of {_size(timed)} over {backend_name(timed.backend)}"
    who = ranks_in_words(timed.members)
    took, usual = _milliseconds(timed.seconds), _milliseconds(slow.usual)
    return f"{what} takes {took} on {who} (other groups: {usual})"


def _size(timed: TimedGroup) -> str:
    return f"{timed.bytes / (1 << 20):.3g} MiB" if timed.bytes >= 1 << 20 else f"{timed.bytes / (1 << 10):.3g} KiB"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def _late(job: Job, timed: Sequence[TimedGroup], limit: float) -> Iterator[Finding]:
    small = (one for one in timed if one.backend == "nccl" and one.bytes <= _SMALL)
    late = [one for one in small if one.seconds > limit and len(job.hosts_of(one.members)) == 1]
    if not late:
        return
    worst = max(late, key=lambda one: one.seconds)
    names = {f"{one.axis}, {ranks_in_words(one.members)}, {one.bytes} bytes": one.seconds * 1e6 for one in late[:8]}
    yield Finding(
        f"Small NCCL messages within a host take {worst.seconds * 1e6:.0f} µs instead of at most {limit * 1e6:.0f} µs "
        f"({worst.axis} group)",
        ranks=tuple(sorted({rank for one in late for rank in one.members})),
        evidence={"microseconds": names},
        fix=_OTHERWISE_LATE,
        confidence=0.7,
    )
