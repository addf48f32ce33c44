"""Axes of the groups of a job: as requested, else from its launcher, else from its hosts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from doctor.probes.base import ProbeParticipant
from doctor.probes.collectives.group_steps import WORLD
from doctor.probes.collectives.mesh import Axis, groups_along, ranks_of

BUCKET = 25 << 20
"""Bytes: DistributedDataParallel reduces gradients in buckets of 25 MiB (its bucket_cap_mb)."""
ACTIVATION = 8 << 20
"""Bytes: 2,048 tokens of a hidden size of 2,048 in bfloat16, which tensor parallelism reduces in each layer."""
FLAG = 4096
"""Bytes: on a mesh all ranks together share a loss, a norm or a flag."""
DATA_PARALLEL = ("dp", "ddp", "fsdp", "hsdp", "data", "replicate", "shard", "hosts", "local", WORLD)
"""Prefixes of the names of axes along which gradients and parameters travel."""

_ACCELERATE = "PARALLELISM_CONFIG_"
_ACCELERATE_ORDER = ("dp_replicate", "dp_shard", "cp", "sp", "tp")
"""Outermost first (accelerate/parallelism_config.py ``_get_mesh``); each is a variable of that prefix and _SIZE."""


class AxisGroups(NamedTuple):
    """An axis: its ``groups`` of ranks, and the ``bytes`` of the messages along it."""

    axis: str
    bytes: int
    groups: tuple[tuple[int, ...], ...]

    @property
    def words(self) -> str:
        """Number and size of the groups, and the size of their messages."""
        largest = max(map(len, self.groups), default=0)
        size = f"{self.bytes / (1 << 20):.3g} MiB" if self.bytes >= 1 << 20 else f"{self.bytes / (1 << 10):.3g} KiB"
        return f"({len(self.groups)} of {largest}, messages up to {size})"


def launcher_mesh(environ: Mapping[str, str], world: int) -> tuple[Axis, ...]:
    """Return the mesh in the variables of a launcher, for ``world`` ranks; empty without any.

    ``accelerate launch`` sets ACCELERATE_USE_PARALLELISM_CONFIG with PARALLELISM_CONFIG_*_SIZE, or
    ACCELERATE_USE_MEGATRON_LM with MEGATRON_LM_TP_DEGREE and _PP_DEGREE (accelerate/utils/launch.py). Other frameworks
    (Megatron-LM, torchtitan, NeMo) use arguments of the script, which are not read.
    """
    sizes: dict[str, int] = {}
    if environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "").lower() == "true":
        sizes = {name: _size(environ, f"{_ACCELERATE}{name.upper()}_SIZE") for name in _ACCELERATE_ORDER}
        if sizes["sp"] > 1 and environ.get(f"{_ACCELERATE}SP_BACKEND", "deepspeed") == "deepspeed":
            return ()  # DeepSpeed makes these groups itself, and the sizes need not make up the job
    elif environ.get("ACCELERATE_USE_MEGATRON_LM", "").lower() == "true":
        tensor, pipeline = _size(environ, "MEGATRON_LM_TP_DEGREE"), _size(environ, "MEGATRON_LM_PP_DEGREE")
        # The order tp-cp-ep-dp-pp of initialize_model_parallel (megatron/core/parallel_state.py), the fastest first.
        sizes = {"pp": pipeline, "dp": max(1, world // (tensor * pipeline)), "tp": tensor}
    return tuple(Axis(name, size) for name, size in sizes.items() if size > 1)


def _size(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "").strip()
    return max(1, int(text)) if text.isdecimal() and len(text) < 8 else 1


def misfit(axes: tuple[Axis, ...], world: int) -> str:
    """Return why a mesh cannot be that of a job of ``world`` ranks; empty if it can."""
    if not axes or ranks_of(axes) == world:
        return ""
    mesh = ",".join(f"{axis.name}={axis.size}" for axis in axes)
    return f"the mesh {mesh} has {ranks_of(axes)} ranks, the job {world}"


def axis_groups(axes: tuple[Axis, ...], processes: Sequence[ProbeParticipant]) -> tuple[AxisGroups, ...]:
    """Return the axes to probe: those of the mesh, else hosts and local.

    The axis of all ranks comes first, unless another one contains them all. Groups are reduced to the ranks that take
    part, even to one: all ranks run every step of an axis.
    """
    there = {process.number for process in processes}
    kept = []
    for course in _by_mesh(axes) if axes else _by_hosts(processes):
        cut = (tuple(rank for rank in group if rank in there) for group in course.groups)
        groups = tuple(group for group in cut if group)
        if any(len(group) > 1 for group in groups):
            kept.append(course._replace(groups=groups))
    everybody = tuple(sorted(there))
    if any(course.groups == (everybody,) for course in kept):
        return tuple(kept)
    return (AxisGroups(WORLD, FLAG if axes else BUCKET, (everybody,)), *kept)


def _by_mesh(axes: tuple[Axis, ...]) -> list[AxisGroups]:
    return [
        AxisGroups(
            axis.name,
            axis.bytes or (BUCKET if axis.name.lower().startswith(DATA_PARALLEL) else ACTIVATION),
            groups_along(axes, place),
        )
        for place, axis in enumerate(axes)
    ]


def _by_hosts(processes: Sequence[ProbeParticipant]) -> list[AxisGroups]:
    """Return the ranks of each host, and those in the same place of each host, if all hosts have equally many."""
    by_host: dict[int, list[int]] = {}
    for process in sorted(processes, key=lambda process: process.number):
        by_host.setdefault(process.host, []).append(process.number)
    local = tuple(tuple(ranks) for ranks in by_host.values())
    if len({len(ranks) for ranks in local}) != 1 or len(local) == 1 or len(local[0]) == 1:
        return []
    return [AxisGroups("hosts", BUCKET, tuple(zip(*local, strict=True))), AxisGroups("local", BUCKET, local)]
