"""Mounted file systems: the one of a path, and whether it can block or is shared with other hosts."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path, PurePosixPath

import msgspec

from doctor.collectors.base import Machine, link_target, read_text
from doctor.core.text import lazy_compile

_LOCAL = """
aufs bcachefs bpf btrfs cgroup cgroup2 configfs debugfs devpts devtmpfs efivarfs erofs exfat ext2 ext3 ext4 f2fs
hugetlbfs iso9660 jfs mqueue ntfs3 overlay proc pstore ramfs reiserfs rootfs securityfs squashfs sysfs tmpfs tracefs
vfat xfs zfs
"""
LOCAL = frozenset(_LOCAL.split())
"""File systems that answer without another machine."""

_NETWORK = """
9p afs beegfs ceph cifs coda fhgfs glusterfs gpfs lustre mmfs ncpfs nfs nfs4 orangefs panfs pvfs2 smb3 smbfs vastnfs
virtiofs wekafs
"""
NETWORK = frozenset(_NETWORK.split())
"""File systems that several hosts can mount at once."""

NETWORK_FUSE = ("sshfs", "s3fs", "gcsfuse", "juicefs", "glusterfs", "ceph", "rclone", "goofys", "blobfuse", "mount-s3")
"""Helpers of network file systems in user space, as in the kind after ``fuse.``."""

_SYMLINKS = 40
"""Links followed in one path before it counts as a loop (MAXSYMLINKS of Linux)."""


_PROTOCOL = lazy_compile(r"(::|://)")
_THIS_HOST = ("file", "local")
"""Names of the file system of this host in fsspec (fsspec/implementations/local.py)."""


class Mount(msgspec.Struct, frozen=True):
    """One line of mountinfo: ``root`` is the part of the file system that is mounted at ``point``."""

    point: str
    kind: str
    root: str = "/"
    options: str = ""
    source: str = ""

    @property
    def is_local(self) -> bool:
        """Whether it answers without another machine or a process in user space."""
        return self.kind in LOCAL

    @property
    def shared(self) -> bool | None:
        """Whether other hosts can see the same files; ``None`` if the kind does not show it."""
        if self.kind in NETWORK or any(helper in self.kind for helper in NETWORK_FUSE):
            return True
        return False if self.kind in LOCAL else None


def read_mounts(machine: Machine) -> tuple[Mount, ...]:
    """Return all mounts of this process in the order of the kernel: later ones cover earlier ones. See proc(5)."""
    return _parsed(read_text(machine.proc / "self" / "mountinfo", 16 << 20) or "")


@lru_cache(maxsize=1)
def _parsed(text: str) -> tuple[Mount, ...]:
    """The mounts of one text, which is read a dozen times in the first seconds of a run and seldom differs."""
    # By a list: a tuple that grows leaves one more of its final length among the interpreter's spare ones each time.
    return tuple([mount for line in text.splitlines() if (mount := _parse(line)) is not None])


def _parse(line: str) -> Mount | None:
    before, dash, after = line.partition(" - ")
    left, right = before.split(), after.split()
    if not dash or len(left) < 6 or len(right) < 2:
        return None
    options = right[2] if len(right) > 2 else ""
    return Mount(_unescape(left[4]), right[0], _unescape(left[3]), options, _unescape(right[1]))


def _unescape(text: str) -> str:
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, character)
    return text


def mount_of(path: str, mounts: tuple[Mount, ...]) -> Mount | None:
    """Return the mount of an absolute ``path`` without symbolic links: the deepest, of equals the last."""
    found: Mount | None = None
    for mount in mounts:
        if is_below(path, mount.point) and (found is None or len(mount.point) >= len(found.point)):
            found = mount
    return found


def is_below(path: str, folder: str) -> bool:
    """Return whether ``path`` is ``folder`` or in it, by spelling alone."""
    return folder == "/" or path == folder or path.startswith(folder.rstrip("/") + "/")


def local_path(url: str) -> str | None:
    """Return the path of ``url`` on this host; ``None`` for another file system (fsspec/utils.py, get_protocol)."""
    protocol, *rest = _PROTOCOL.split(url, maxsplit=1)
    if not rest:
        return url
    return rest[1] if protocol in _THIS_HOST and rest[0] == "://" else None


def resolve(path: str, mounts: tuple[Mount, ...]) -> tuple[str, Mount | None]:
    """Return ``path`` with its symbolic links followed, and its mount.

    Follows links only on local file systems, where access cannot block; the rest of a path that enters another file
    system is returned as spelled.
    """
    parts = list(PurePosixPath("/", path if path.startswith("/") else f"{_working_directory()}/{path}").parts[1:])
    place, links = "/", 0
    while parts and links < _SYMLINKS:
        mount = mount_of(place, mounts)
        if mount is None or not mount.is_local:
            break
        step = _join(place, parts.pop(0))
        inside = mount_of(step, mounts)
        target = link_target(Path(step)) if inside is not None and inside.is_local else None
        if target is None:
            place = step
            continue
        links += 1
        parts = [*PurePosixPath(target).parts, *parts]
        if target.startswith("/"):
            place, parts = "/", parts[1:]
    whole = _join(place, *parts)
    return whole, mount_of(whole, mounts)


def _working_directory() -> str:
    """Return the one of this process; a deleted one as the kernel names it, a path that does not exist."""
    try:
        return os.getcwd()  # noqa: PTH109 - a string is wanted
    except FileNotFoundError:
        return os.readlink("/proc/self/cwd")  # noqa: PTH115


def _join(place: str, *parts: str) -> str:
    """Return one path with one leading slash: POSIX gives two of them another meaning, and normpath keeps them."""
    return "/" + os.path.normpath("/".join([place, *parts])).lstrip("/")


def outside_view(machine: Machine, path: str) -> Path:
    """Return ``path`` of this system in ``machine``: paths below /proc, /sys, /etc and /dev are relocated."""
    for top, folder in (("/proc", machine.proc), ("/sys", machine.sys), ("/dev", machine.dev)):
        if is_below(path, top):
            return folder / path[len(top) :].lstrip("/")
    return machine.etc.parent / path.lstrip("/")
