"""Several users on one machine, for tests of folders that they share. Needs root, as who else may become others."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.needs import clean_environ
from tests.lab.speed import patience

NOBODY = 65534
ALICE, BOB = 41001, 41002
"""Users without a name."""
TEAM = 41100
"""A group without a name, and without members: processes are put into it."""


def require_root() -> None:
    """Skip the test for anybody else."""
    if os.geteuid() != 0:
        pytest.skip("needs root")


def run_as(uid: int, *groups: int) -> list[str]:
    """What a command begins with that runs as that user, in these groups."""
    more = ["--groups", ",".join(map(str, groups))] if groups else ["--clear-groups"]
    command = ["setpriv", f"--reuid={uid}", f"--regid={uid}", *more]
    if not _may_run_tests(*command):
        pytest.skip("needs setpriv, and an interpreter and a checkout that other users may read")
    return command


@functools.cache
def _may_run_tests(*before: str) -> bool:
    if shutil.which("setpriv") is None:
        return False
    command = [*before, sys.executable, "-c", "import doctor, tests.lab.users"]
    return subprocess.run(command, env=clean_environ(Path("/")), cwd="/", capture_output=True).returncode == 0


@contextlib.contextmanager
def as_user(uid: int, *groups: int) -> Iterator[None]:
    """This process as that user, in these groups besides their own."""
    before = os.getgroups()
    os.setgroups(list(groups))
    os.setegid(uid)
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(before)


@contextlib.contextmanager
def public_folder() -> Iterator[Path]:
    """A folder in which every user may make, rename and remove. It is not below those of pytest, which are closed to
    other users whenever a run of tests begins."""
    with tempfile.TemporaryDirectory(prefix="rankdoctor-test-", ignore_cleanup_errors=True) as name:
        folder = Path(name, "share")
        folder.mkdir()
        for path in (folder.parent, folder):
            path.chmod(0o777)
        yield folder


def belongs_to(uid: int, *paths: Path, gid: int | None = None) -> None:
    """Give these, and not what they link to, to that user."""
    for path in paths:
        os.chown(path, uid, uid if gid is None else gid, follow_symlinks=False)


@contextlib.contextmanager
def squashed(folder: Path) -> Iterator[Path]:
    """A mount of that folder where what root makes belongs to nobody, as on an NFS export with root_squash."""
    if shutil.which("bindfs") is None or not Path("/dev/fuse").exists():
        pytest.skip("needs bindfs")
    mount = folder.with_name(f"{folder.name}-mounted")
    mount.mkdir()
    who = ["--create-for-user=nobody", "--create-for-group=nogroup", "--chown-deny", "--chgrp-deny"]
    done = subprocess.run(["bindfs", *who, folder, mount], capture_output=True, text=True, timeout=patience(20))
    if done.returncode:
        pytest.skip(f"bindfs: {done.stderr.strip()}")
    try:
        yield mount
    finally:
        subprocess.run(["umount", "--lazy", mount], check=True, timeout=patience(20))
