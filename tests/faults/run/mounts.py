"""File systems that a checkpoint can't be written to: read-only, full, and none at all. Root alone may mount them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.lab.needs import CannotPlay
from tests.lab.speed import patience

SIZE = 64 << 10
"""Of the small file system, bytes: a few pages, all of which :func:`_fill` takes."""


@contextmanager
def mounted(path: Path, kind: str) -> Iterator[None]:
    """``full`` or ``read-only``: a file system of that kind at ``path``; ``file``: a file in the directory's place;
    nothing for ``""``.

    Raises:
        CannotPlay: without the right to mount.
    """
    if kind == "file":
        path.write_text("not a directory\n")
    if kind not in ("full", "read-only"):
        yield
        return
    if os.geteuid() != 0:
        raise CannotPlay("needs root to mount a file system")
    path.mkdir()
    _run("mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(path))
    try:
        if kind == "full":
            _fill(path / "earlier.ckpt")
        else:
            _run("mount", "-o", "remount,ro", str(path))
        yield
    finally:
        _run("umount", "--lazy", str(path))


def _fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience(10))
    if done.returncode:
        raise CannotPlay(f"{' '.join(command)}: {done.stderr.strip()}")
