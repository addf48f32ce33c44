"""GPU005: ranks use different GPUs or drivers."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from doctor.analysis.stats.baseline import BaselineDifference
from doctor.analysis.visible_devices import mebibytes, shares_by_host
from doctor.api import (
    ALONE,
    BaselineDeviation,
    Finding,
    Group,
    Job,
    MajoritySplit,
    Scope,
    Severity,
    Skip,
    Verdict,
    baseline_values,
    check,
    correlates,
    hosts_text,
    ranks_in_words,
    split_groups,
    stands_alone,
)
from doctor.core.text import conjunction
from doctor.facts import GpuFacts, LaunchFacts, MigDevice
from doctor.testing import Fails, JobBuilder, Passes, healthy

GIB = 1 << 30

Groups = dict[Hashable, list[int]]


def _smaller(sketch: JobBuilder, host: str) -> JobBuilder:
    return sketch.gpu(0, hosts=(host,), name="NVIDIA A100-SXM4-40GB", memory_total=40 * GIB)


@check(
    id="GPU005",
    severity=Severity.WARNING,
    scope=Scope.JOB,
    needs=(GpuFacts,),
    uses_baseline=True,
    impacts={
        r"^Driver version": (
            "Hosts may select different algorithms, or fail when the job uses a feature that only one of the drivers "
            "supports."
        ),
        r"^GPU memory": (
            "The smallest memory limits the batch size of all ranks, and a batch that fits on one rank may not "
            "fit on another."
        ),
        r"^MIG": "MIG slices are slower than whole GPUs, have no peer access, and limit the batch size of all ranks.",
        r" has different GPU models": "None unless the job uses both models: each step then waits for the slower one.",
        r"^GPU model": "Every step waits for the slowest GPU model.",
    },
    cases=lambda: (
        Passes("one model and one driver", healthy(hosts=3, per_host=2)),
        Passes(
            "memory a little smaller under another setting",
            healthy(hosts=3, per_host=1).gpu(0, hosts=("node2",), memory_total=80 * GIB - (200 << 20)),
        ),
        Passes(
            "a small card for the display, which no rank uses",
            healthy(per_host=2, gpus=3)
            .gpu(2, name="NVIDIA T400", memory_total=2 * GIB)
            .environ(CUDA_DEVICE_ORDER="PCI_BUS_ID"),
        ),
        Passes(
            "two models in a workstation, one process",
            healthy(per_host=1, gpus=2).gpu(1, name="NVIDIA T400"),
            silent=False,
        ),
        Passes("one process, as in the capture", healthy(1, 1).expecting(healthy(2, 8))),
        Passes("a capture without GPUs", healthy(2, 2).expecting(healthy(1, 1, gpus=0))),
        Passes(
            "one process in a workstation whose display has a small card",
            healthy(per_host=1, gpus=2).gpu(1, name="NVIDIA T400", memory_total=2 * GIB).expecting(healthy()),
            silent=False,
        ),
        Fails(
            "another driver on one host",
            healthy(hosts=3, per_host=2).alter(GpuFacts, hosts=("node1",), driver_version="550.54.15"),
            ranks=(2, 3),
        ),
        Fails(
            "one GPU of another model",
            healthy(per_host=8).gpu(7, name="NVIDIA A100-SXM4-80GB").environ(CUDA_DEVICE_ORDER="PCI_BUS_ID"),
            ranks=(7,),
        ),
        Fails(
            "half of the hosts with smaller cards",
            healthy(hosts=2, per_host=2)
            .gpu(0, hosts=("node1",), memory_total=40 * GIB)
            .gpu(1, hosts=("node1",), memory_total=40 * GIB),
            ranks=(0, 1, 2, 3),
        ),
        Fails(
            "MIG switched on on one host",
            healthy(hosts=3, per_host=1).gpu(
                0, hosts=("node2",), mig=True, mig_devices=(MigDevice("MIG-1", 0, 20 * GIB, "MIG 2g.20gb"),)
            ),
            ranks=(2,),
        ),
        Fails(
            "most hosts with another driver than in the capture",
            healthy(3, 2).alter(GpuFacts, hosts=("node0", "node1"), driver_version="550.54.15").expecting(healthy()),
            ranks=(0, 1, 2, 3),
        ),
        Fails(
            "half of the hosts with smaller cards, and a capture of those",
            _smaller(healthy(hosts=2, per_host=1), "node1").expecting(_smaller(healthy(1, 1), "node0")),
            ranks=(0,),
        ),
        Fails(
            "one process on another model than in the capture",
            _smaller(healthy(1, 1), "node0").expecting(healthy()),
            ranks=(0,),
        ),
    ),
)
def devices_differ(job: Job, *, memory_share: float = 0.02) -> Iterator[Verdict]:
    """Ask whether all ranks use the same GPU model, memory size, driver release and MIG layout.

    Why it hurts: every step waits for the slowest GPU, the smallest memory limits the batch size, and a job with mixed
    drivers may fail on some hosts only.
    Fix: Request hosts with the same GPUs from the scheduler (`--constraint` in SLURM), and install one driver
    release on all of them.
    """
    used = {one: _used(one) for one in ((job, job.expected) if job.expected else (job,))}
    sizes = {alike.memory for found in used.values() for alike in found if alike.memory}
    # Sizes of one model that differ by less than `share` are equal: ECC and the driver's reserve change the total
    # slightly.
    steps: dict[int, str] = {}
    first = 0
    for size in sorted(sizes):
        if size > first * (1 + memory_share):
            first = size
        steps[size] = mebibytes(first)
    expected = baseline_values(
        job,
        lambda worked: (
            (trait, value) for trait, groups in _group(worked, used[worked], steps).items() for value in groups
        ),
    )
    own = _group(job, used[job], steps)
    parted = {
        trait: split_groups({value: set(ranks) for value, ranks in groups.items()}, expected=expected.get(trait))
        for trait, groups in own.items()
    }
    if stands_alone(job, [one.expected for one in parted.values()]):
        yield Skip(ALONE)
    if len(job.ranks) == 1:
        # One process may start ranks on all GPUs, or use only one of them: this is info.
        gpus, launch = job.ranks[0].find(GpuFacts), job.ranks[0].find(LaunchFacts)
        names = sorted({gpu.name for gpu in gpus.gpus if gpu.name}) if gpus else []
        if len(names) > 1 and not (launch and launch.running_together):
            yield Finding(
                f"{job.ranks[0].host.name} has different GPU models: {conjunction(names)}",
                ranks=(job.ranks[0].number,),
                evidence={"models": names},
                fix="Select GPUs of one model with CUDA_VISIBLE_DEVICES.",
                severity=Severity.INFO,
            )
    else:
        yield from (finding for trait, one in parted.items() for finding in _judge(job, trait, one))
    yield from _unexpected(job, {trait: one for trait, one in parted.items() if one.expected})


def _group(job: Job, used: _Used, steps: Mapping[int, str]) -> dict[str, Groups]:
    groups: dict[str, Groups] = {"Driver version": {}, "GPU model": {}, "GPU memory": {}, "MIG layout": {}}
    for gpus, identical in job.each(GpuFacts):
        if gpus.driver_version:
            groups["Driver version"].setdefault(gpus.driver_version, []).extend(identical.ranks)
    for alike, users in used.items():
        values = (alike.name or None, steps.get(alike.memory or 0), _layout(alike))
        for trait, value in zip(("GPU model", "GPU memory", "MIG layout"), values, strict=True):
            if value is not None:
                groups[trait].setdefault(value, []).extend(users)
    return groups


class _AlikeGpus(NamedTuple):
    name: str
    memory: int | None
    mig: bool | None
    slices: tuple[MigDevice, ...]


_Used = Mapping[_AlikeGpus, list[int]]


def _used(job: Job) -> _Used:
    """The ranks by GPUs that are identical in all compared traits; a large job has few kinds of GPUs."""
    found: dict[_AlikeGpus, list[int]] = {}
    for _, gpus in shares_by_host(job):
        for gpu, ranks in gpus:
            if ranks:
                alike = _AlikeGpus(gpu.name, gpu.memory_total, gpu.mig, gpu.mig_devices)
                found.setdefault(alike, []).extend(ranks)
    return found


_WITHOUT_SLICES = "disabled"


def _layout(alike: _AlikeGpus) -> str | None:
    if not alike.mig:
        return None if alike.mig is None else _WITHOUT_SLICES
    slices = sorted((device.name or mebibytes(device.memory)).removeprefix("MIG ") for device in alike.slices)
    return " + ".join(slices) or "no slices"


def _judge(job: Job, trait: str, parted: MajoritySplit) -> Iterator[Finding]:
    if parted.expected or not parted.minorities:
        return
    parts = [f"{value} on {ranks_in_words(ranks, 4)}" for value, ranks in parted.minorities]
    others = f" (others: {parted.common.value})" if parted.common else ""
    summary = f"{trait} differs between ranks: {'; '.join(parts[:4])}{others}"
    yield Finding(
        summary if len(summary) <= 100 else f"{trait} differs between ranks ({len(parted.groups)} values)",
        ranks=parted.odd,
        evidence={
            "ranks_by_value": {str(value): list(ranks) for value, ranks in parted.groups},
            "goes_along_with": _other_traits(job, parted.odd, [value for value, _ in parted.groups]),
        },
        fix=_fix(job, trait, parted),
    )


def _other_traits(job: Job, ranks: tuple[int, ...], values: Sequence[object]) -> list[str]:
    """What these ranks have in common, other than the values that differ."""
    return [words for words in correlates(job, ranks) if not any(words.endswith(f" {value}") for value in values)]


def _fix(job: Job, trait: str, parted: MajoritySplit) -> str:
    place = hosts_text(job.hosts_of(parted.odd))
    if trait == "Driver version":
        if parted.even or parted.common is None:
            return "Install one driver version on all hosts."
        return f"Install driver {parted.common.value} on {place}."
    if trait == "MIG layout":
        if parted.common is not None and parted.common.value == _WITHOUT_SLICES:
            return f"Turn MIG off on {place} with `sudo nvidia-smi -mig 0`."
        return "Use the same MIG layout on all hosts."
    return _of_one_host(job, parted) or _SAME_HOSTS


def _of_one_host(job: Job, parted: MajoritySplit) -> str:
    """The fix if each of these ranks shares a host with ranks that have other GPUs; else empty."""
    hosts = job.hosts_of(parted.odd)
    others = tuple(rank.number for rank in job.ranks if rank.number not in parted.odd)
    if not set(hosts) <= set(job.hosts_of(others)):
        return ""
    return f"Select GPUs of one model on {' and '.join(hosts[:4])} with CUDA_VISIBLE_DEVICES."


_SAME_HOSTS = "Request hosts with the same GPUs from the scheduler (`--constraint` in SLURM)."


def _unexpected(job: Job, parted: Mapping[str, MajoritySplit]) -> Iterator[Finding]:
    """One finding for ranks that differ in several traits: another model has another memory size and driver."""
    unlike: dict[tuple[int, ...], dict[str, Group[Any]]] = {}
    for trait, one in parted.items():
        # A single process may use any GPU of its host, so one GPU that matches the baseline is enough.
        as_expected = set(one.common.ranks if one.common else ())
        for group in one.minorities:
            if not as_expected.issuperset(group.ranks):
                unlike.setdefault(group.ranks, {})[trait] = group
    for ranks, groups in unlike.items():
        rows = tuple(parted[trait].unlike(trait, str, group) for trait, group in groups.items())
        deviation = BaselineDeviation(rows, all(parted[trait].drifted for trait in groups))
        # A host with other GPUs also has other network cards.
        explains = ("NET022",) if "GPU model" in groups else ()
        found = [row.found for row in rows]
        yield Finding(
            _summary(rows),
            ranks=ranks,
            evidence={**deviation.evidence, "goes_along_with": _other_traits(job, ranks, found)},
            effect="" if _are_drivers(rows) else _OTHER_GPUS,
            fix=_fix_of_baseline(job, ranks, rows),
            explains=explains,
        )


def _summary(rows: tuple[BaselineDifference, ...]) -> str:
    """The first trait alone if all of them make the summary too long; the evidence has all."""
    shown = rows
    while True:
        what = " and ".join(row.what for row in shown).replace("GPU model and GPU memory", "GPU model and memory")
        found, expected = (
            ", ".join(values) for values in zip(*((row.found, row.expected) for row in shown), strict=True)
        )
        text = f"{what} differ{'' if len(shown) > 1 else 's'} from the baseline: {found} instead of {expected}"
        if len(text) <= 100 or len(shown) == 1:
            return text
        shown = shown[:1]


_OTHER_GPUS = "The job of the baseline used other GPUs, so its speed and its batch size may not apply to this job."


def _are_drivers(rows: tuple[BaselineDifference, ...]) -> bool:
    return all(row.what == "Driver version" for row in rows)


def _fix_of_baseline(job: Job, ranks: tuple[int, ...], rows: tuple[BaselineDifference, ...]) -> str:
    place = hosts_text(job.hosts_of(ranks))
    if _are_drivers(rows):
        return f"Install driver {rows[0].expected} on {place}, or record a new baseline with `{_RECORD}`."
    return (
        "Request hosts with the GPUs of the baseline from the scheduler (`--constraint` in SLURM), or record a new "
        f"baseline with `{_RECORD}`."
    )


_RECORD = "doctor capture -o expected.json"
