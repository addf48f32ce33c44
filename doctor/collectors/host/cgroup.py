"""What the control groups, version 1 and 2, grant this process: processors, memory, number of processes.

Sources: the kernel's Documentation/admin-guide/cgroup-v1 and cgroup-v2.rst; proc(5) for mountinfo and cgroup.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from doctor.collectors.base import Machine, parse_int, read_int, read_rows, read_text
from doctor.collectors.storage.mounts import Mount, is_below, outside_view, read_mounts
from doctor.core.facts import HiddenField

UNLIMITED_BYTES = 1 << 60
"""Version 1 says "no limit" with a page-rounded LONG_MAX; no machine has an exbibyte."""


@dataclass(frozen=True)
class CgroupLimits:
    """The tightest limit of each kind between the process's group and the visible root, and the use of that group.

    ``cpu_periods`` and ``cpu_throttled`` are those of the group that sets the quota, or of the process's own group
    without one. ``memory_used`` leaves out the page cache that can be dropped (inactive_file), as the kubelet does.
    """

    cpu_quota: float | None = None
    cpu_periods: int | None = None
    cpu_throttled: int | None = None
    memory_limit: int | None = None
    memory_used: int | None = None
    pids_limit: int | None = None
    pids_used: int | None = None
    hidden: tuple[HiddenField, ...] = ()


@dataclass(frozen=True)
class Grant:
    """One controller's limit in one group."""

    limit: float
    folder: Path


def read_cgroup(surroundings: Machine) -> CgroupLimits:
    """The limits of this process. What cannot be seen because no group is mounted here is in ``hidden``."""
    cpu, cpu_folders = _tightest(surroundings, "cpu", {1: _v1_quota, 2: _v2_quota})
    memory, memory_folders = _tightest(surroundings, "memory", {1: _v1_memory, 2: _v2_memory})
    pids, pids_folders = _tightest(surroundings, "pids", {1: _pids, 2: _pids})
    periods, throttled = _throttling(cpu.folder if cpu else next(iter(cpu_folders), None))
    return CgroupLimits(
        cpu_quota=cpu.limit if cpu else None,
        cpu_periods=periods,
        cpu_throttled=throttled,
        memory_limit=int(memory.limit) if memory else None,
        memory_used=_memory_used(memory.folder) if memory else None,
        pids_limit=int(pids.limit) if pids else None,
        pids_used=read_int(pids.folder / "pids.current") if pids else None,
        hidden=tuple(
            HiddenField(field, reason, "mount the control groups read-only at /sys/fs/cgroup in the container")
            for field, folders in (
                ("cpu_quota", cpu_folders),
                ("memory_limit", memory_folders),
                ("pids_limit", pids_folders),
            )
            if not folders
            for reason in ["the control group of this process is not visible here"]
        ),
    )


def _tightest(
    surroundings: Machine, controller: str, readers: dict[int, Callable[[Path], float | None]]
) -> tuple[Grant | None, list[Path]]:
    """The smallest limit of ``controller``, and the folders that were looked at, the process's own first."""
    version, folders = _folders(surroundings, controller)
    grants = [Grant(limit, folder) for folder in folders if (limit := readers[version](folder)) is not None]
    return min(grants, key=lambda grant: grant.limit, default=None), folders


def _folders(surroundings: Machine, controller: str) -> tuple[int, list[Path]]:
    """The version that holds ``controller`` and its folders, from this process's group up to the mount's root."""
    groups = list(_own_groups(surroundings))
    mounts = read_mounts(surroundings)
    for version, names in ((1, controller), (2, "")):
        path = next((path for controllers, path in groups if names in controllers), None)
        mount = _mount(mounts, version, controller)
        if path is not None and mount is not None:
            found = [folder for folder in _upwards(surroundings, mount, path) if folder.is_dir()]
            if found:
                return version, found
    return 2, []


def _own_groups(surroundings: Machine) -> Iterator[tuple[list[str], str]]:
    """The controllers and the path of every line of /proc/self/cgroup; version 2 has one empty name."""
    for line in (read_text(surroundings.proc / "self" / "cgroup") or "").splitlines():
        _, first, rest = line.partition(":")
        controllers, second, path = rest.partition(":")
        if first and second:
            yield controllers.split(","), path


def _mount(mounts: tuple[Mount, ...], version: int, controller: str) -> Mount | None:
    if version == 2:
        return next((mount for mount in mounts if mount.kind == "cgroup2"), None)
    return next((mount for mount in mounts if mount.kind == "cgroup" and controller in mount.options.split(",")), None)


def _upwards(surroundings: Machine, mount: Mount, path: str) -> Iterator[Path]:
    """Folders from the process's group up to the mount's root.

    Where the path does not lie under what is mounted (a container that sees only its own group, or ``/../..`` from
    outside a namespace), the mount's root is this process's group or a parent of it.
    """
    top = outside_view(surroundings, mount.point)
    inside = path[len(mount.root.rstrip("/")) :].strip("/") if is_below(path, mount.root) and ".." not in path else ""
    folder = top / inside
    yield folder
    while folder != top:
        folder = folder.parent
        yield folder


def _v2_quota(folder: Path) -> float | None:
    quota, _, period = (read_text(folder / "cpu.max") or "").partition(" ")
    return _cpus(parse_int(quota), parse_int(period))


def _v1_quota(folder: Path) -> float | None:
    return _cpus(read_int(folder / "cpu.cfs_quota_us"), read_int(folder / "cpu.cfs_period_us"))


def _cpus(quota: int | None, period: int | None) -> float | None:
    return quota / period if quota is not None and period and quota > 0 and period > 0 else None


def _throttling(folder: Path | None) -> tuple[int | None, int | None]:
    counts = _table(folder / "cpu.stat") if folder else {}
    return counts.get("nr_periods"), counts.get("nr_throttled")


def _v2_memory(folder: Path) -> float | None:
    return read_int(folder / "memory.max")


def _v1_memory(folder: Path) -> float | None:
    limit = read_int(folder / "memory.limit_in_bytes")
    return limit if limit is not None and limit < UNLIMITED_BYTES else None


def _memory_used(folder: Path) -> int | None:
    used = read_int(folder / "memory.current")
    if used is None:
        used = read_int(folder / "memory.usage_in_bytes")
    if used is None:
        return None
    counts = _table(folder / "memory.stat")
    return max(0, used - counts.get("total_inactive_file", counts.get("inactive_file", 0)))


def _pids(folder: Path) -> float | None:
    return read_int(folder / "pids.max")


def _table(path: Path) -> dict[str, int]:
    """Lines of a name and a number."""
    return {row[0]: value for row in read_rows(path) if len(row) == 2 and (value := parse_int(row[1])) is not None}
