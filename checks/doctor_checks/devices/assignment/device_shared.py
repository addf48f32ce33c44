"""GPU001: two ranks use one GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from doctor.analysis.visible_devices import (
    VisibleDevice,
    asks_to_share,
    devices_of,
    has_own_gpus,
    on_processor,
    parse_visible_devices,
    uses_nccl,
    visible_to,
)
from doctor.api import (
    Finding,
    Job,
    LocalRanks,
    Rank,
    Scope,
    Severity,
    Skip,
    Unknown,
    Verdict,
    check,
    event_groups,
    finding_from_logs,
    ranks_in_words,
)
from doctor.facts import EnvironmentFacts, Event, GpuFacts, TrainerFacts, TrainingFacts
from doctor.testing import Fails, Passes, healthy, running


def _from_logs(job: Job) -> Iterator[Finding]:
    pairs = [(event, _named_ranks(event)) for group in event_groups(job, "nccl.dup_gpu") for event in group.events]
    ranks = tuple(sorted({rank for _, named in pairs for rank in named}))
    for group in event_groups(job, "nccl.dup_gpu"):
        yield finding_from_logs(
            group,
            f"NCCL reports that {ranks_in_words(ranks)} share a GPU",
            ranks=ranks,
            evidence={"devices": sorted({_bus_id(event) for event, _ in pairs})},
            fix="Reserve one GPU per Ray worker (`num_gpus=1`), and let each worker use its own GPU."
            if any("RayWorker" in event.text or "ray::" in event.text for event, _ in pairs)
            else "",
            confidence=0.95,
            explains=("MEM001", "MEM011"),
        )


def _named_ranks(event: Event) -> tuple[int, ...]:
    named = (event.value(name) or "" for name in ("a", "b"))
    # More than six digits are a garbled line.
    return tuple(int(value) for value in named if value.isdigit() and len(value) <= 6)


def _bus_id(event: Event) -> str:
    """``7000`` is ``0000:07:00.0`` without separators and leading zeros (NCCL src/misc/utils.cc, busIdToInt64)."""
    digits = (event.value("busid") or "").rjust(9, "0")
    return f"{digits[:-5]}:{digits[-5:-3]}:{digits[-3:-1]}.{digits[-1]}"


@check(
    id="GPU001",
    severity=Severity.ERROR,
    scope=Scope.HOST,
    when="PM",
    needs=(GpuFacts,),
    compares_ranks=True,
    from_logs=_from_logs,
    impacts={
        r"^NCCL ": "NCCL refuses to create the communicator, and the job ends at startup.",
    },
    cases=lambda: (
        Passes("a GPU for each rank", healthy(hosts=2, per_host=4)),
        Passes(
            "each rank sees a GPU of its own",
            healthy(per_host=2)
            .environ(ranks=(0,), CUDA_VISIBLE_DEVICES="0")
            .environ(ranks=(1,), CUDA_VISIBLE_DEVICES="1"),
        ),
        Passes(
            "SLURM gives each task a GPU behind a cgroup, and each calls it 0",
            healthy(per_host=2, gpus=1).environ(CUDA_VISIBLE_DEVICES="0").by_srun().launched(SLURM_GPUS_PER_TASK="1"),
        ),
        Passes(
            "two models, whose order CUDA decides",
            healthy(per_host=2).gpu(1, name="NVIDIA T400"),
        ),
        Passes("CPU training on a machine with one GPU", healthy(per_host=4, gpus=1).environ(CUDA_VISIBLE_DEVICES="")),
        Fails(
            "all ranks see the same single GPU",
            healthy(hosts=2, per_host=2).environ(ranks=(0, 1), CUDA_VISIBLE_DEVICES="0"),
            ranks=(0, 1),
        ),
        Fails(
            "lists in opposite order lead to one GPU",
            healthy(per_host=2).environ(ranks=(1,), CUDA_VISIBLE_DEVICES="1,0"),
            ranks=(0, 1),
        ),
        Fails(
            "shared on purpose",
            healthy(per_host=2).environ(CUDA_VISIBLE_DEVICES="1", NCCL_MULTI_RANK_GPU_ENABLE="1"),
            ranks=(0, 1),
            severity=Severity.WARNING,
        ),
        Fails(
            "shared through MPS",
            healthy(per_host=2, gpus=1).environ(CUDA_MPS_PIPE_DIRECTORY="/tmp/nvidia-mps"),  # noqa: S108 - its default
            ranks=(0, 1),
            severity=Severity.WARNING,
        ),
        Fails(
            "shared by ranks that talk by Gloo",
            healthy(per_host=2, gpus=1).put(TrainerFacts(source="fabric run", backend="gloo")),
            ranks=(0, 1),
            severity=Severity.WARNING,
        ),
        Passes("a run in which each rank has its own", running(2, 2)),
        Passes(
            "a run that gives local rank 1 the first GPU",
            running(1, 2)
            .alter(TrainingFacts, ranks=(0,), device="cuda:1", device_id="0000:11:00.0")
            .alter(TrainingFacts, ranks=(1,), device="cuda:0", device_id="0000:10:00.0"),
        ),
        Passes(
            "SLURM's cgroups, and a run that names its devices",
            running(1, 2).environ(CUDA_VISIBLE_DEVICES="0").by_srun().launched(SLURM_GPUS_PER_TASK="1"),
        ),
        Fails(
            "a run that forgot its local rank",
            running(2, 2).alter(TrainingFacts, ranks=(3,), device="cuda:0", device_id="00000000:10:00.0"),
            ranks=(2, 3),
        ),
        Fails(
            "the same by UUID, and Gloo",
            running(1, 2).alter(
                TrainingFacts, device="cuda:1", device_id="00000000-0000-0000-0000-000000000001", backend="gloo"
            ),
            ranks=(0, 1),
            severity=Severity.WARNING,
        ),
    ),
)
def device_shared(job: Job) -> Iterator[Verdict]:
    """Ask whether every rank of a host has its own GPU.

    Why it hurts: NCCL rejects two ranks on one GPU ("Duplicate GPU detected"). With another backend, the ranks share
    the compute time and the memory of the GPU.
    Fix: Start one process per GPU (`torchrun --nproc-per-node=gpu`), and call
    `torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))` before any other CUDA call.
    """
    devices = devices_of(job)
    unclear = [rank for rank, device in devices.items() if device is None and on_processor(rank) is None]
    if not unclear and not any(devices.values()):
        yield Unknown("other ranks not gathered") if job.ungathered else Skip("no rank uses a GPU")
    if not any(rank.find(EnvironmentFacts) or rank.find(TrainingFacts) for rank in job.ranks):
        yield Skip("no such evidence")
        return
    if job.world_size > 1:
        yield from _unclear(unclear)
    for machine in job.by_machine():
        for device, ranks in _together(machine, devices):
            if all(map(_is_behind_cgroup, ranks)) and len({rank.host.index for rank in ranks}) == 1:
                reason = "SLURM assigns GPUs to each task, so equal device numbers may be different GPUs"
                if len({rank.local_rank for rank in ranks}) > 1:
                    yield Unknown(reason, tuple(rank.number for rank in ranks), "check inside one task: nvidia-smi -L")
                continue
            wanted = any(_asks_to_share(rank, device) for rank in ranks)
            numbers = tuple(rank.number for rank in ranks)
            severity = Severity.ERROR if any(map(uses_nccl, ranks)) and not wanted else Severity.WARNING
            yield Finding(
                f"{ranks_in_words(numbers).capitalize()} use the same GPU: {device.label} of {machine.name}",
                ranks=numbers,
                evidence={
                    "device": device.uuid,
                    "gpu_index": device.gpu.index,
                    "pci_bus_id": device.gpu.bus_id,
                    "local_ranks": [rank.local_rank for rank in ranks],
                    "sharing_asked_for": wanted or None,
                },
                effect='NCCL refuses to create the communicator ("Duplicate GPU detected"), and the job ends at '
                "startup."
                if severity is Severity.ERROR
                else "The ranks share the compute time and the memory of the GPU.",
                severity=severity,
                explains=("NET027",),
            )


def _unclear(ranks: list[Rank]) -> Iterator[Unknown]:
    reasons: dict[str, list[int]] = {}
    for rank in ranks:
        seen = visible_to(rank)
        if seen and seen.devices is None:
            reasons.setdefault(seen.why, []).append(rank.number)
    for why, numbers in reasons.items():
        yield Unknown(why, tuple(numbers), "name the devices by UUID in CUDA_VISIBLE_DEVICES (nvidia-smi -L)")


def _together(
    machine: LocalRanks, devices: Mapping[Rank, VisibleDevice | None]
) -> Iterator[tuple[VisibleDevice, list[Rank]]]:
    by_device: dict[str, tuple[VisibleDevice, list[Rank]]] = {}
    for rank in machine.members:
        device = devices[rank]
        if device and device.uuid:
            by_device.setdefault(device.uuid, (device, []))[1].append(rank)
    return (entry for entry in by_device.values() if len(entry[1]) > 1)


def _is_behind_cgroup(rank: Rank) -> bool:
    """Whether only the number of its device is known, and the same number means different devices in other tasks."""
    training = rank.find(TrainingFacts)
    if training and training.device_id:
        return False
    environment = rank.find(EnvironmentFacts)
    listed = parse_visible_devices(environment.get("CUDA_VISIBLE_DEVICES") if environment else None)
    return has_own_gpus(rank) and (listed.is_by_index or not listed.is_set)


def _asks_to_share(rank: Rank, device: VisibleDevice) -> bool:
    return asks_to_share(rank) or any(process.kind == "mps" for process in device.gpu.processes or ())
