"""GPU012: a PCIe link runs below its maximum."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.analysis.visible_devices import hidden_of_gpus, is_data_centre, shares_by_host
from doctor.api import Finding, Job, Scope, Severity, Unknown, Verdict, check
from doctor.facts import Gpu, GpuFacts
from doctor.testing import Fails, Passes, healthy


@check(
    id="GPU012",
    severity=Severity.WARNING,
    scope=Scope.HOST,
    needs=(GpuFacts,),
    cases=lambda: (
        Passes("full generation and width", healthy(hosts=2, per_host=2)),
        Passes("an idle GPU lowers its generation", healthy(per_host=2).gpu(0, pcie_generation=1, utilization=0)),
        Passes(
            "a desktop board that splits its lanes, idle",
            healthy(per_host=2).gpu(0, pcie_width=8).gpu(1, pcie_width=8),
            silent=False,
        ),
        Passes(
            "desktop cards in slots of different width, idle",
            healthy(per_host=2)
            .gpu(0, name="NVIDIA GeForce RTX 4090")
            .gpu(1, name="NVIDIA GeForce RTX 4090", pcie_width=8),
            silent=False,
        ),
        Fails(
            "old generation under load",
            healthy(per_host=2).gpu(1, pcie_generation=1, utilization=97),
            ranks=(1,),
        ),
        Fails("half the lanes under load", healthy(per_host=2).gpu(0, pcie_width=8, utilization=80), ranks=(0,)),
        Fails(
            "fewer lanes than its neighbours, even idle",
            healthy(hosts=2, per_host=4).gpu(2, hosts=("node1",), pcie_width=4, pcie_generation=1),
            ranks=(6,),
        ),
    ),
)
def pcie_degraded(job: Job, *, loaded_percent: float = 10) -> Iterator[Verdict]:
    """Ask whether each GPU's PCIe link runs at the highest generation and width that the GPU and slot support.

    Why it hurts: copies between host and GPU, checkpoints and network traffic of this GPU are slower, and the other
    ranks wait for it.
    Fix: Reseat the GPU, and check its riser and the PCIe settings in the BIOS.
    """
    for local, found in shares_by_host(job):
        used = [share for share in found if share.ranks and not share.gpu.lost]
        wide = {share.gpu.name for share in used if _lacks(share.gpu.pcie_width, share.gpu.pcie_width_max) is False}
        if note := hidden_of_gpus(local, "pcie_width", "pcie_generation"):
            yield Unknown(note.reason, local.ranks, note.unhide)
        for share in used:
            # An idle GPU lowers its generation to save power, and some GPUs also lower the width. It is a fault only
            # under load, or if other GPUs of a server keep their width. Slots of desktop boards differ in width.
            gpu = share.gpu
            loaded = (gpu.utilization or 0) >= loaded_percent
            narrow = bool(_lacks(gpu.pcie_width, gpu.pcie_width_max))
            slow = loaded and bool(_lacks(gpu.pcie_generation, gpu.pcie_generation_max))
            certain = loaded or ((share.gpu.name in wide) and is_data_centre(gpu))
            if narrow or slow:
                yield Finding(
                    f"The PCIe link of GPU {gpu.index} of {local.name} "
                    + (f"runs at {_words(gpu)}" if slow else f"uses {gpu.pcie_width} of {gpu.pcie_width_max} lanes"),
                    ranks=share.ranks,
                    evidence={
                        "gpu": gpu.uuid,
                        "pci_bus_id": gpu.bus_id,
                        "generation": gpu.pcie_generation,
                        "generation_max": gpu.pcie_generation_max,
                        "width_lanes": gpu.pcie_width,
                        "width_max_lanes": gpu.pcie_width_max,
                        "utilization_percent": gpu.utilization,
                    },
                    fix=_fix(gpu, local.name, certain=certain),
                    severity=Severity.WARNING if certain else Severity.INFO,
                )


def _fix(gpu: Gpu, host: str, *, certain: bool) -> str:
    commands = f"nvidia-smi -i {gpu.index} -q | grep -A 12 'GPU Link Info'\nsudo dmesg -T | grep -i aer"
    if certain:
        return f"Reseat the GPU on {host}, check its riser, and verify the link under load with:\n{commands}"
    lanes = gpu.pcie_width_max
    return f"Check the link on {host} under load, and reseat the GPU if its slot has {lanes} lanes:\n{commands}"


def _lacks(now: int | None, best: int | None) -> bool | None:
    return None if now is None or best is None else now < best


def _words(gpu: Gpu) -> str:
    best = f"generation {gpu.pcie_generation_max} x{gpu.pcie_width_max}"
    return f"generation {gpu.pcie_generation} x{gpu.pcie_width} (maximum: {best})"
