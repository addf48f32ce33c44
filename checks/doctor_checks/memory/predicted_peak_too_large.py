"""MEM005: the estimated peak does not fit."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.api import (
    Device,
    EstimateFacts,
    Finding,
    GpuFacts,
    Job,
    MigDevice,
    Rank,
    Severity,
    Sick,
    Unknown,
    Verdict,
    Well,
    check,
    devices_of,
    healthy,
    mebibytes,
    on_processor,
)

GIB = 1 << 30


@check(
    id="MEM005",
    severity=Severity.ERROR,
    needs=(GpuFacts, EstimateFacts),
    cases=lambda: (
        Well("fits", healthy(hosts=2, per_host=2).put(EstimateFacts(device_peak=60 * GIB))),
        Well("nobody estimated", healthy(per_host=2)),
        Well("only host memory was estimated", healthy(per_host=2).put(EstimateFacts(host_peak=8 * GIB))),
        Sick(
            "too large for every GPU",
            healthy(per_host=2).put(EstimateFacts(device_peak=91 * GIB, largest_batch=12)),
            ranks=(0, 1),
        ),
        Sick(
            "too large where somebody else holds memory",
            healthy(hosts=2, per_host=2)
            .put(EstimateFacts(device_peak=60 * GIB))
            .gpu(0, hosts=("node1",), memory_used=30 * GIB, memory_free=50 * GIB),
            ranks=(2,),
        ),
        Sick(
            "too large for a MIG slice",
            healthy(per_host=1)
            .gpu(0, mig=True, mig_devices=(MigDevice("MIG-a", 0, 20 * GIB),))
            .put(EstimateFacts(device_peak=30 * GIB)),
            ranks=(0,),
        ),
    ),
)
def predicted_peak_too_large(job: Job) -> Iterator[Verdict]:
    """Ask whether the estimated peak of device memory fits into what is free on the rank's GPU.

    Why it hurts: the run ends with "CUDA out of memory", often only after the first optimizer step or the first long
    batch.
    Fix: take a smaller batch with gradient accumulation, bf16, activation checkpointing, or a sharded strategy (FSDP);
    `doctor estimate` shows what each saves.
    """
    groups: dict[tuple[int, int], list[tuple[Rank, Device]]] = {}
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
        yield Unknown("which GPU these ranks will use, or how much of it is free, is not known", tuple(unclear))
    for (peak, free), members in groups.items():
        yield _finding(peak, free, members)


def _free(device: Device) -> int | None:
    if device.slice:
        return device.slice.memory
    return device.gpu.memory_free if device.gpu.memory_free is not None else device.gpu.memory_total


def _finding(peak: int, free: int, members: list[tuple[Rank, Device]]) -> Finding:
    estimate = members[0][0].find(EstimateFacts)
    largest = estimate.largest_batch if estimate else None
    return Finding(
        f"the estimated peak of {mebibytes(peak)} exceeds the free {mebibytes(free)} by {mebibytes(peak - free)}",
        ranks=tuple(rank.number for rank, _ in members),
        evidence={
            "device_peak_bytes": peak,
            "free_bytes": free,
            "largest_batch_that_fits": largest,
            "devices": [device.label for _, device in members[:16]],
        },
        fix=f"The largest batch that fits is {largest}." if largest else "",
        explains=("MEM011",),
    )
