"""Limits of the control groups, version 1 and 2, on this process: processors, memory, number of processes.

Sources: Documentation/admin-guide/cgroup-v1 and cgroup-v2.rst of the kernel; proc(5) for mountinfo and cgroup.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from doctor.collectors.base import Machine, first_known, parse_int, read_int, read_rows, read_text
from doctor.collectors.storage.mounts import Mount, is_below, outside_view, read_mounts
from doctor.core.facts import HiddenField

Controller = Literal["cpu", "memory", "pids"]
_FIELDS = {"cpu": "cpu_quota", "memory": "memory_limit", "pids": "pids_limit"}

_UNHIDE = "mount the control groups read-only at /sys/fs/cgroup in the container"
UNLIMITED_BYTES = 1 << 60
"""Version 1 reports "no limit" as a page-rounded LONG_MAX; no machine has an exbibyte."""


class CgroupLimits(msgspec.Struct, frozen=True):
    """The lowest limit of each kind between the group of the process and the visible root, and the use of that group.

    ``cpu_periods``, ``cpu_throttled`` and ``cpu_throttled_seconds`` are those of the group with the quota, or of the
    own group without one.
    ``memory_used`` excludes page cache that can be dropped (inactive_file), as the kubelet does.
    """

    cpu_quota: float | None = None
    cpu_periods: int | None = None
    cpu_throttled: int | None = None
    cpu_throttled_seconds: float | None = None
    memory_limit: int | None = None
    memory_used: int | None = None
    pids_limit: int | None = None
    pids_used: int | None = None
    hidden: tuple[HiddenField, ...] = ()


def read_cgroup(machine: Machine, controllers: Iterable[Controller] = ("cpu", "memory", "pids")) -> CgroupLimits:
    """Return the limits of this process by ``controllers``; those of groups that are not mounted here are in
    ``hidden``."""
    return CgroupReader(machine, controllers).read()


class CgroupReader:
    """Reads the limits of this process again and again, from the folders found the first time unless the process has
    moved to another group since: the mounts of a host are many."""

    def __init__(self, machine: Machine, controllers: Iterable[Controller] = ("cpu", "memory", "pids")) -> None:
        self._machine = machine
        self._controllers = tuple(controllers)
        self._groups: str | None = None
        self._folders: dict[Controller, tuple[int, list[Path]]] = {}

    def read(self) -> CgroupLimits:
        """Return the limits and uses now; see :func:`read_cgroup`."""
        text = read_text(self._machine.proc / "self" / "cgroup") or ""
        if text != self._groups:
            groups, mounts = list(_own_groups(text)), read_mounts(self._machine)
            self._folders = {one: _folders(self._machine, one, groups, mounts) for one in self._controllers}
            self._groups = text
        return _limits({one: _tightest(found, one) for one, found in self._folders.items()})


def _limits(found: dict[Controller, tuple[float | None, Path | None]]) -> CgroupLimits:
    cpu, cpu_folder = found.get("cpu", (None, None))
    memory, memory_folder = found.get("memory", (None, None))
    pids, pids_folder = found.get("pids", (None, None))
    counts = _table(cpu_folder / "cpu.stat") if cpu_folder else {}
    return CgroupLimits(
        cpu_quota=cpu,
        cpu_periods=counts.get("nr_periods"),
        cpu_throttled=counts.get("nr_throttled"),
        cpu_throttled_seconds=_throttled_seconds(counts),
        memory_limit=None if memory is None else int(memory),
        memory_used=_memory_used(memory_folder) if memory_folder and memory is not None else None,
        pids_limit=None if pids is None else int(pids),
        pids_used=read_int(pids_folder / "pids.current") if pids_folder and pids is not None else None,
        hidden=tuple(
            HiddenField(_FIELDS[one], "the control group of this process is not visible here", _UNHIDE)
            for one, (_, folder) in found.items()
            if folder is None
        ),
    )


def _tightest(found: tuple[int, list[Path]], controller: Controller) -> tuple[float | None, Path | None]:
    """Return the lowest limit of ``controller`` and its folder; without a limit, the folder of the process."""
    version, folders = found
    limits = [(limit, folder) for folder in folders if (limit := _limit(folder, controller, version)) is not None]
    return min(limits, key=lambda entry: entry[0], default=(None, next(iter(folders), None)))


def _folders(
    machine: Machine, controller: Controller, groups: Sequence[tuple[list[str], str]], mounts: Sequence[Mount]
) -> tuple[int, list[Path]]:
    """Return the version that has ``controller``, and the folders from the own group up to the mounted root."""
    for version, kind, name in ((1, "cgroup", controller), (2, "cgroup2", "")):
        path = next((path for controllers, path in groups if name in controllers), None)
        fitting = (one for one in mounts if one.kind == kind and (not name or name in one.options.split(",")))
        mount = next(fitting, None)
        if path is not None and mount is not None:
            found = [folder for folder in _upwards(machine, mount, path) if folder.is_dir()]
            if found:
                return version, found
    return 2, []


def _own_groups(text: str) -> Iterator[tuple[list[str], str]]:
    """Return controllers and path of every line of /proc/self/cgroup; version 2 has one empty name."""
    for line in text.splitlines():
        _, first, rest = line.partition(":")
        controllers, second, path = rest.partition(":")
        if first and second:
            yield controllers.split(","), path


def _upwards(machine: Machine, mount: Mount, path: str) -> Iterator[Path]:
    """Return folders from the group of the process up to the mounted root.

    If the path is not below what is mounted (a container that sees only its own group, or ``/../..`` from outside a
    namespace), the mounted root is the group of this process or a parent of it.
    """
    top = outside_view(machine, mount.point)
    inside = path[len(mount.root.rstrip("/")) :].strip("/") if is_below(path, mount.root) and ".." not in path else ""
    folder = top / inside
    yield folder
    while folder != top:
        folder = folder.parent
        yield folder


def _limit(folder: Path, controller: Controller, version: int) -> float | None:
    """Return the limit of one group: processors, bytes or processes."""
    if controller == "pids":
        return read_int(folder / "pids.max")
    if controller == "memory":
        limit = read_int(folder / ("memory.max" if version == 2 else "memory.limit_in_bytes"))
        return limit if limit is not None and limit < UNLIMITED_BYTES else None
    if version == 2:
        first, _, second = (read_text(folder / "cpu.max") or "").partition(" ")
        quota, period = parse_int(first), parse_int(second)
    else:
        quota, period = read_int(folder / "cpu.cfs_quota_us"), read_int(folder / "cpu.cfs_period_us")
    return quota / period if quota is not None and period and quota > 0 and period > 0 else None


def _throttled_seconds(counts: dict[str, int]) -> float | None:
    """Return the time that the quota stopped a group: microseconds in version 2, nanoseconds in version 1."""
    if "throttled_usec" in counts:
        return counts["throttled_usec"] / 1e6
    return counts["throttled_time"] / 1e9 if "throttled_time" in counts else None


def _memory_used(folder: Path) -> int | None:
    used = first_known(read_int(folder / "memory.current"), read_int(folder / "memory.usage_in_bytes"))
    if used is None:
        return None
    counts = _table(folder / "memory.stat")
    return max(0, used - counts.get("total_inactive_file", counts.get("inactive_file", 0)))


def _table(path: Path) -> dict[str, int]:
    return {row[0]: value for row in read_rows(path) if len(row) == 2 and (value := parse_int(row[1])) is not None}
