"""GPU015: a rank of a distributed job runs on a MIG slice."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.analysis.visible_devices import VisibleDevice, devices_of, on_processor, uses_nccl, visible_to
from doctor.api import Finding, Job, Rank, Severity, Skip, Verdict, check, ranks_in_words
from doctor.facts import GpuFacts, MigDevice
from doctor.testing import Fails, Passes, healthy

SLICES = (MigDevice("MIG-aaaa", 0, 20 << 30, "MIG 2g.20gb"), MigDevice("MIG-bbbb", 1, 20 << 30, "MIG 2g.20gb"))


@check(
    id="GPU015",
    severity=Severity.WARNING,
    needs=(GpuFacts,),
    cases=lambda: (
        Passes("MIG off", healthy(hosts=2, per_host=2)),
        Passes("one process on a slice", healthy(per_host=1).gpu(0, mig=True, mig_devices=SLICES)),
        Passes(
            "MIG on a GPU that no rank uses",
            healthy(per_host=2, gpus=3).gpu(2, mig=True, mig_devices=SLICES).environ(CUDA_VISIBLE_DEVICES="0,1"),
        ),
        Fails(
            "two slices of one GPU",
            healthy(per_host=2, gpus=1)
            .gpu(0, mig=True, mig_devices=SLICES)
            .environ(ranks=(0,), CUDA_VISIBLE_DEVICES="MIG-aaaa")
            .environ(ranks=(1,), CUDA_VISIBLE_DEVICES="MIG-bbbb"),
            ranks=(0, 1),
        ),
        Fails(
            "MIG left on on one host",
            healthy(hosts=2, per_host=1).gpu(0, hosts=("node1",), mig=True, mig_devices=SLICES),
            ranks=(1,),
        ),
    ),
)
def mig_enabled(job: Job) -> Iterator[Verdict]:
    """Ask whether ranks that communicate run on whole GPUs, not on MIG slices.

    Why it hurts: all traffic of a slice goes through host memory, because slices have no peer access and no NVLink.
    NCCL rejects two slices of one GPU ("Duplicate GPU detected").
    Fix: Request GPUs without MIG from the scheduler, or turn MIG off with `sudo nvidia-smi -mig 0`.
    """
    if job.world_size == 1:
        yield Skip("one process: peer access is not needed")
        return
    devices = devices_of(job)
    for local in job.by_host():
        ranks = tuple(rank.number for rank in local.members if _is_sliced(rank, devices[rank]) and uses_nccl(rank))
        gpus = local.find(GpuFacts)
        if ranks and gpus:
            yield Finding(
                f"{ranks_in_words(ranks).capitalize()} "
                f"{'run on MIG slices' if len(ranks) > 1 else 'runs on a MIG slice'} of {local.name}",
                ranks=ranks,
                evidence={
                    "slices_by_gpu": {
                        str(gpu.index): [slice_.name or slice_.uuid for slice_ in gpu.mig_devices]
                        for gpu in gpus.gpus
                        if gpu.mig
                    }
                },
                effect=""
                if len(ranks) > 1
                else "All traffic of the slice goes through host memory, because it has no peer access and no NVLink.",
                fix="Request GPUs without MIG from the scheduler, or turn MIG off with `sudo nvidia-smi -i "
                f"{','.join(str(gpu.index) for gpu in gpus.gpus if gpu.mig)} -mig 0` on {local.name}.",
                explains=("GPU001", "GPU002"),
            )


def _is_sliced(rank: Rank, device: VisibleDevice | None) -> bool:
    if device:
        return device.slice is not None
    gpus = rank.find(GpuFacts)
    if gpus is None or on_processor(rank):
        return False
    seen = visible_to(rank)
    return seen is not None and seen.devices is None and bool(gpus.gpus) and all(gpu.mig for gpu in gpus.gpus)
