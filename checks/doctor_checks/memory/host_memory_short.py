"""MEM008: the ranks of a host need more memory than it has."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.api import (
    EstimateFacts,
    Finding,
    HostFacts,
    Job,
    LocalRanks,
    Scope,
    Severity,
    Sick,
    Unknown,
    Verdict,
    Well,
    check,
    healthy,
    mebibytes,
)

GIB = 1 << 30


@check(
    id="MEM008",
    severity=Severity.ERROR,
    scope=Scope.HOST,
    when="PRM",
    needs=(HostFacts, EstimateFacts),
    cases=lambda: (
        Well("plenty of memory", healthy(hosts=2, per_host=8).put(EstimateFacts(host_peak=40 * GIB))),
        Well("nobody estimated", healthy(per_host=2)),
        Well(
            "a limit that is large enough",
            healthy(per_host=2)
            .alter(HostFacts, memory_limit=64 * GIB, memory_used=2 * GIB)
            .put(EstimateFacts(host_peak=20 * GIB)),
        ),
        Sick(
            "the data set in every rank",
            healthy(hosts=2, per_host=8)
            .alter(HostFacts, hosts=("node1",), ram_total=512 * GIB, ram_available=500 * GIB)
            .put(EstimateFacts(host_peak=100 * GIB)),
            ranks=tuple(range(8, 16)),
        ),
        Sick(
            "a tight cgroup",
            healthy(per_host=4)
            .alter(HostFacts, memory_limit=32 * GIB, memory_used=GIB)
            .put(EstimateFacts(host_peak=10 * GIB)),
            ranks=(0, 1, 2, 3),
        ),
        Sick(
            "enough memory, but others hold it",
            healthy(per_host=2).alter(HostFacts, ram_available=50 * GIB).put(EstimateFacts(host_peak=40 * GIB)),
            ranks=(0, 1),
            severity=Severity.WARNING,
        ),
    ),
)
def host_memory_short(job: Job) -> Iterator[Verdict]:
    """Ask whether what the ranks of a host and their workers will hold fits into its memory and its limit.

    Why it hurts: the kernel kills a process without a message of its own (exit code -9), and the other ranks see only a
    lost peer.
    Fix: load the data set once a host (memory map, shared tensors), fewer workers, `torch.load(..., mmap=True)`, or ask
    the scheduler for more memory (`--mem`).
    """
    for local in job.by_host():
        host = local.find(HostFacts)
        peaks = [estimate.host_peak for rank in local.members if (estimate := rank.find(EstimateFacts))]
        need = sum(peak or 0 for peak in peaks)
        if host is None or not need:
            continue
        whole = _smallest(host.ram_total, host.memory_limit)
        free = _smallest(host.ram_available, _left(host.memory_limit, host.memory_used))
        if whole is None:
            note = host.why_hidden("ram_total")
            yield Unknown(note.reason if note else "the size of the host's memory is not known", local.ranks)
        elif need > whole:
            yield _finding(local, need, whole, "has", Severity.ERROR, host)
        elif free is not None and need > free:
            yield _finding(local, need, free, "has free", Severity.WARNING, host)


def _smallest(*sizes: int | None) -> int | None:
    return min((size for size in sizes if size is not None), default=None)


def _left(limit: int | None, used: int | None) -> int | None:
    return None if limit is None or used is None else limit - used


def _finding(local: LocalRanks, need: int, size: int, verb: str, severity: Severity, host: HostFacts) -> Finding:
    return Finding(
        f"the {len(local.members)} ranks of {local.name} need {mebibytes(need)}, it {verb} {mebibytes(size)}",
        ranks=local.ranks,
        evidence={
            "need_bytes": need,
            "ram_total_bytes": host.ram_total,
            "ram_available_bytes": host.ram_available,
            "cgroup_limit_bytes": host.memory_limit,
            "cgroup_used_bytes": host.memory_used,
        },
        severity=severity,
        explains=("MEM012",),
    )
