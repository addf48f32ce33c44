"""MEM008: the ranks of a host need more memory than it has."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from doctor.analysis.visible_devices import mebibytes
from doctor.api import (
    Finding,
    Job,
    LocalRanks,
    Scope,
    Severity,
    Skip,
    Unknown,
    Verdict,
    check,
    event_groups,
    finding_from_logs,
)
from doctor.facts import ChildProcess, EstimateFacts, HostFacts, MemorySample, RunMemoryFacts
from doctor.testing import Fails, JobBuilder, Passes, healthy, logged, running

GIB = 1 << 30


def _in_run(*, left: int, resident: int = 4, workers: int = 0, shared: int = 0, ram: int = 256) -> JobBuilder:
    """A monitored job of two hosts with four ranks and ``ram`` GiB each. On node1, ``left`` GiB are available, and a
    rank holds ``resident`` GiB; each of its two workers holds ``workers`` GiB, ``shared`` of them shared with it."""
    children = tuple(
        ChildProcess(pid, "S", "python", memory=workers * GIB, private=(workers - shared) * GIB)
        for pid in ((101, 102) if workers else ())
    )
    return (
        running(2, 4, gpus=0)
        .alter(HostFacts, ram_total=ram * GIB, ram_available=ram * GIB)
        .alter(
            RunMemoryFacts,
            ranks=(4, 5, 6, 7),
            resident=resident * GIB,
            children=children,
            samples=(MemorySample(50, at=1.0, host_available=left * GIB),),
        )
    )


def _from_logs(job: Job) -> Iterator[Finding]:
    for group in event_groups(job, "oom.host_refused"):
        size = group.value("size") or next((mebibytes(int(value)) for value in group.values("bytes")), None)
        yield finding_from_logs(
            group,
            "A process could not allocate host memory" + (f" ({size} requested)" if size else ""),
            evidence={"wanted": size} if size else None,
            fix="Request more memory from the scheduler (`--mem`), or load the dataset once per host as a memory map.",
            confidence=0.8,
            explains=("DATA012",),
        )


@check(
    id="MEM008",
    severity=Severity.ERROR,
    scope=Scope.HOST,
    when="PRM",
    needs=(HostFacts, EstimateFacts),
    or_needs=(HostFacts, RunMemoryFacts),
    needs_peers=True,
    from_logs=_from_logs,
    impacts={
        r"could not allocate": "The process fails, and the other ranks report a lost peer.",
        r"need .* but": (
            "When memory runs out, the OOM killer ends a process with SIGKILL (exit code -9) and without a traceback, "
            "and the other ranks only report a lost peer."
        ),
    },
    cases=lambda: (
        Passes("plenty of memory", healthy(hosts=2, per_host=8).put(EstimateFacts(host_peak=40 * GIB))),
        Passes("no estimate", healthy(per_host=2)),
        Passes(
            "a limit that is large enough",
            healthy(per_host=2)
            .alter(HostFacts, memory_limit=64 * GIB, memory_used=2 * GIB)
            .put(EstimateFacts(host_peak=20 * GIB)),
        ),
        Fails(
            "the data set in every rank",
            healthy(hosts=2, per_host=8)
            .alter(HostFacts, hosts=("node1",), ram_total=512 * GIB, ram_available=500 * GIB)
            .put(EstimateFacts(host_peak=100 * GIB)),
            ranks=tuple(range(8, 16)),
        ),
        Fails(
            "a tight cgroup",
            healthy(per_host=4)
            .alter(HostFacts, memory_limit=32 * GIB, memory_used=GIB)
            .put(EstimateFacts(host_peak=10 * GIB)),
            ranks=(0, 1, 2, 3),
        ),
        Fails(
            "enough memory, but others hold it",
            healthy(per_host=2).alter(HostFacts, ram_available=50 * GIB).put(EstimateFacts(host_peak=40 * GIB)),
            ranks=(0, 1),
            severity=Severity.WARNING,
        ),
        Passes("a run with room", running(2, 4)),
        Passes("a run in half of the memory", _in_run(left=128, resident=32)),
        Passes(
            "others hold the memory of the host",
            _in_run(left=10, resident=2),
        ),
        Passes(
            "workers that share the data set with their rank", _in_run(left=150, resident=24, workers=24, shared=23)
        ),
        Fails("the data set in every rank of a run", _in_run(left=4, resident=62), ranks=(4, 5, 6, 7)),
        Fails("workers that hold a copy each", _in_run(left=2, resident=6, workers=28), ranks=(4, 5, 6, 7)),
        Fails(
            "a run that fills the host", _in_run(left=20, resident=57), ranks=(4, 5, 6, 7), severity=Severity.WARNING
        ),
        Fails(
            "a run that fills its control group",
            _in_run(left=1, resident=15).alter(
                HostFacts, hosts=("node1",), memory_limit=64 * GIB, memory_used=60 * GIB
            ),
            ranks=(4, 5, 6, 7),
        ),
        Passes(
            "log of exhausted device memory",
            logged(
                "[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
                "MemoryError: std::bad_alloc: out_of_memory: CUDA error at: device_memory_resource.hpp",
            ),
        ),
    ),
)
def host_memory_short(job: Job, *, used_share: float = 0.9, surely_used_share: float = 0.97) -> Iterator[Verdict]:
    """Ask whether the memory of a host and its cgroup limit are sufficient for its ranks and their DataLoader workers.

    Why it hurts: when memory runs out, the OOM killer ends a process with SIGKILL (exit code -9) and without a
    traceback, and the other ranks only report a lost peer.
    Fix: Load the dataset once per host as a memory map, or request more memory from the scheduler (`--mem`).
    """
    # earlyoom, which Fedora starts by default, ends a process at 10 % available memory. At 3 %, the kernel spends most
    # of its time reading back pages of programs that it has just dropped.
    held = [(local, holding) for local in job.by_host() if (holding := _holding(local))]
    for local, holding in held:
        yield from _judge_run(local, holding, used_share, surely_used_share)
    if not held and not any(rank.find(EstimateFacts) for rank in job.ranks):
        yield Skip("the memory use of the ranks is not known yet")
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
            yield Unknown(note.reason if note else "the memory size of the host is unknown", local.ranks)
        elif need > whole:
            limits = "its cgroup allows" if host.memory_limit == whole else "the host has"
            more = "" if host.memory_limit == whole else f"{_ONCE}, or run fewer ranks on {local.name}."
            yield _finding(local, need, f"{limits} {mebibytes(whole)}", Severity.ERROR, host, more)
        elif free is not None and need > free:
            is_limited = _left(host.memory_limit, host.memory_used) == free
            more = "" if is_limited else f"{_ONCE}, or end other processes on {local.name}."
            yield _finding(local, need, f"{mebibytes(free)} are free", Severity.WARNING, host, more)


class _Holding(msgspec.Struct, frozen=True):
    processes: int
    workers: int
    worker_count: int
    space: _Space


class _Space(msgspec.Struct, frozen=True):
    name: str
    used: int
    size: int

    @property
    def share(self) -> float:
        return self.used / self.size


def _holding(local: LocalRanks) -> _Holding | None:
    host = local.find(HostFacts)
    runs = [run for rank in local.members if (run := rank.find(RunMemoryFacts)) and run.resident is not None]
    spaces = _spaces(local.name, host, runs) if host and runs else []
    if not spaces:
        return None
    children = [child for run in runs for child in run.children]
    return _Holding(
        sum(run.resident or 0 for run in runs),
        sum(child.memory or 0 if child.private is None else child.private for child in children),
        len(children),
        max(spaces, key=lambda space: space.share),
    )


_CGROUP = "the cgroup"


def _spaces(name: str, host: HostFacts, runs: list[RunMemoryFacts]) -> list[_Space]:
    """The memory of the host and of its cgroup, if it has a limit. The newest sample of the ranks has the available
    memory of the smaller one."""
    told = [sample for run in runs for sample in run.samples if sample.host_available is not None]
    newest = max(told, key=lambda sample: sample.at or 0.0, default=None)
    left, limit = newest.host_available if newest else None, host.memory_limit
    spaces = []
    available = host.ram_available if limit or left is None else left
    if host.ram_total and available is not None:
        spaces.append(_Space(name, max(0, host.ram_total - available), host.ram_total))
    free = _smallest(left, _left(limit, host.memory_used))
    if limit and free is not None:
        spaces.append(_Space(f"{_CGROUP} on {name}", max(0, limit - free), limit))
    return spaces


def _judge_run(local: LocalRanks, holding: _Holding, limit: float, surely: float) -> Iterator[Finding]:
    """Only if these ranks hold most of it. Shared pages count several times, so this is an upper limit."""
    space, count = holding.space, holding.worker_count
    if space.share <= limit or holding.processes + holding.workers < space.used / 2:
        return
    is_cgroup = space.name.startswith(_CGROUP)
    name = f"The {space.name.removeprefix('the ')}" if is_cgroup else space.name
    whole = f"its {mebibytes(space.size)}" if is_cgroup else f"{mebibytes(space.size)} of RAM"
    yield Finding(
        f"{name} has "
        f"{mebibytes(space.size - space.used)} of {whole} left: "
        f"{len(local.members)} ranks hold {mebibytes(holding.processes)}"
        + (f", {count} workers hold {mebibytes(holding.workers)}" if count else ""),
        ranks=local.ranks,
        evidence={
            "ranks_bytes": holding.processes,
            "workers_bytes": holding.workers or None,
            "workers": count or None,
            "used_bytes": space.used,
            "size_bytes": space.size,
        },
        severity=Severity.ERROR if space.share > surely else Severity.WARNING,
        fix=_fix(holding, local.name),
        explains=("MEM012",),
    )


def _fix(holding: _Holding, host: str) -> str:
    if holding.workers > holding.processes:
        return (
            "Lower `num_workers` of the DataLoader, or store the dataset in arrays instead of Python lists and "
            "dictionaries, whose pages each worker copies when it reads them."
        )
    more = "request more memory (`--mem`)" if holding.space.name.startswith(_CGROUP) else f"run fewer ranks on {host}"
    return f"Load the dataset once per host as a memory map (`mmap_mode='r'` of `numpy.load`, Arrow), or {more}."


def _smallest(*sizes: int | None) -> int | None:
    return min((size for size in sizes if size is not None), default=None)


def _left(limit: int | None, used: int | None) -> int | None:
    return None if limit is None or used is None else limit - used


_ONCE = "Load the dataset once per host as a memory map"


def _finding(local: LocalRanks, need: int, size: str, severity: Severity, host: HostFacts, fix: str) -> Finding:
    return Finding(
        f"The {len(local.members)} ranks of {local.name} need {mebibytes(need)}, but {size}",
        ranks=local.ranks,
        evidence={
            "need_bytes": need,
            "ram_total_bytes": host.ram_total,
            "ram_available_bytes": host.ram_available,
            "cgroup_limit_bytes": host.memory_limit,
            "cgroup_used_bytes": host.memory_used,
        },
        severity=severity,
        fix=fix,
        explains=("MEM012",),
    )
