"""Shared memory: its size, and segments left by earlier jobs."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import msgspec

from doctor.collectors.base import Machine
from doctor.collectors.host.processes import (
    INITIAL_IPC_NAMESPACE,
    INITIAL_PID_NAMESPACE,
    files_held_open,
    is_initial,
)
from doctor.collectors.storage.mounts import mount_of, read_mounts
from doctor.core.facts import Filesystem, HiddenField

PREFIX = "nccl-"
"""NCCL names its segments nccl-XXXXXX (src/misc/shmutils.cc)."""


class SharedMemory(msgspec.Struct, frozen=True):
    """Sizes in bytes. ``left_files``: segments that no process holds; ``None`` if holders may be invisible."""

    filesystem: Filesystem | None
    left_files: int | None
    left_bytes: int | None
    hidden: tuple[HiddenField, ...] = ()


class SharedMemoryFile(msgspec.Struct, frozen=True):
    """A segment of NCCL in shared memory."""

    path: str
    size: int
    user: int


def read_shared_memory(machine: Machine) -> SharedMemory:
    """Return the state of /dev/shm."""
    folder = machine.dev / "shm"
    try:
        sizes = os.statvfs(folder)
        found = [_segment(path) for path in folder.iterdir() if path.name.startswith(PREFIX)]
        segments = [segment for segment in found if segment is not None]
    except OSError as error:
        note = HiddenField("shm", f"{folder}: {error.strerror}", "mount a tmpfs at /dev/shm")
        return SharedMemory(None, None, None, (note,))
    mount = mount_of(str(folder), read_mounts(machine))
    filesystem = Filesystem(
        path=str(folder),
        total=sizes.f_blocks * sizes.f_frsize,
        free=sizes.f_bavail * sizes.f_frsize,
        kind=mount.kind if mount else None,
    )
    left = left_over(machine, segments)
    if left is None:
        reason = f"{len(segments)} NCCL segments in {folder} may belong to processes that cannot be seen from here"
        note = HiddenField("nccl_shm_files", reason, f"on the host, as root: fuser -v {folder}/{PREFIX}*")
        return SharedMemory(filesystem, None, None, (note,))
    return SharedMemory(filesystem, len(left), sum(segment.size for segment in left))


def _segment(path: Path) -> SharedMemoryFile | None:
    """Return a regular file as a segment; ``None`` for others, and for one that was removed meanwhile."""
    try:
        state = path.lstat()
    except FileNotFoundError:
        return None
    # Blocks, not length: a segment takes what has been written or reserved (fallocate).
    return SharedMemoryFile(str(path), state.st_blocks * 512, state.st_uid) if stat.S_ISREG(state.st_mode) else None


def left_over(machine: Machine, segments: list[SharedMemoryFile]) -> list[SharedMemoryFile] | None:
    """Return the segments that no process has open or mapped; ``None`` if a possible holder is not visible.

    Processes of other users are not, nor those outside a container that shares only the IPC namespace of the host.
    """
    if not segments:
        return []
    proc = machine.proc
    if is_initial(proc, "ipc", INITIAL_IPC_NAMESPACE) and not is_initial(proc, "pid", INITIAL_PID_NAMESPACE):
        return None
    # Segments are made readable by their owner alone (mode 0600), so only the owner and root can hold them.
    held, complete = files_held_open(proc, {segment.user for segment in segments})
    return [segment for segment in segments if segment.path not in held] if complete else None
