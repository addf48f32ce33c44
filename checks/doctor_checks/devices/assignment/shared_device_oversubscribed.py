"""GPU007: ranks that share a GPU do not fit on it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median

from doctor.analysis.visible_devices import VisibleDevice, devices_of, mebibytes
from doctor.api import Finding, Job, LocalRanks, Rank, Scope, Severity, Skip, Unknown, Verdict, check
from doctor.facts import EstimateFacts, GpuFacts, RunMemoryFacts
from doctor.testing import Fails, JobBuilder, Passes, healthy, running

GIB = 1 << 30


def _in_run(
    peak: int, *, reserved: int, free: int, retries: int = 0, kept: int = 20, busy: tuple[int, ...] = ()
) -> JobBuilder:
    """A monitored job of two hosts. On node1, two ranks share a GPU of 80 GiB: each had ``peak`` GiB allocated at most,
    ``kept`` of them between steps, and ``reserved`` GiB reserved; ``free`` GiB are free. ``busy``: readings of the
    GPU's utilization."""
    return running(2, 2).alter(
        RunMemoryFacts,
        ranks=(2, 3),
        device_id="0000:10:00.0",
        allocated=kept * GIB,
        peak_allocated=peak * GIB,
        utilization=busy,
        reserved=reserved * GIB,
        device_free=free * GIB,
        retries=retries,
    )


@check(
    id="GPU007",
    severity=Severity.ERROR,
    scope=Scope.HOST,
    when="PR",
    needs=(GpuFacts, EstimateFacts),
    or_needs=(RunMemoryFacts,),
    needs_peers=True,
    cases=lambda: (
        Passes("a GPU for each rank", healthy(per_host=2).put(EstimateFacts(device_peak=70 * GIB))),
        Passes(
            "two small ranks on one GPU",
            healthy(per_host=2, gpus=1).put(EstimateFacts(device_peak=20 * GIB)),
        ),
        Fails(
            "two ranks that fill a GPU each",
            healthy(per_host=2, gpus=1).put(EstimateFacts(device_peak=50 * GIB)),
            ranks=(0, 1),
        ),
        Fails(
            "on one of two hosts",
            healthy(hosts=2, per_host=2)
            .environ(ranks=(2, 3), CUDA_VISIBLE_DEVICES="1")
            .put(EstimateFacts(device_peak=41 * GIB)),
            ranks=(2, 3),
        ),
        Passes("a run with a GPU for each rank", running(2, 2)),
        Passes("a run on the CPU", running(1, 4, gpus=0)),
        Passes("two ranks of a run that fit", _in_run(30, reserved=36, free=7)),
        Passes("full caches, and small peaks", _in_run(20, reserved=39, free=1)),
        Passes("the same number on two hosts", running(2, 1).alter(RunMemoryFacts, peak_allocated=70 * GIB)),
        Fails("peaks that do not fit together", _in_run(42, reserved=38, free=2), ranks=(2, 3)),
        Fails("contexts take what is missing", _in_run(39, reserved=37, free=1), ranks=(2, 3)),
        Fails("caches that are emptied for one another", _in_run(36, reserved=38, free=1, retries=20), ranks=(2, 3)),
        Passes(
            "two ranks that fill the pauses of one another", _in_run(20, reserved=24, free=31, kept=4, busy=(70,) * 5)
        ),
        Passes("too few looks", _in_run(20, reserved=24, free=31, kept=4, busy=(99, 98))),
        Passes("a batch for both does not fit", _in_run(38, reserved=38, free=3, kept=2, busy=(99, 98, 99, 97))),
        Fails(
            "two ranks that take turns on a GPU that is always busy",
            _in_run(20, reserved=24, free=31, kept=4, busy=(99, 98, 99, 20, 97)),
            ranks=(2, 3),
            severity=Severity.WARNING,
        ),
    ),
)
def shared_device_oversubscribed(
    job: Job, *, crowded_share: float = 0.9, busy_percent: float = 95, least_looks: float = 3
) -> Iterator[Verdict]:
    """Ask whether the ranks that share a GPU fit on it together, and whether sharing improves throughput.

    Why it hurts: each rank fits alone, but together they run out of memory, and which of them fails first varies.
    Fix: Run one rank per GPU, or use a smaller batch.
    """
    # Above 90 %, MEM003 reports a device as nearly full; retries show that the ranks empty their caches for each other.
    # A reading is the share of the last second in which any process ran a kernel. From 95 % on, the GPU is the
    # bottleneck, and one batch for all ranks takes no longer than their turns do. Three readings are three minutes.
    shared = [entry for machine in job.by_machine() for entry in _together(machine.members, devices_of(job))]
    crowds = [crowd for machine in job.by_machine() for crowd in _crowds(machine)]
    if not shared and not crowds:
        yield Unknown("other ranks not gathered") if job.ungathered else Skip("no two ranks share a GPU")
    watched = {rank.number for crowd in crowds for rank, _ in crowd}
    for crowd in crowds:
        too_large = list(_judge_run(crowd, crowded_share))
        yield from too_large or _judge_turns(crowd, busy_percent, least_looks, crowded_share)
    for device, ranks in shared:
        total = device.slice.memory if device.slice else device.gpu.memory_total
        peaks = [estimate.device_peak or 0 for rank in ranks if (estimate := rank.find(EstimateFacts))]
        if total is not None and sum(peaks) > total and not watched.issuperset(rank.number for rank in ranks):
            yield Finding(
                f"{len(ranks)} ranks on {device.label} of {ranks[0].host.name} need {mebibytes(sum(peaks))}, but it "
                f"has {mebibytes(total)}",
                ranks=tuple(rank.number for rank in ranks),
                evidence={"device": device.uuid, "peaks_bytes": peaks, "memory_total_bytes": total},
                explains=("MEM005",),
            )


Crowd = list[tuple[Rank, RunMemoryFacts]]


def _crowds(machine: LocalRanks) -> list[Crowd]:
    by_device: dict[str, Crowd] = {}
    for rank in machine.members:
        memory = rank.find(RunMemoryFacts)
        if memory and memory.device_id and memory.total:
            by_device.setdefault(memory.device_id, []).append((rank, memory))
    return [crowd for crowd in by_device.values() if len(crowd) > 1]


def _judge_run(crowd: Crowd, crowded_share: float) -> Iterator[Finding]:
    """Peaks need not coincide; if their sum does not fit, the ranks fail as soon as they do."""
    memories = [memory for _, memory in crowd]
    total = min(memory.total or 0 for memory in memories)
    peaks = [max(memory.peak_allocated or 0, memory.allocated or 0) for memory in memories]
    free = min((memory.device_free for memory in memories if memory.device_free is not None), default=None)
    # Memory outside the allocators: contexts, libraries, communicators.
    rest = 0 if free is None else max(0, total - free - sum(memory.reserved or 0 for memory in memories))
    retries = sum((memory.retries or 0) + (memory.failures or 0) for memory in memories)
    need = sum(peaks) + rest
    if need > total or (retries and need > crowded_share * total):
        who = f"{len(crowd)} ranks on one GPU of {crowd[0][0].host.name}"
        yield Finding(
            f"{who} need up to {mebibytes(need)}, but it has {mebibytes(total)}"
            if need > total
            else f"{who} retried {retries} allocations: they need up to {mebibytes(need)} of {mebibytes(total)}",
            ranks=tuple(rank.number for rank, _ in crowd),
            evidence={
                "device": memories[0].device_id,
                "peaks_bytes": peaks,
                "outside_the_allocators_bytes": rest,
                "memory_total_bytes": total,
                "allocation_retries": retries or None,
            },
            effect=""
            if need > total
            else "Before each retry, a rank empties its cache, which delays the step. If that does not free enough "
            "memory, the rank fails.",
            explains=("MEM003", "MEM004", "MEM006", "MEM011"),
        )


def _judge_turns(crowd: Crowd, busy: float, least: float, room: float) -> Iterator[Finding]:
    """Ranks whose GPU has no idle time for a second process, if one rank can hold the batch of all of them."""
    memories = [memory for _, memory in crowd]
    looks = max((memory.utilization for memory in memories), key=len)
    peak = max(memory.peak_allocated or 0 for memory in memories)
    kept = min(memory.allocated or 0 for memory in memories)
    total = min(memory.total or 0 for memory in memories)
    need = kept + len(crowd) * (peak - kept)
    if len(looks) < least or median(looks) < busy or not kept < peak or need > room * total:
        return
    yield Finding(
        f"{len(crowd)} ranks share one GPU of {crowd[0][0].host.name}, which is {median(looks):.0f}% busy",
        ranks=tuple(rank.number for rank, _ in crowd),
        evidence={
            "device": memories[0].device_id,
            "utilization_percent": list(looks),
            "peak_bytes_of_one": peak,
            "kept_bytes_of_one": kept,
            "memory_total_bytes": total,
        },
        severity=Severity.WARNING,
        effect="The ranks compute in turns, and their all-reduce takes additional time.",
        fix=f"Run one rank per GPU with {len(crowd)} times the `batch_size`, which needs about {mebibytes(need)} of "
        f"{mebibytes(total)}.",
        confidence=0.7,
    )


def _together(
    members: tuple[Rank, ...], devices: Mapping[Rank, VisibleDevice | None]
) -> list[tuple[VisibleDevice, list[Rank]]]:
    by_device: dict[str, tuple[VisibleDevice, list[Rank]]] = {}
    for rank in members:
        device = devices[rank]
        if device and device.uuid:
            by_device.setdefault(device.uuid, (device, []))[1].append(rank)
    return [entry for entry in by_device.values() if len(entry[1]) > 1]
