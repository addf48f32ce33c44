"""GPU005: ranks run on different GPUs or drivers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from doctor.api import (
    Finding,
    Gpu,
    GpuFacts,
    Job,
    LaunchFacts,
    MigDevice,
    Scope,
    Severity,
    Sick,
    Verdict,
    Well,
    check,
    correlates,
    healthy,
    mebibytes,
    shares_by_host,
)

GIB = 1 << 30


@check(
    id="GPU005",
    severity=Severity.WARNING,
    scope=Scope.JOB,
    needs=(GpuFacts,),
    cases=lambda: (
        Well("one model and one driver", healthy(hosts=3, per_host=2)),
        Well(
            "memory a little smaller under another setting",
            healthy(hosts=3, per_host=1).gpu(0, hosts=("node2",), memory_total=80 * GIB - (200 << 20)),
        ),
        Well(
            "a small card for the display, which no rank uses",
            healthy(per_host=2, gpus=3)
            .gpu(2, name="NVIDIA T400", memory_total=2 * GIB)
            .environ(CUDA_DEVICE_ORDER="PCI_BUS_ID"),
        ),
        Well(
            "two models in a workstation, one process",
            healthy(per_host=1, gpus=2).gpu(1, name="NVIDIA T400"),
            silent=False,
        ),
        Sick(
            "another driver on one host",
            healthy(hosts=3, per_host=2).alter(GpuFacts, hosts=("node1",), driver_version="550.54.15"),
            ranks=(2, 3),
        ),
        Sick(
            "one GPU of another model",
            healthy(per_host=8).gpu(7, name="NVIDIA A100-SXM4-80GB").environ(CUDA_DEVICE_ORDER="PCI_BUS_ID"),
            ranks=(7,),
        ),
        Sick(
            "half of the hosts with smaller cards",
            healthy(hosts=2, per_host=2)
            .gpu(0, hosts=("node1",), memory_total=40 * GIB)
            .gpu(1, hosts=("node1",), memory_total=40 * GIB),
            ranks=(0, 1, 2, 3),
        ),
        Sick(
            "MIG switched on on one host",
            healthy(hosts=3, per_host=1).gpu(
                0, hosts=("node2",), mig=True, mig_devices=(MigDevice("MIG-1", 0, 20 * GIB, "MIG 2g.20gb"),)
            ),
            ranks=(2,),
        ),
    ),
)
def devices_differ(job: Job, *, memory_share: float = 0.02) -> Iterator[Verdict]:
    """Ask whether all ranks run on the same model of GPU, with the same memory, driver and MIG layout.

    Why it hurts: every step waits for the slowest GPU, the smallest memory decides the batch size, and mixed drivers
    may choose different algorithms or fail in one place alone.
    Fix: ask the scheduler for one kind of GPU (for example `--constraint` or `--gres=gpu:h100:8`), and bring all hosts
    to one driver.
    """
    if len(job.ranks) == 1:
        yield from _lone(job)
        return
    drivers: dict[object, list[int]] = {}
    for gpus, alike in job.each(GpuFacts):
        if gpus.driver_version:
            drivers.setdefault(gpus.driver_version, []).extend(alike.ranks)
    yield from _judge(job, "driver", drivers)
    used = list(_used(job))
    steps = _memory_steps({gpu.memory_total for gpu, _ in used if gpu.memory_total}, memory_share)
    traits: dict[str, Callable[[Gpu], object]] = {
        "GPU model": lambda gpu: gpu.name or None,
        "GPU memory": lambda gpu: steps.get(gpu.memory_total or 0),
        "MIG layout": _layout,
    }
    for trait, read in traits.items():
        groups: dict[object, list[int]] = {}
        for gpu, ranks in used:
            if (value := read(gpu)) is not None:
                groups.setdefault(value, []).extend(ranks)
        yield from _judge(job, trait, groups)


def _lone(job: Job) -> Iterator[Verdict]:
    """One process may start ranks on all GPUs, or use one of them: good to know, no more."""
    gpus, launch = job.ranks[0].find(GpuFacts), job.ranks[0].find(LaunchFacts)
    names = sorted({gpu.name for gpu in gpus.gpus if gpu.name}) if gpus else []
    if len(names) > 1 and not (launch and launch.running_together):
        yield Finding(
            f"this host has different GPUs: {', '.join(names)}",
            ranks=(job.ranks[0].number,),
            evidence={"models": names},
            severity=Severity.INFO,
        )


def _used(job: Job) -> Iterator[tuple[Gpu, tuple[int, ...]]]:
    return ((share.gpu, share.ranks) for _, found in shares_by_host(job) for share in found if share.ranks)


def _memory_steps(sizes: set[int], share: float) -> dict[int, str]:
    """Sizes that differ by less than ``share`` under one name: settings such as ECC or the driver's own reserve shift
    the total a little."""
    named: dict[int, str] = {}
    first = 0
    for size in sorted(sizes):
        if size > first * (1 + share):
            first = size
        named[size] = mebibytes(first)
    return named


def _layout(gpu: Gpu) -> str | None:
    if gpu.mig is None:
        return None
    slices = " + ".join(sorted(device.name or mebibytes(device.memory) for device in gpu.mig_devices))
    return f"MIG on ({slices or 'no slices'})" if gpu.mig else "MIG off"


def _judge(job: Job, trait: str, groups: dict[object, list[int]]) -> Iterator[Verdict]:
    if len(groups) < 2:
        return
    counts = {value: len(set(ranks)) for value, ranks in groups.items()}
    ordered = sorted(counts, key=lambda value: -counts[value])
    even = counts[ordered[0]] == counts[ordered[1]]
    ranks = tuple(sorted({rank for value in (ordered if even else ordered[1:]) for rank in groups[value]}))
    parts = [f"{value} on {counts[value]:,} rank{'s' if counts[value] > 1 else ''}" for value in ordered]
    yield Finding(
        f"{trait} differs: {'split evenly, ' if even else ''}{'; '.join(parts[:4])}",
        ranks=ranks,
        evidence={
            "trait": trait,
            "ranks_by_value": {str(value): sorted(set(groups[value])) for value in ordered},
            "goes_along_with": list(correlates(job, ranks)),
        },
    )
