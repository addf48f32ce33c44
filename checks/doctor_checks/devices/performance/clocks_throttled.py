"""GPU011: a GPU is throttled."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from doctor.analysis.visible_devices import GpuSharers, hidden_of_gpus, shares_by_host
from doctor.api import Finding, Job, LocalRanks, Scope, Severity, Unknown, Verdict, check
from doctor.facts import Gpu, GpuFacts, TrainingFacts
from doctor.testing import Fails, Passes, healthy, running

HELD_BACK = {
    "hardware-slowdown": "hardware slowdown",
    "hardware-thermal": "hardware thermal slowdown",
    "software-thermal": "software thermal slowdown",
    "hardware-power-brake": "external power brake",
}
"""nvml.h nvmlClocksEventReason*: reasons that a healthy GPU never has, idle or busy."""

CAP = "software-power-cap"


@check(
    id="GPU011",
    severity=Severity.WARNING,
    scope=Scope.HOST,
    when="PR",
    needs=(GpuFacts,),
    cases=lambda: (
        Passes("no reason active", healthy(hosts=2, per_host=2)),
        Passes("idle", healthy(per_host=2).gpu(0, clock_reasons=("gpu-idle",), clock=345)),
        Passes("application clocks set by the site", healthy(per_host=2).gpu(0, clock_reasons=("application-clocks",))),
        Passes(
            "all GPUs at their power limit, as in any large run",
            healthy(per_host=2)
            .gpu(0, clock_reasons=("software-power-cap",), clock=1500)
            .gpu(1, clock_reasons=("software-power-cap",), clock=1510),
        ),
        Passes("one at its power limit, and as fast as the others", healthy(per_host=8).gpu(3, clock_reasons=(CAP,))),
        Fails(
            "too hot",
            healthy(hosts=2, per_host=2).gpu(
                1, hosts=("node0",), clock_reasons=("hardware-slowdown", "hardware-thermal"), clock=345, temperature=91
            ),
            ranks=(1,),
        ),
        Fails(
            "power brake", healthy(per_host=2).gpu(0, clock_reasons=("hardware-power-brake",), clock=990), ranks=(0,)
        ),
        Fails(
            "capped, and slower than the others",
            healthy(per_host=8).gpu(3, clock_reasons=(CAP,), clock=900, power_limit=350_000, power=349_000),
            ranks=(3,),
        ),
        Passes(
            "a hot GPU that no rank of a run uses", running(1, 2, gpus=4).gpu(3, clock_reasons=("hardware-thermal",))
        ),
        Passes(
            "the driver and a run count in opposite order, and neither GPU is hot",
            running(1, 2).alter(TrainingFacts, ranks=(0,), device_id="0000:11:00.0"),
        ),
        Fails(
            "a hot GPU in a run, which its rank calls by another number",
            running(1, 2, gpus=3)
            .alter(TrainingFacts, ranks=(1,), device="cuda:1", device_id="0000:12:00.0")
            .gpu(2, clock_reasons=("software-thermal",), clock=1100, temperature=88),
            ranks=(1,),
        ),
    ),
)
def clocks_throttled(job: Job, *, capped_share: float = 0.25, clock_share: float = 0.9) -> Iterator[Verdict]:
    """Ask whether a GPU is throttled because of heat, power or a hardware fault.

    Why it hurts: every collective waits for the slowest GPU, so one throttled GPU slows down the whole job.
    Fix: Exclude the host until its cooling and power supplies are checked (`nvidia-smi -q -d
    PERFORMANCE,TEMPERATURE,POWER`).
    """
    for local in job.by_host():
        if note := hidden_of_gpus(local, "clock_reasons"):
            yield Unknown(note.reason, local.ranks, note.unhide)
    used = [(local, share) for local, found in shares_by_host(job) for share in found if share.ranks]
    # GPUs that the power cap slows down while most GPUs of the same model run faster under the same load. Clocks of
    # another job cannot serve as a baseline.
    gpus = [share.gpu for _, share in used]
    models: dict[str, list[Gpu]] = {}
    for gpu in gpus:
        models.setdefault(gpu.name, []).append(gpu)
    slow: set[int] = set()
    for peers in models.values():
        clocks = [gpu.clock for gpu in peers if gpu.clock]
        capped = [gpu for gpu in peers if CAP in (gpu.clock_reasons or ())]
        if clocks and 0 < len(capped) <= capped_share * len(peers):
            usual = median(clocks)
            slow.update(id(gpu) for gpu in capped if gpu.clock and gpu.clock < clock_share * usual)
    for local, share in used:
        reasons = [HELD_BACK[name] for name in share.gpu.clock_reasons or () if name in HELD_BACK]
        if reasons:
            yield _finding(local, share, ", ".join(reasons))
        elif id(share.gpu) in slow:
            yield _finding(local, share, "power limit reached, clock below its peers")


def _finding(local: LocalRanks, share: GpuSharers, reasons: str) -> Finding:
    gpu = share.gpu
    clock = (
        f" to {gpu.clock} of {gpu.clock_max} MHz" if gpu.clock and gpu.clock_max and gpu.clock < gpu.clock_max else ""
    )
    return Finding(
        f"GPU {gpu.index} of {local.name} is throttled{clock}: {reasons}",
        ranks=share.ranks,
        evidence={
            "gpu": gpu.uuid,
            "clock_reasons": [HELD_BACK.get(name, name.replace("-", " ")) for name in gpu.clock_reasons or ()],
            "clock_mhz": gpu.clock,
            "clock_max_mhz": gpu.clock_max,
            "temperature_celsius": gpu.temperature,
            "power_milliwatts": gpu.power,
            "power_limit_milliwatts": gpu.power_limit,
        },
        fix=f"Exclude {local.name} until its {_part(reasons)} (`nvidia-smi -i {gpu.index} -q -d "
        "PERFORMANCE,TEMPERATURE,POWER` shows the readings).",
        explains=("RUN003",),
    )


def _part(reasons: str) -> str:
    if "thermal" in reasons:
        return "cooling is checked"
    return "power supplies are checked" if "brake" in reasons else "power supplies and power limit are checked"
