"""File systems that are full, slow, silent, or each host's own, on hosts of the lab."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.lab.hosts import LabHost
from tests.lab.needs import CannotPlay, require_tools
from tests.lab.speed import patience

_THROTTLE = Path("/sys/fs/cgroup/blkio/blkio.throttle.write_bps_device")
"""Of cgroup v1, for the root group: what the kernel writes back counts there, too."""
DISK_BYTES = 4 << 30
"""Of a file with holes: it takes no more than is written to it. A directory with less than 1 GiB counts as full."""


def own_directory(host: LabHost, folder: Path) -> None:
    """From now on ``folder`` is this host's own: what it writes there no other host sees, and the other way round."""
    host.own_layer(folder)


@contextmanager
def small_directory(host: LabHost, folder: Path, size: int = 1 << 20) -> Iterator[None]:
    """``folder`` has room for ``size`` bytes on this host, and is its own."""
    host.sh('mount -t tmpfs -o "size=$2" lab "$1"', str(folder), str(size))
    with _unmounted((host,), folder):
        yield


@contextmanager
def read_only_directory(host: LabHost, folder: Path) -> Iterator[None]:
    """``folder`` can be read on this host, and not written."""
    host.sh('mount --bind "$1" "$1" && mount -o remount,bind,ro "$1"', str(folder))
    with _unmounted((host,), folder):
        yield


@contextmanager
def disk(hosts: Sequence[LabHost], folder: Path, *, bandwidth: int | None = None) -> Iterator[None]:
    """A disk of its own lies at ``folder`` on ``hosts``, which share it; other hosts do not see it. It takes
    ``bandwidth`` bytes a second, by the kernel's own brake for block devices.

    Raises:
        CannotPlay: a tool, or the brake, is missing here.
    """
    require_tools("mkfs.ext4", "losetup", "fsfreeze")
    if bandwidth is not None and not _THROTTLE.exists():
        raise CannotPlay(f"needs {_THROTTLE}")
    image = folder.with_name(f"{folder.name}.disk")
    with image.open("wb") as stream:
        stream.truncate(DISK_BYTES)
    _run("mkfs.ext4", "-q", "-F", "-m", "0", "-O", "^has_journal", str(image))
    device = _run("losetup", "--find", "--show", str(image))
    try:
        for host in hosts:
            host.sh('mount "$1" "$2"', device, str(folder))
        with _unmounted(hosts, folder), _braked(device, bandwidth):
            yield
    finally:
        _run("losetup", "--detach", device)
        image.unlink()


@contextmanager
def _braked(device: str, bandwidth: int | None) -> Iterator[None]:
    if bandwidth is None:
        yield
        return
    number = (Path("/sys/block") / Path(device).name / "dev").read_text().strip()
    _THROTTLE.write_text(f"{number} {bandwidth}")
    try:
        yield
    finally:
        _THROTTLE.write_text(f"{number} 0")


@contextmanager
def silent(host: LabHost, folder: Path) -> Iterator[None]:
    """The :func:`disk` at ``folder`` answers to nobody who writes: they wait inside the kernel, where no signal reaches
    them, as on a server that is gone. Those who look at it are answered."""
    host.sh('fsfreeze --freeze "$1"', str(folder))
    try:
        yield
    finally:
        host.sh('fsfreeze --unfreeze "$1"', str(folder))


@contextmanager
def _unmounted(hosts: Sequence[LabHost], folder: Path) -> Iterator[None]:
    """Take away what is mounted there at the end, even where a process still holds a file."""
    try:
        yield
    finally:
        for host in hosts:
            host.sh('umount --lazy "$1"', str(folder))


def _run(*argv: str) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=patience(20))
    assert done.returncode == 0, f"{argv}: {done.stderr}"
    return done.stdout.strip()
