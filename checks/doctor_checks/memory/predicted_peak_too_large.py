"""MEM005: the estimated peak exceeds the GPU's free memory."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.analysis.visible_devices import VisibleDevice, devices_of, mebibytes, on_processor
from doctor.api import Finding, Job, Rank, Severity, Skip, Unknown, Verdict, check, hosts_text, ranks_in_words
from doctor.facts import EstimateFacts, GpuFacts, MemorySample, MigDevice, RunMemoryFacts
from doctor.testing import Fails, JobBuilder, Passes, healthy, running
from doctor_checks.memory._device_memory_settings import end_processes

GIB = 1 << 30


def _begins(floor: int | None, *, free: int, measured: bool = False) -> JobBuilder:
    sketch = running(1, 4).alter(RunMemoryFacts, estimated_floor=30 * GIB, estimate_error=None, samples=())
    sketch = sketch.alter(
        RunMemoryFacts,
        ranks=(1,),
        estimated_floor=floor and floor * GIB,
        allocated=7 * GIB,
        reserved=8 * GIB,
        peak_allocated=7 * GIB,
        device_free=free * GIB,
    )
    if not measured:
        return sketch
    return sketch.alter(RunMemoryFacts, estimate_error=-0.3, samples=(MemorySample(50, allocated=7 * GIB),))


@check(
    id="MEM005",
    severity=Severity.ERROR,
    when="PR",
    needs=(GpuFacts, EstimateFacts),
    or_needs=(RunMemoryFacts,),
    impacts={
        r"^No batch fits": (
            'The run fails with "CUDA out of memory" at any batch size, at the latest in the first optimizer step.'
        ),
    },
    cases=lambda: (
        Passes("fits", healthy(hosts=2, per_host=2).put(EstimateFacts(device_peak=60 * GIB))),
        Passes("no estimate", healthy(per_host=2)),
        Passes("only host memory was estimated", healthy(per_host=2).put(EstimateFacts(host_peak=8 * GIB))),
        Fails(
            "too large for every GPU",
            healthy(per_host=2).put(EstimateFacts(device_peak=91 * GIB, batch_size=16, largest_batch=12)),
            ranks=(0, 1),
        ),
        Fails(
            "too large where another process holds memory",
            healthy(hosts=2, per_host=2)
            .put(EstimateFacts(device_peak=60 * GIB))
            .gpu(0, hosts=("node1",), memory_used=30 * GIB, memory_free=50 * GIB),
            ranks=(2,),
        ),
        Fails(
            "too large for a MIG slice",
            healthy(per_host=1)
            .gpu(0, mig=True, mig_devices=(MigDevice("MIG-a", 0, 20 * GIB),))
            .put(EstimateFacts(device_peak=30 * GIB)),
            ranks=(0,),
        ),
        Passes("a run whose floor fits", _begins(70, free=72)),
        Passes("just", _begins(80, free=72)),
        Passes("a run whose steps were measured: it does fit", _begins(90, free=72, measured=True)),
        Passes("a run of which no floor is known", _begins(None, free=1)),
        Passes("a run on the CPU", running(1, 2, gpus=0)),
        Fails("not even what is kept between steps fits", _begins(90, free=72), ranks=(1,)),
        Fails("nor beside what others hold", _begins(40, free=20), ranks=(1,)),
    ),
)
def predicted_peak_too_large(job: Job) -> Iterator[Verdict]:
    """Ask whether the estimated peak of device memory, or the minimum that a run needs, fits on the rank's GPU.

    Why it hurts: the run fails with "CUDA out of memory" as soon as it reaches its peak, for example in the first
    optimizer step or in a long batch.
    Fix: Use a smaller batch with gradient accumulation, or apply the setting for which `doctor estimate` shows the
    largest saving.
    """
    # The floor is the memory that a run needs for any batch size. Once steps were measured, MEM004 uses these.
    floors = [
        (rank, run)
        for rank in job.ranks
        if (run := rank.find(RunMemoryFacts))
        and run.estimated_floor
        and run.device_free is not None
        and not run.samples
    ]
    if not floors and not any(rank.find(EstimateFacts) for rank in job.ranks):
        yield Skip("no rank has a known memory floor before its first step")
    yield from _judge_floors(floors)
    groups: dict[tuple[int, int], list[tuple[Rank, VisibleDevice]]] = {}
    unclear: list[int] = []
    for rank, device in devices_of(job).items():
        estimate = rank.find(EstimateFacts)
        if estimate is None or estimate.device_peak is None or rank.find(GpuFacts) is None or on_processor(rank):
            continue
        free = _free(device) if device else None
        if device is None or free is None:
            unclear.append(rank.number)
        elif estimate.device_peak > free:
            groups.setdefault((estimate.device_peak, free), []).append((rank, device))
    if unclear:
        yield Unknown("the GPU of these ranks or its free memory is unknown", tuple(unclear))
    for (peak, free), members in groups.items():
        yield _finding(peak, free, members)


def _judge_floors(floors: list[tuple[Rank, RunMemoryFacts]]) -> Iterator[Finding]:
    groups: dict[tuple[int, int], list[Rank]] = {}
    for rank, run in floors:
        room = (run.device_free or 0) + (run.reserved or 0)
        if run.estimated_floor is not None and run.estimated_floor > room:
            groups.setdefault((run.estimated_floor, room), []).append(rank)
    for (floor, room), ranks in groups.items():
        numbers = tuple(rank.number for rank in ranks)
        yield Finding(
            f"No batch fits on {ranks_in_words(numbers, 4)}: weights, gradients and optimizer state need "
            f"{mebibytes(floor)}; {mebibytes(room)} are free",
            ranks=numbers,
            evidence={"floor_bytes": floor, "room_bytes": room},
            fix=end_processes((), hosts_text(rank.host.name for rank in ranks), _gpus(numbers))
            if all(_total(rank) > floor for rank in ranks)
            else "Shard the parameters and the optimizer state with FSDP or ZeRO.",
            confidence=0.9,  # parameters that never get a gradient have no state either
            explains=("MEM011",),
        )


def _gpus(ranks: tuple[int, ...]) -> str:
    return f"the GPU{'' if len(ranks) == 1 else 's'} of {ranks_in_words(ranks, 4)}"


def _total(rank: Rank) -> int:
    run = rank.find(RunMemoryFacts)
    return (run.total if run else None) or 0


def _free(device: VisibleDevice) -> int | None:
    if device.slice:
        return device.slice.memory
    return device.gpu.memory_free if device.gpu.memory_free is not None else device.gpu.memory_total


def _finding(peak: int, free: int, members: list[tuple[Rank, VisibleDevice]]) -> Finding:
    estimate = members[0][0].find(EstimateFacts)
    largest = estimate.largest_batch if estimate else None
    now = f" (now {estimate.batch_size})" if estimate and estimate.batch_size else ""
    labels = dict.fromkeys(device.label for _, device in members)
    where = next(iter(labels)) if len(labels) == 1 else "each GPU"
    hosts = hosts_text(rank.host.name for rank, _ in members)
    return Finding(
        f"The estimated peak of {mebibytes(peak)} exceeds the {mebibytes(free)} that {where} on {hosts} has free",
        ranks=tuple(rank.number for rank, _ in members),
        evidence={
            "device_peak_bytes": peak,
            "free_bytes": free,
            "largest_batch_that_fits": largest,
            "devices": [device.label for _, device in members[:16]],
        },
        fix=f"Use a batch size of at most {largest} per rank{now}, and gradient accumulation to keep the effective "
        "batch size."
        if largest
        else "",
        explains=("MEM011",),
    )
