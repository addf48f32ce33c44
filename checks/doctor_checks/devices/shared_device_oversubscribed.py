"""GPU007: ranks that share a GPU do not fit on it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from doctor.api import (
    Device,
    EstimateFacts,
    Finding,
    GpuFacts,
    Job,
    Rank,
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
)

GIB = 1 << 30


@check(
    id="GPU007",
    severity=Severity.ERROR,
    scope=Scope.HOST,
    when="PR",
    needs=(GpuFacts, EstimateFacts),
    cases=lambda: (
        Well("a GPU for each rank", healthy(per_host=2).put(EstimateFacts(device_peak=70 * GIB))),
        Well(
            "two small ranks on one GPU",
            healthy(per_host=2, gpus=1).put(EstimateFacts(device_peak=20 * GIB)),
        ),
        Sick(
            "two ranks that fill a GPU each",
            healthy(per_host=2, gpus=1).put(EstimateFacts(device_peak=50 * GIB)),
            ranks=(0, 1),
        ),
        Sick(
            "on one of two hosts",
            healthy(hosts=2, per_host=2)
            .environ(ranks=(2, 3), CUDA_VISIBLE_DEVICES="1")
            .put(EstimateFacts(device_peak=41 * GIB)),
            ranks=(2, 3),
        ),
    ),
)
def shared_device_oversubscribed(job: Job) -> Iterator[Verdict]:
    """Ask whether the ranks that share a GPU fit on it together.

    Why it hurts: each rank alone fits, together they run out of memory, and which of them dies first is chance.
    Fix: one rank a GPU with a larger batch; or a smaller batch, so that their estimated peaks together stay below the
    GPU's memory.
    """
    shared = [entry for machine in job.by_machine() for entry in _together(machine.members, devices_of(job))]
    if not shared:
        yield Unknown("other ranks not gathered") if job.ungathered else Skip("no two ranks share a GPU")
    for device, ranks in shared:
        total = device.slice.memory if device.slice else device.gpu.memory_total
        peaks = [estimate.device_peak or 0 for rank in ranks if (estimate := rank.find(EstimateFacts))]
        if total is not None and sum(peaks) > total:
            yield Finding(
                f"{len(ranks)} ranks on {device.label} need {mebibytes(sum(peaks))} and get {mebibytes(total)}",
                ranks=tuple(rank.number for rank in ranks),
                evidence={"device": device.uuid, "peaks_bytes": peaks, "memory_total_bytes": total},
                explains=("MEM005",),
            )


def _together(members: tuple[Rank, ...], devices: Mapping[Rank, Device | None]) -> list[tuple[Device, list[Rank]]]:
    by_device: dict[str, tuple[Device, list[Rank]]] = {}
    for rank in members:
        device = devices[rank]
        if device and device.uuid:
            by_device.setdefault(device.uuid, (device, []))[1].append(rank)
    return [entry for entry in by_device.values() if len(entry[1]) > 1]
