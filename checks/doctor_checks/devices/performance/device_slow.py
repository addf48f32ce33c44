"""GPU024: a rank's device computes or copies more slowly than those of its peers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from doctor.analysis.device_speed import SlowDevice, compare_devices
from doctor.analysis.fabric.p2p_bandwidth import SlowNeighbour, slow_neighbours
from doctor.analysis.fabric.peak_bandwidth import SlowCopies, copies_below
from doctor.api import Finding, Job, Scope, Severity, Skip, Unknown, Verdict, check, ranks_in_words
from doctor.facts import DeviceSpeed, DeviceSpeedFacts, GpuFacts
from doctor.testing import Fails, JobBuilder, Passes, healthy
from doctor.testing.collective_timings import exchanged
from doctor_checks._trial_conclusions import with_trials

COMES_WITH_OTHERS = ("out of memory", "busy or unavailable", "is this rank's", "memory are free", "no answer within")
"""Errors that indicate a temporary state or a problem of the measurement, not a fault of the device."""


def _gpu(rank: int, **changes: object) -> DeviceSpeed:
    values: dict[str, object] = {
        "device": f"cuda:{rank % 8}",
        "name": "NVIDIA H100 80GB HBM3",
        "dtype": "bfloat16",
        "size": 8192,
        "seconds": 0.0015 * (1 + 0.01 * (rank % 3)),
        "repeats": 300,
        "to_device": 54e9 - 1e8 * (rank % 4),
        "to_host": 52e9 + 1e8 * (rank % 5),
    }
    return DeviceSpeed(**{**values, **changes})  # type: ignore[arg-type]


def _cpu(rank: int, **changes: object) -> DeviceSpeed:
    values: dict[str, object] = {
        "device": "cpu",
        "name": "Intel(R) Xeon(R) Processor",
        "size": 256,
        "seconds": 0.0008 * (1 + 0.02 * (rank % 3)),
        "repeats": 1000,
        "processor_share": 0.99,
    }
    return DeviceSpeed(**{**values, **changes})  # type: ignore[arg-type]


def _measured(
    ranks: int, hosts: int, sample: Callable[..., DeviceSpeed], odd: int | None = None, **changes: object
) -> JobBuilder:
    sketch = healthy(hosts, ranks // hosts, gpus=0 if sample is _cpu else ranks // hosts)
    for rank in range(ranks):
        own = changes if rank == odd else {}
        samples = (sample(rank, **own), sample(rank, confirms=True, **own))
        sketch = sketch.put(DeviceSpeedFacts(samples=samples), ranks=(rank,))
    return sketch


def _eight(odd: int | None = None, **changes: object) -> JobBuilder:
    return _measured(8, 2, _gpu, odd, **changes)


_LINK = 63e9
"""Bandwidth of PCIe 5.0 x16 in bytes per second."""


def _alone(share: float) -> JobBuilder:
    return _measured(2, 1, _gpu, 1, to_device=share * _LINK, to_host=share * _LINK)


def _once_slow() -> JobBuilder:
    samples = (_gpu(5, seconds=0.01), _gpu(5, confirms=True))
    return _eight().put(DeviceSpeedFacts(samples=samples), ranks=(5,))


def _two_models() -> JobBuilder:
    older = (_gpu(0, name="NVIDIA A100-SXM4-80GB", seconds=0.0045),)
    return _eight().put(DeviceSpeedFacts(samples=older), ranks=range(4))


def _over_nvlink(*slow: int, to: int | None = None, hosts: int = 4, share: float = 0.1) -> JobBuilder:
    def is_slow(source: int, target: int) -> bool:
        ends = {source, target}
        return source // 4 == target // 4 and bool(ends.intersection(slow)) and (to is None or to in ends)

    sketch = exchanged(is_slow, hosts=hosts, share=share)
    for rank in range(4 * hosts):
        sketch = sketch.put(DeviceSpeedFacts(samples=(_gpu(rank),)), ranks=(rank,))
    return sketch


_BUSY = {"seconds": 0.004, "processor_share": 0.21, "pinned_to": (1,)}


@check(
    id="GPU024",
    severity=Severity.WARNING,
    scope=Scope.RANK,
    needs=(DeviceSpeedFacts,),
    impacts={
        r"cannot compute": "The rank fails at its first kernel, and the other ranks wait for it until their timeout.",
        r"matrix products": (
            "The rank takes longer to compute each step, and all ranks wait for it in the next collective."
        ),
        r"copies to ": (
            "Batches and offloaded tensors reach the GPU late, and all ranks wait for this one in the next collective."
        ),
        r"copies from ": (
            "Tensors that are offloaded or saved leave the GPU late, which delays each step that copies them."
        ),
        r"messages to": "Collectives run at the speed of these links, so every rank waits for them.",
    },
    cases=lambda: (
        Passes("not measured", healthy(hosts=2)),
        Passes("all GPUs equally fast", _eight()),
        Passes("one a tenth slower", _eight(5, seconds=0.00168)),
        Passes("slow once, and as fast as the others when measured again", _once_slow()),
        Passes("two ranks have nothing to be compared with", _measured(2, 1, _gpu, 1, seconds=0.01)),
        Passes("two ranks at 60 % of what their links carry", _alone(0.6)),
        Fails("one of two ranks at a tenth of what its link carries", _alone(0.1), ranks=(1,), severity=Severity.INFO),
        Fails(
            "a lone GPU whose copies to the host are at a tenth",
            _measured(1, 1, _gpu, 0, to_host=0.1 * _LINK),
            ranks=(0,),
            severity=Severity.INFO,
        ),
        Passes("a link with four lanes carries no more", _alone(0.1).gpu(1, pcie_generation=3, pcie_width=4)),
        Passes("a link of unknown width", _alone(0.1).gpu(1, pcie_width=None)),
        Passes("a link of unknown generation", _alone(0.1).gpu(1, pcie_generation=None)),
        Passes("a host whose GPUs could not be queried", _alone(0.1).drop(GpuFacts)),
        Passes("another model is not a peer", _two_models()),
        Passes("a device whose memory another job fills", _eight(5, error="OutOfMemoryError: CUDA out of memory.")),
        Passes("processors that all ranks share equally", _measured(8, 1, _cpu, processor_share=0.25)),
        Fails("a GPU at half its clock", _eight(5, seconds=0.0034), ranks=(5,), hosts=("node1",)),
        Fails("a PCIe link with four lanes", _eight(5, to_device=13e9, to_host=13e9), ranks=(5,)),
        Fails("slow in one direction", _eight(5, to_host=9e9), ranks=(5,)),
        Fails(
            "a GPU that can't compute",
            _eight(5, error="AcceleratorError: CUDA error: uncorrectable ECC error encountered"),
            ranks=(5,),
            severity=Severity.ERROR,
        ),
        Fails("a rank on a processor that others use", _measured(4, 4, _cpu, 2, **_BUSY), ranks=(2,), hosts=("node2",)),
        Passes("pairs that a bridge joins are faster than others", _over_nvlink()),
        Passes("a GPU with 80 % of the usual bandwidth", _over_nvlink(5, share=0.8)),
        Passes("two hosts, of which the slow one is unknown", _over_nvlink(5, hosts=2)),
        Fails("a GPU whose links to the others of its host are slow", _over_nvlink(5), ranks=(5,), hosts=("node1",)),
        Fails("a bridge between two GPUs that is down", _over_nvlink(8, to=9), ranks=(8, 9), hosts=("node2",)),
        Fails("a processor that is slow by itself", _measured(4, 4, _cpu, 3, seconds=0.003), ranks=(3,)),
    ),
)
def device_slow(
    job: Job, *, speed_share: float = 0.6, deviations: float = 4.0, link_share: float = 0.2
) -> Iterator[Verdict]:
    """Ask whether every rank's device computes and copies about as fast as those of its peers.

    Why it hurts: every collective waits for the slowest rank, so one slow GPU, link or shared CPU core limits the
    speed of the whole job.
    Fix: For a GPU, exclude its host and check `nvidia-smi -q -d PERFORMANCE,CLOCK,POWER`; for a CPU, bind each rank
    to its own cores (`srun --cpu-bind=cores`) and end other processes there.
    """
    # 0.6: GPUs of one model differ by about 10 % in clock, and ranks that share CPUs by 20 %. Four robust deviations:
    # if the peers themselves differ widely, none of them is an outlier. 0.2: a rank without peers is compared with its
    # own PCIe link, of which a healthy GPU reaches about 85 %, and a virtual machine or a shared switch less.
    broken = dict(_failed(job))
    for rank, sample in broken.items():
        error = sample.error or ""
        yield _cannot_compute(job, rank, sample) if _blames_device(error) else Unknown(error, (rank,))
    for near in slow_neighbours(job, least_share=speed_share, least_confidence=0.5):
        finding = _slow_messages(near)
        yield with_trials(job, finding, "collective", otherwise=finding.fix, unit="B/s")
    for copies in copies_below(job, link_share):
        yield _slow_copies(job, copies)
    judged = compare_devices(job, share=speed_share, deviations=deviations)
    if not judged.compared and not broken:
        yield Skip("fewer than three ranks have the same kind of device")
        return
    if judged.alone:
        yield Unknown("fewer than two other ranks have this kind of device", judged.alone)
    if judged.unconfirmed:
        yield Unknown("slow in a single measurement", judged.unconfirmed, "doctor check --probe full")
    by_rank: dict[int, list[SlowDevice]] = {}
    for slow in judged.slow:
        by_rank.setdefault(slow.rank, []).append(slow)
    for found in by_rank.values():
        yield with_trials(job, _finding(job, found), "device")


def _failed(job: Job) -> Iterator[tuple[int, DeviceSpeed]]:
    for facts, identical in job.facts(DeviceSpeedFacts):
        for sample in facts.samples:
            if sample.error is not None:
                yield from ((rank, sample) for rank in identical.ranks)


def _blames_device(error: str) -> bool:
    return "CUDA error" in error and not any(words in error for words in COMES_WITH_OTHERS)


def _cannot_compute(job: Job, rank: int, sample: DeviceSpeed) -> Finding:
    error, host = sample.error or "", ", ".join(job.hosts_of((rank,)))
    return Finding(
        f"Rank {rank} on {host} cannot compute on {sample.device}: {error[error.index('CUDA error') :]}",
        ranks=(rank,),
        severity=Severity.ERROR,
        evidence={
            "device": f"{sample.device} ({sample.name})" if sample.name else sample.device,
            "error": error,
            "exclude": [host],
        },
        fix=f"Exclude {host} (`srun --exclude={host}` in SLURM) until it is repaired, and check there:\n"
        "sudo dmesg -T | grep -i xid\n"
        "nvidia-smi -q -d ECC,ROW_REMAPPER",
    )


def _slow_messages(near: SlowNeighbour) -> Finding:
    worst, usual = near.messages[0]
    others = {"sending": "to", "receiving": "from"}.get(near.way, "to and from")
    whose = "messages to each other" if len(near.ranks) > 1 else f"messages {others} other GPUs of the host"
    return Finding(
        f"{ranks_in_words(near.ranks).capitalize()} on {near.host}: {whose} reach "
        f"{worst.value / 1e9:.1f} GB/s (usual: {usual / 1e9:.1f} GB/s)",
        ranks=near.ranks,
        evidence={
            "messages": {
                f"rank {one.source} to {one.target}": f"{one.value / 1e9:.1f} GB/s, usual {typical / 1e9:.1f} GB/s"
                for one, typical in reversed(near.messages[:8])  # of several sizes, the slowest
            },
            "exclude": [near.host],
        },
        fix=f"Exclude {near.host} (`srun --exclude={near.host}` in SLURM), and check its links with:\n"
        "nvidia-smi nvlink -s\nnvidia-smi topo -m\nsudo dmesg -T | grep -iE 'xid.*(74|nvlink)'",
        confidence=near.confidence,
    )


def _slow_copies(job: Job, copies: SlowCopies) -> Finding:
    """For a rank without peers: virtual machines and shared switches can be that slow by design, so this is info."""
    (what, speed), hosts = min(copies.speeds.items(), key=lambda item: item[1]), job.hosts_of((copies.rank,))
    link = f"generation {copies.gpu.pcie_generation} x{copies.gpu.pcie_width}"
    way = "to" if what == "to_device" else "from"
    return Finding(
        f"Rank {copies.rank} on {', '.join(hosts)}: copies {way} {copies.sample.device} reach {speed / 1e9:.1f} of the "
        f"{copies.roofline / 1e9:.1f} GB/s of its PCIe link",
        ranks=(copies.rank,),
        evidence={
            "device": f"{copies.sample.device} ({copies.sample.name})",
            "pcie_link_now": link,
            "pcie_link_carries": f"{copies.roofline / 1e9:.1f} GB/s",
            **{_NAMES[name]: f"{value / 1e9:.1f} GB/s" for name, value in copies.speeds.items()},
        },
        fix=f"Check with `nvidia-smi topo -m` on {', '.join(hosts)} that the rank runs on the GPU's NUMA node and that "
        "the GPU shares no switch with busy devices.",
        severity=Severity.INFO,
    )


def _finding(job: Job, found: list[SlowDevice]) -> Finding:
    worst = min(found, key=lambda slow: slow.value / slow.usual)
    sample, hosts = worst.sample, job.hosts_of((worst.rank,))
    is_gpu = sample.device.startswith("cuda")
    evidence: dict[str, object] = {
        "device": f"{sample.device} ({sample.name})",
        "matrix": f"{sample.size} x {sample.size} {sample.dtype}"
        if any(slow.what == "product" for slow in found)
        else None,
        **{_NAMES[slow.what]: f"{_written(slow, slow.value)}, usual {_written(slow, slow.usual)}" for slow in found},
        **({} if is_gpu else _of_processor(worst)),
        "compared_with_ranks": worst.peers,
        **({"exclude": list(hosts)} if is_gpu else {}),
    }
    return Finding(
        f"Rank {worst.rank} on {', '.join(hosts)}: {_claim(worst)}",
        ranks=(worst.rank,),
        evidence=evidence,
        fix=_fix_of_gpu(worst, hosts) if is_gpu else _fix_of_processor(worst, hosts),
    )


_NAMES = {"product": "matrix_product", "to_device": "copy_to_device", "to_host": "copy_to_host"}


def _written(slow: SlowDevice, value: float) -> str:
    if slow.what != "product":
        return f"{value / 1e9:.1f} GB/s"
    return f"{value / 1e12:.0f} TFLOP/s" if value >= 1e13 else f"{value / 1e9:.1f} GFLOP/s"


def _claim(slow: SlowDevice) -> str:
    speeds = f"{_written(slow, slow.value)} (peers: {_written(slow, slow.usual)})"
    if slow.what != "product":
        way = "to" if slow.what == "to_device" else "from"
        return f"copies {way} {slow.sample.device} run at {speeds}"
    where = slow.sample.device if slow.sample.device.startswith("cuda") else "the CPU"
    return f"matrix products on {where} run at {speeds}"


_UNSHARED: dict[str, object] = {"cause": "a slow CPU, which no other process uses"}


def _share(slow: SlowDevice) -> dict[str, object]:
    share, usual = slow.sample.processor_share, slow.usual_share
    if share is None or usual is None:
        return {}
    if share > 0.8 * usual:
        return _UNSHARED
    return {"cause": f"the rank gets {share:.0%} of {_processors(slow.sample)}, which other processes use"}


def _where(sample: DeviceSpeed) -> str:
    return _processors(sample) if sample.pinned_to else "this host"


def _processors(sample: DeviceSpeed) -> str:
    if not sample.pinned_to:
        return "one CPU"
    listed = ", ".join(map(str, sample.pinned_to[:8]))
    return f"CPU {listed}" if len(sample.pinned_to) == 1 else f"one of the CPUs {listed}"


def _of_processor(slow: SlowDevice) -> dict[str, object]:
    share, usual = slow.sample.processor_share, slow.usual_share
    return {
        **_share(slow),
        "processor_share": None if share is None else round(share, 3),
        "usual_processor_share": None if usual is None else round(usual, 3),
        "pinned_to": list(slow.sample.pinned_to[:32]),
    }


def _fix_of_gpu(slow: SlowDevice, hosts: tuple[str, ...]) -> str:
    look = "the clocks of its GPUs with:\nnvidia-smi -q -d PERFORMANCE,CLOCK,POWER,TEMPERATURE"
    if slow.what != "product":
        look = "its PCIe links and NUMA nodes with:\nnvidia-smi -q | grep -A 12 'GPU Link Info'\nnvidia-smi topo -m"
    return f"Exclude {', '.join(hosts)} (`srun --exclude={','.join(hosts)}` in SLURM), and check {look}"


def _fix_of_processor(slow: SlowDevice, hosts: tuple[str, ...]) -> str:
    sample = slow.sample
    if _share(slow) == _UNSHARED:
        return f"Exclude {', '.join(hosts)}, and check its CPU frequency:\ngrep MHz /proc/cpuinfo"
    of = f" of {', '.join(hosts)}" if sample.pinned_to else ""
    listing = "`ps -eLo pid,psr,pcpu,comm --sort=-pcpu | head`"
    return (
        f"End other processes on {_where(sample)}{of} ({listing} lists them), or bind the rank to other CPUs "
        "(`srun --cpu-bind=cores`)."
    )
