"""MEM003: a GPU is full before the job begins."""

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
    MigDevice,
    ProcessFacts,
    Severity,
    Share,
    Sick,
    Unknown,
    Verdict,
    Well,
    check,
    healthy,
    hidden_of_gpus,
    is_foreign,
    mebibytes,
    process_ids,
    sees_host_processes,
    shares_by_machine,
)

GIB = 1 << 30


@check(
    id="MEM003",
    severity=Severity.WARNING,
    when="PR",
    needs=(GpuFacts, ProcessFacts),
    cases=lambda: (
        Well("empty GPUs", healthy(hosts=2, per_host=2)),
        Well(
            "half full",
            healthy(per_host=2).gpu(0, memory_used=40 * GIB, processes=(GpuProcess(4242, 40 * GIB, "python"),)),
        ),
        Well(
            "filled by its own rank",
            healthy(per_host=2).gpu(0, memory_used=78 * GIB, processes=(GpuProcess(10_000, 78 * GIB, "python"),)),
            silent=False,
        ),
        Well(
            "other MIG slices of the GPU are full",
            healthy(per_host=1).gpu(
                0, mig=True, mig_devices=(MigDevice("MIG-a", 0),), memory_used=79 * GIB, processes=()
            ),
        ),
        Well(
            "a full GPU that no rank uses",
            healthy(per_host=1, gpus=2).environ(CUDA_VISIBLE_DEVICES="0").gpu(1, memory_used=79 * GIB, processes=()),
        ),
        Well(
            "a card whose memory the driver does not tell",
            healthy(per_host=1).gpu(0, name="NVIDIA GB10", memory_total=None, memory_used=None, memory_free=None),
        ),
        Well(
            "full, and a container hides whose memory it is",
            healthy(per_host=1).alter(HostFacts, container="docker").gpu(0, memory_used=79 * GIB, processes=()),
        ),
        Sick(
            "another job's memory",
            healthy(hosts=2, per_host=2).gpu(
                1, hosts=("node1",), memory_used=78 * GIB, processes=(GpuProcess(4242, 78 * GIB, "python"),)
            ),
            ranks=(3,),
        ),
        Sick("memory that no process owns", healthy(per_host=2).gpu(0, memory_used=79 * GIB, processes=()), ranks=(0,)),
    ),
)
def device_nearly_full(job: Job, *, used_share: float = 0.9) -> Iterator[Verdict]:
    """Ask whether each rank finds room on its GPU.

    Why it hurts: the rank runs out of memory while it starts, and the others wait for it until the time-out.
    Fix: see who holds it (`nvidia-smi`, `sudo fuser -v /dev/nvidia<n>`) and end what is left of earlier runs; or choose
    other GPUs with CUDA_VISIBLE_DEVICES.
    """
    for machine, found in shares_by_machine(job):
        for share in found:
            if share.ranks and not share.gpu.lost and _is_untold(share.gpu):
                yield _untold(machine, share)
            elif share.ranks and _share_used(share.gpu) > used_share:
                yield _judge(machine, share)


def _is_untold(gpu: Gpu) -> bool:
    return gpu.memory_used is None or not gpu.memory_total


def _untold(machine: LocalRanks, share: Share) -> Unknown:
    """NVML keeps it from users under MIG, and has none for chips that share their memory with the processor."""
    note = hidden_of_gpus(machine, "memory_used", "memory_total")
    reason = share.gpu.error or (note.reason if note else "the driver does not tell")
    words = f"how full GPU {share.gpu.index} is can't be seen: {reason}"
    return Unknown(words, share.ranks, note.unhide if note else "free -h, where GPU and processor share their memory")


def _share_used(gpu: Gpu) -> float:
    return (gpu.memory_used or 0) / gpu.memory_total if gpu.memory_total else 0.0


def _judge(machine: LocalRanks, share: Share) -> Finding | Unknown:
    gpu, own, host_ids = share.gpu, process_ids(machine), sees_host_processes(machine)
    if gpu.mig:
        reason = f"GPU {gpu.index} is {_share_used(gpu):.0%} full, and how full its MIG slices are can't be seen"
        return Unknown(reason, share.ranks, "nvidia-smi shows the memory of each slice")
    foreign = [process for process in gpu.processes or () if is_foreign(process, own, host_ids)]
    mine = [process for process in gpu.processes or () if host_ids and process.pid in own]
    if not foreign and not mine and not (host_ids and gpu.processes is not None):
        reason = f"GPU {gpu.index} is {_share_used(gpu):.0%} full, and whose memory it is can't be seen from here"
        return Unknown(reason, share.ranks, "run nvidia-smi on the host, or start the container with --pid=host")
    return _finding(machine, share, foreign, bool(mine and not foreign))


def _finding(machine: LocalRanks, share: Share, foreign: list[GpuProcess], is_own: bool) -> Finding:
    gpu = share.gpu
    holders = ", ".join(f"{one.name or 'a process'} (pid {one.pid}): {mebibytes(one.memory)}" for one in foreign[:3])
    by = holders or ("its own ranks" if is_own else "no process that the driver shows")
    used = f"{mebibytes(gpu.memory_used)} of {mebibytes(gpu.memory_total)}"
    return Finding(
        f"GPU {gpu.index} of {machine.name}: {used} in use by {by}",
        ranks=share.ranks,
        evidence={
            "gpu": gpu.uuid,
            "memory_used_bytes": gpu.memory_used,
            "memory_total_bytes": gpu.memory_total,
            "process_ids": [process.pid for process in gpu.processes or ()],
        },
        severity=Severity.INFO if is_own else Severity.WARNING,
        explains=("MEM005", "MEM011"),
    )
