"""GPU008: persistence mode is off."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.analysis.visible_devices import hidden_of_gpus, is_data_centre, shares_by_host
from doctor.api import Finding, Job, Scope, Severity, Unknown, Verdict, check, merge
from doctor.facts import GpuFacts
from doctor.testing import Fails, Passes, healthy


@check(
    id="GPU008",
    severity=Severity.INFO,
    scope=Scope.HOST,
    needs=(GpuFacts,),
    cases=lambda: (
        Passes("persistence on", healthy(hosts=2, per_host=2)),
        Passes(
            "a laptop",
            healthy(per_host=1).gpu(0, name="NVIDIA GeForce RTX 4060 Laptop GPU", persistence=False),
        ),
        Passes("a workstation", healthy(per_host=1).gpu(0, name="NVIDIA RTX A6000", persistence=False)),
        Fails(
            "off on a server",
            healthy(hosts=2, per_host=2).gpu(0, hosts=("node1",), persistence=False),
            ranks=(2,),
        ),
    ),
)
def persistence_off(job: Job) -> Iterator[Verdict]:
    """Ask whether persistence mode is enabled on data center GPUs.

    Why it hurts: each start of CUDA takes seconds per GPU, and power limits and error counters are reset when the last
    process on the GPU exits.
    Fix: Enable the persistence daemon with `sudo systemctl enable --now nvidia-persistenced`, or run `sudo nvidia-smi
    -pm 1` after each boot.
    """
    findings = []
    for local, found in shares_by_host(job):
        off = [share for share in found if share.ranks and share.gpu.persistence is False and is_data_centre(share.gpu)]
        if note := hidden_of_gpus(local, "persistence"):
            yield Unknown(note.reason, local.ranks, note.unhide)
        if off:
            gpus = f"{len(off)} GPUs" if len(off) > 1 else f"GPU {off[0].gpu.index}"
            finding = Finding(
                f"Persistence mode is off on {gpus} of {local.name}",
                ranks=tuple(sorted({rank for share in off for rank in share.ranks})),
                evidence={"gpus": [share.gpu.index for share in off], "model": off[0].gpu.name},
                fix=f"Enable the persistence daemon on {local.name} with `sudo systemctl enable --now "
                "nvidia-persistenced`, or run `sudo nvidia-smi -pm 1` there after each boot.",
            )
            findings.append(finding)
    yield from merge(findings)
