"""MEM001: other ranks hold memory of the first GPU."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.api import (
    Finding,
    Gpu,
    GpuFacts,
    GpuProcess,
    HostFacts,
    Job,
    LocalRanks,
    ProcessFacts,
    Scope,
    Severity,
    Sick,
    Skip,
    Unknown,
    Verdict,
    Well,
    check,
    devices_of,
    healthy,
    mebibytes,
    process_ids,
    sees_host_processes,
)

GIB = 1 << 30
MIB = 1 << 20


def _held(*pids: int, size: int = 500 * MIB) -> tuple[GpuProcess, ...]:
    return tuple(GpuProcess(pid, size, "python") for pid in pids)


@check(
    id="MEM001",
    severity=Severity.WARNING,
    scope=Scope.HOST,
    when="PRM",
    needs=(GpuFacts, ProcessFacts),
    peers=True,
    cases=lambda: (
        Well(
            "every rank on its own GPU",
            healthy(per_host=2).gpu(0, processes=_held(10_000)).gpu(1, processes=_held(10_001)),
        ),
        Well("nothing started yet", healthy(hosts=2, per_host=4)),
        Well("somebody else on the first GPU", healthy(per_host=2).gpu(0, processes=_held(4242))),
        Well(
            "ranks that share the first GPU on purpose",
            healthy(per_host=2).environ(CUDA_VISIBLE_DEVICES="0").gpu(0, processes=_held(10_000, 10_001)),
        ),
        Well(
            "a container in which process ids mean something else",
            healthy(per_host=2)
            .alter(HostFacts, container="docker")
            .gpu(0, processes=(GpuProcess(10_000, GIB), GpuProcess(10_001, GIB))),
        ),
        Sick(
            "bare contexts of three ranks on the first GPU",
            healthy(hosts=2, per_host=4).gpu(0, hosts=("node1",), processes=_held(10_000, 10_001, 10_002, 10_003)),
            ranks=(5, 6, 7),
        ),
        Sick(
            "a checkpoint loaded to the first GPU by every rank",
            healthy(per_host=2).gpu(0, processes=_held(10_000, 10_001, size=9 * GIB)),
            ranks=(1,),
        ),
    ),
)
def rank_zero_skew(job: Job, *, context_mebibytes: float = 800) -> Iterator[Verdict]:
    """Ask whether the first GPU of each host holds memory of its own rank alone.

    Why it hurts: every other rank takes 300 to 800 MiB, or a whole copy of the checkpoint, from the first GPU: rank 0
    runs out of memory while the others have room.
    Fix: call `torch.cuda.set_device(local_rank)` before anything touches CUDA, pass `device_id=` to
    `init_process_group`, and load checkpoints with `torch.load(path, map_location="cpu")`.
    """
    judged = [local for local in job.by_host() if len(local.members) > 1]
    if not judged:
        yield Unknown("other ranks not gathered") if job.ungathered else Skip("one rank a host")
    devices = devices_of(job)
    for local in judged:
        homes = {rank.number: device.gpu for rank in local.members if (device := devices[rank])}
        if homes:
            first = min(homes.values(), key=lambda gpu: gpu.index)
            yield from _judge(local, first, homes, context_mebibytes)


def _judge(local: LocalRanks, first: Gpu, homes: dict[int, Gpu], context_mebibytes: float) -> Iterator[Verdict]:
    processes = [process for process in first.processes or () if process.kind != "graphics"]
    if not sees_host_processes(local) and any(process.name is None for process in processes):
        if len(processes) > sum(gpu is first for gpu in homes.values()):
            reason = f"whose processes hold memory of GPU {first.index} can't be seen in this container"
            yield Unknown(reason, local.ranks, "start the container with --pid=host")
        return
    own = process_ids(local)
    strangers = {
        own[process.pid]: process
        for process in processes
        if process.pid in own and homes.get(own[process.pid], first) is not first
    }
    if strangers:
        yield _finding(local, first, strangers, context_mebibytes * MIB)


def _finding(local: LocalRanks, first: Gpu, strangers: dict[int, GpuProcess], context: float) -> Finding:
    sizes = [process.memory for process in strangers.values()]
    total = sum(size or 0 for size in sizes)
    bare = all(size is None or size <= context for size in sizes)
    return Finding(
        f"GPU {first.index} of {local.name} holds {mebibytes(total)} of {len(strangers)} other rank"
        f"{'s' if len(strangers) > 1 else ''}: {', '.join(map(str, strangers))}",
        ranks=tuple(strangers),
        evidence={
            "gpu": first.uuid,
            "memory_bytes_by_rank": {str(rank): process.memory for rank, process in strangers.items()},
            "process_ids": [process.pid for process in strangers.values()],
            "likely_cause": "contexts alone: torch.cuda.set_device is missing or late, pinned memory, or a barrier "
            "without a device"
            if bare
            else "tensors too: a checkpoint loaded without map_location",
        },
        explains=("MEM003", "MEM011"),
    )
