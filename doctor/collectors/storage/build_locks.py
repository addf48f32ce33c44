"""Lock files in the caches of compiled extensions, kernels and models, and whether a process holds them."""

from __future__ import annotations

from collections.abc import Iterable

from doctor.collectors.base import Machine, read_rows
from doctor.collectors.host.processes import INITIAL_PID_NAMESPACE, files_held_open, is_initial
from doctor.collectors.storage.directory_scan import DirectoryRecord
from doctor.collectors.storage.mounts import Mount
from doctor.core.facts import BuildLock

BATON = "torch-extension"
"""The cache whose lock is the existence of a file: waiters poll until it is removed (torch/utils/file_baton.py). Other
caches use advisory locks, which end with their holder; the files that remain mean nothing."""


def read_locks(machine: Machine, kind: str, mount: Mount | None, found: Iterable[DirectoryRecord]) -> list[BuildLock]:
    """Return the locks of one cache. Of torch extensions only ``lock`` itself blocks others."""
    return [
        BuildLock(
            path=str(record["path"]),
            kind=kind,
            age=round(float(record["age"]), 1),
            held=_is_held(machine, mount, record),
            blocking=kind == BATON and str(record["path"]).endswith("/lock"),
        )
        for record in found
    ]


def _is_held(machine: Machine, mount: Mount | None, record: DirectoryRecord) -> bool | None:
    """Return whether a process has it open or locked; ``None`` if a possible holder is not visible.

    Other hosts (a shared file system), other containers (a cache that is mounted from outside) and processes of other
    users are not.
    """
    if _is_locked(machine, record):
        return True
    held, complete = files_held_open(machine.proc, {int(record["user"])})
    if str(record["path"]) in held:
        return True
    outside = mount is None or mount.shared is not False
    apart = not is_initial(machine.proc, "pid", INITIAL_PID_NAMESPACE) and mount is not None and mount.point != "/"
    return None if outside or apart or not complete else False


def _is_locked(machine: Machine, record: DirectoryRecord) -> bool:
    """Return whether /proc/locks lists the file, by its device and inode (proc(5))."""
    device, inode = int(record["device"]), int(record["inode"])
    # Device numbers as the kernel prints them: major and minor in hexadecimal, see fs/locks.c.
    major, minor = device >> 8 & 0xFFF, device & 0xFF | device >> 12 & 0xFFF00
    wanted = f"{major:02x}:{minor:02x}:{inode}"
    return any(wanted in row for row in read_rows(machine.proc / "locks", 4 << 20) if "->" not in row)
