"""MEM003: a GPU is nearly full."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.analysis.visible_devices import (
    GpuSharers,
    hidden_of_gpus,
    is_foreign,
    mebibytes,
    process_ids,
    sees_host_processes,
    shares_by_machine,
)
from doctor.api import (
    Finding,
    Job,
    LocalRanks,
    Rank,
    Severity,
    Skip,
    Unknown,
    Verdict,
    check,
    conjunction,
    ranks_in_words,
)
from doctor.facts import Gpu, GpuFacts, GpuProcess, HostFacts, MigDevice, MissingReason, ProcessFacts, RunMemoryFacts
from doctor.testing import Fails, JobBuilder, Passes, healthy, running
from doctor_checks.memory._device_memory_settings import as_sentence, end_processes, smaller_batch

GIB = 1 << 30


def _in_run(*ranks: int, peak: int, foreign: int = GIB, retries: int = 0) -> JobBuilder:
    return running(2, 2).alter(
        RunMemoryFacts,
        ranks=ranks,
        allocated=peak // 2,
        peak_allocated=peak,
        reserved=peak + GIB // 2,
        foreign=foreign,
        retries=retries,
    )


@check(
    id="MEM003",
    severity=Severity.WARNING,
    when="PR",
    needs=(GpuFacts, ProcessFacts),
    or_needs=(RunMemoryFacts,),
    impacts={
        r"\d retr(?:y|ies)$": (
            'Each retry empties the cache and blocks the rank. A slightly larger batch may fail with "CUDA out '
            'of memory".'
        ),
    },
    cases=lambda: (
        Passes("empty GPUs", healthy(hosts=2, per_host=2)),
        Passes(
            "half full",
            healthy(per_host=2).gpu(0, memory_used=40 * GIB, processes=(GpuProcess(4242, 40 * GIB, "python"),)),
        ),
        Passes(
            "filled by its own rank",
            healthy(per_host=2).gpu(0, memory_used=78 * GIB, processes=(GpuProcess(10_000, 78 * GIB, "python"),)),
            silent=False,
        ),
        Passes(
            "other MIG slices of the GPU are full",
            healthy(per_host=1).gpu(
                0, mig=True, mig_devices=(MigDevice("MIG-a", 0),), memory_used=79 * GIB, processes=()
            ),
        ),
        Passes(
            "a full GPU that no rank uses",
            healthy(per_host=1, gpus=2).environ(CUDA_VISIBLE_DEVICES="0").gpu(1, memory_used=79 * GIB, processes=()),
        ),
        Passes(
            "a card whose memory the driver does not report",
            healthy(per_host=1).gpu(0, name="NVIDIA GB10", memory_total=None, memory_used=None, memory_free=None),
        ),
        Passes(
            "full, and a container hides whose memory it is",
            healthy(per_host=1).alter(HostFacts, container="docker").gpu(0, memory_used=79 * GIB, processes=()),
        ),
        Fails(
            "another job's memory",
            healthy(hosts=2, per_host=2).gpu(
                1, hosts=("node1",), memory_used=78 * GIB, processes=(GpuProcess(4242, 78 * GIB, "python"),)
            ),
            ranks=(3,),
        ),
        Fails(
            "memory that no process owns", healthy(per_host=2).gpu(0, memory_used=79 * GIB, processes=()), ranks=(0,)
        ),
        Passes("a run with room", running(2, 2)),
        Passes("a run on the CPU", running(1, 2, gpus=0)),
        Passes("a run that has reserved all, and needs half", _in_run(1, peak=40 * GIB)),
        Passes("nearly full in a run, and nothing was refused yet", _in_run(1, peak=72 * GIB), silent=False),
        Passes("retries while there is room", _in_run(1, peak=60 * GIB, retries=2)),
        Passes(
            "a run whose driver shows nothing",
            _in_run(1, peak=40 * GIB).drop(GpuFacts, MissingReason.HIDDEN, "no NVML"),
        ),
        Fails("a run that is short of memory", _in_run(1, peak=74 * GIB, retries=12), ranks=(1,)),
        Fails(
            "a run in which others take the rest of the device",
            _in_run(2, peak=40 * GIB, foreign=36 * GIB, retries=3),
            ranks=(2,),
        ),
        Fails(
            "nearly full in a run",
            _in_run(3, peak=73 * GIB),
            ranks=(3,),
            severity=Severity.INFO,
        ),
        Fails("nearly nothing left by others in a run", _in_run(0, peak=4 * GIB, foreign=74 * GIB), ranks=(0,)),
    ),
)
def device_nearly_full(job: Job, *, used_share: float = 0.9) -> Iterator[Verdict]:
    """Ask whether each rank has enough free memory on its GPU.

    Why it hurts: the rank runs out of memory at startup or in the first batch that is slightly larger, and the other
    ranks wait for it until their timeout.
    Fix: End other processes on the GPU (`nvidia-smi` lists them), or select another GPU with CUDA_VISIBLE_DEVICES.
    """
    watched = job.ranks if next(job.each(RunMemoryFacts), None) else ()
    runs = {rank.number: facts for rank in watched if (facts := _of_run(rank))}
    for rank in watched:
        if rank.number in runs:
            yield from _judge_run(job, rank, runs[rank.number], used_share)
    if not runs and not any(rank.find(GpuFacts) for rank in job.ranks):
        yield Skip("no rank uses a GPU")
    for machine, found in shares_by_machine(job):
        for share in found:
            if share.ranks and all(number in runs for number in share.ranks):
                continue
            if share.ranks and not share.gpu.lost and (share.gpu.memory_used is None or not share.gpu.memory_total):
                note = hidden_of_gpus(machine, "memory_used", "memory_total")
                reason = share.gpu.error or (note.reason if note else "the driver does not report it")
                unhide = note.unhide if note else "free -h, if GPU and CPU share their memory"
                yield Unknown(f"the memory use of GPU {share.gpu.index} is unknown: {reason}", share.ranks, unhide)
            elif share.ranks and _share_used(share.gpu) > used_share:
                yield _judge(job, machine, share)


def _of_run(rank: Rank) -> RunMemoryFacts | None:
    """The statistics of the rank's own allocator during training, which are newer than those of the driver."""
    facts = rank.find(RunMemoryFacts)
    return facts if facts and facts.total and facts.peak_allocated is not None else None


def _judge_run(job: Job, rank: Rank, facts: RunMemoryFacts, limit: float) -> Iterator[Finding]:
    """By the peak of allocated, not of reserved memory: the cache may grow to fill the device."""
    total, foreign = facts.total or 1, facts.foreign or 0
    used = (facts.peak_allocated or 0) + foreign
    if used <= limit * total:
        return
    short = bool(facts.retries or facts.failures)
    retries = facts.retries or 0
    refused = f", {retries} {'retry' if retries == 1 else 'retries'}" if short else ""
    others = f", others {mebibytes(foreign)}" if foreign else ""
    yield Finding(
        f"GPU of rank {rank.number} on {rank.host.name} is nearly full: peak {mebibytes(facts.peak_allocated)}"
        f"{others} of {mebibytes(total)}{refused}",
        ranks=(rank.number,),
        evidence={
            "peak_allocated_bytes": facts.peak_allocated,
            "outside_bytes": foreign,
            "memory_total_bytes": total,
            "reserved_bytes": facts.reserved,
            "allocation_retries": facts.retries,
            "allocation_failures": facts.failures,
        },
        effect=""
        if short
        else 'A slightly larger batch may fail with "CUDA out of memory", and the other ranks wait for rank '
        f"{rank.number} until their timeout.",
        fix=as_sentence(smaller_batch(job))
        if foreign <= (1 - limit) * total
        else end_processes((), rank.host.name, f"the GPU of rank {rank.number}"),
        severity=Severity.WARNING if short or foreign > limit * total else Severity.INFO,
        explains=("MEM011",),
    )


def _share_used(gpu: Gpu) -> float:
    return (gpu.memory_used or 0) / gpu.memory_total if gpu.memory_total else 0.0


def _judge(job: Job, machine: LocalRanks, share: GpuSharers) -> Finding | Unknown:
    gpu, own, host_ids = share.gpu, process_ids(machine), sees_host_processes(machine)
    if gpu.mig:
        reason = f"GPU {gpu.index} is {_share_used(gpu):.0%} full, but the use of its MIG slices is unknown"
        return Unknown(reason, share.ranks, "nvidia-smi shows the memory of each slice")
    foreign = [process for process in gpu.processes or () if is_foreign(process, own, host_ids)]
    mine = [process for process in gpu.processes or () if host_ids and process.pid in own]
    if not foreign and not mine and not (host_ids and gpu.processes is not None):
        reason = f"GPU {gpu.index} is {_share_used(gpu):.0%} full, but the owners of the memory are not visible here"
        return Unknown(reason, share.ranks, "run nvidia-smi on the host, or start the container with --pid=host")
    is_own = bool(mine and not foreign)
    holders = [f"{one.name or 'process'} (PID {one.pid})" for one in foreign[:3]]
    by = conjunction([*holders, f"{len(foreign) - 3} more"] if len(foreign) > 3 else holders)
    owners = tuple({own[process.pid] for process in mine})
    by = by or (ranks_in_words(owners) if is_own else "processes that the driver does not list")
    sizes = [one.memory for one in foreign]
    size = sum(one or 0 for one in sizes) if sizes and None not in sizes else gpu.memory_used
    who = ranks_in_words(share.ranks)
    is_one = len(foreign) == 1 or (is_own and len(owners) == 1)
    used = f"use{'s' if is_one else ''} {mebibytes(size)} of {mebibytes(gpu.memory_total)}"
    return Finding(
        f"{by[:1].upper() + by[1:] if not foreign else by} {used} on GPU {gpu.index} of {machine.name}",
        ranks=share.ranks,
        evidence={
            "gpu": gpu.uuid,
            "memory_used_bytes": gpu.memory_used,
            "memory_total_bytes": gpu.memory_total,
            "process_ids": [process.pid for process in gpu.processes or ()],
        },
        effect=f"{who[:1].upper()}{who[1:]} {'fails' if len(share.ranks) == 1 else 'fail'} with "
        '"CUDA out of memory" as soon as more memory is needed than is free.',
        fix=as_sentence(smaller_batch(job)) if is_own else _fix(gpu, foreign, machine.name),
        severity=Severity.INFO if is_own else Severity.WARNING,
        explains=("MEM005", "MEM011"),
    )


def _fix(gpu: Gpu, foreign: list[GpuProcess], host: str) -> str:
    if not foreign:
        return (
            f"On {host}, list the processes that have GPU {gpu.index} open, and end those that no job needs:\n"
            f"sudo fuser -v /dev/nvidia{gpu.index}"
        )
    return end_processes([process.pid for process in foreign[:4]], host)
