"""What the utilization and power of a rank's GPU show: it computes, it waits in a kernel, or it is idle.

The kernel of a collective of NCCL polls for its peers, so a GPU that waits for other ranks is 100 % busy and needs
little power: about 70 W (https://github.com/NVIDIA/nccl/issues/968), at a low temperature
(https://github.com/cupy/cupy/issues/3557); clusters detect stuck jobs by it
(https://github.com/nebius/soperator/issues/796). A memory-bound or small computation may need as little, so this alone
is evidence and no reason for an alarm.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from doctor.core.facts import AttachedGpu, AttachedProcess, GpuActivity
from doctor.core.facts.telemetry import GpuKind

BUSY, IDLE = 95, 2
"""Utilization in percent from which a GPU is busy all the time, and up to which it is idle."""
WAITS, COMPUTES = 0.3, 0.5
"""Share of the power limit up to which a busy GPU may only poll, and from which it computes."""
LEAST_LIMIT = 150_000
"""Power limit in milliwatts below which nothing follows from power: the share that polling needs is larger then."""
LEAST_SAMPLES = 2


def gpu_activity(process: AttachedProcess, gpus: Iterable[AttachedGpu]) -> GpuActivity | None:
    """The activity of the GPU that a rank uses; ``None`` if that GPU is unknown or was not read."""
    gpu = next((gpu for gpu in gpus if gpu.index == process.gpu), None)
    if gpu is None or not gpu.samples:
        return None
    rates = [one.utilization for one in gpu.samples if one.utilization is not None]
    powers = [one.power for one in gpu.samples if one.power is not None]
    return GpuActivity(
        gpu.index,
        kind=_kind(gpu, rates, powers) if len(gpu.samples) >= LEAST_SAMPLES else "",
        busy=round(sum(rates) / len(rates)) if rates else None,
        power=round(sum(powers) / len(powers) / 1000) if powers else None,
        power_limit=round(gpu.power_limit / 1000) if gpu.power_limit else None,
        memory=gpu.samples[-1].memory,
        assumed_by=process.gpu_from if gpu.processes is None else "",
        xids=gpu.xids,
    )


def _kind(gpu: AttachedGpu, rates: Sequence[int], powers: Sequence[int]) -> GpuKind:
    """The kind that all samples show; empty if they differ, or if several processes share the GPU."""
    if len(rates) < len(gpu.samples) or len(gpu.processes or ()) > 1:
        return ""
    if max(rates) <= IDLE:
        return "idle"
    if (gpu.power_limit or 0) < LEAST_LIMIT or len(powers) < len(gpu.samples):
        return ""
    shares = [power / (gpu.power_limit or 1) for power in powers]
    if min(shares) >= COMPUTES:
        return "computes"
    return "waits" if min(rates) >= BUSY and max(shares) <= WAITS else ""


_KINDS = {"waits": ": it waits in a kernel, as in a collective", "computes": ": it computes", "idle": ": it is idle"}
_OF_SEVERAL = {"waits": "waits in a kernel, as in a collective", "computes": "computes", "idle": "is idle"}


def activity_text(activity: GpuActivity) -> str:
    """Return ``GPU 3: 100 % busy at 85 W of 700 W: it waits in a kernel, as in a collective``."""
    values = _values([activity])
    number = f"GPU {activity.index}{f' (by {activity.assumed_by})' if activity.assumed_by else ''}"
    xids = f"; in the kernel log: Xid {', '.join(map(str, activity.xids))}" if activity.xids else ""
    return f"{number}{f': {values}' if values else ''}{_KINDS.get(activity.kind, '')}{xids}"


def activities_text(activities: Sequence[GpuActivity]) -> str:
    """Return ``3 GPUs: 100 % busy at 85-92 W of 700 W: each waits in a kernel, as in a collective``."""
    parts = []
    for kind in dict.fromkeys(one.kind for one in activities):
        same = [one for one in activities if one.kind == kind]
        if len(same) == 1:
            parts.append(activity_text(same[0]))
        else:
            does = f": each {_OF_SEVERAL[kind]}" if kind else ""
            parts.append(f"{len(same)} GPUs: {_values(same)}{does}")
    return "; ".join(parts)


def _values(activities: Sequence[GpuActivity]) -> str:
    busy, power, limit = (
        _range([value for value in values if value is not None])
        for values in zip(*((one.busy, one.power, one.power_limit) for one in activities), strict=True)
    )
    share = f"{busy} % busy" if busy else ""
    drawn = f"at {power} W{f' of {limit} W' if limit else ''}" if power else ""
    return f"{share} {drawn}".strip()


def _range(values: Sequence[int]) -> str:
    if not values:
        return ""
    return f"{min(values)}" if min(values) == max(values) else f"{min(values)}-{max(values)}"
