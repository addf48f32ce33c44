"""Runs a collector inside Linux namespaces of its own, so that tests can shape a real host."""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lab.speed import patience

ROOT = Path(__file__).parents[2]


@functools.cache
def _usable() -> bool:
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        return False
    return (
        subprocess.run(["unshare", "--net", "--mount", "true"], capture_output=True, timeout=patience(20)).returncode
        == 0
    )


def run_in_namespaces(setup: str, program: str, *, kinds: tuple[str, ...] = ("--net", "--mount")) -> str:
    """What the Python ``program`` prints after the shell commands ``setup``; skips where namespaces are not allowed.

    The namespaces, their interfaces and mounts end with the command. /sys is mounted anew to show the interfaces.
    """
    if not _usable():
        pytest.skip("needs root, unshare (util-linux) and ip (iproute2)")
    shell = f'set -e; mount -t sysfs none /sys; {setup}\nexec "$0" -c "$1"'
    command = ["unshare", *kinds, "bash", "-c", shell, sys.executable, program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience(60), cwd=ROOT, env=_environ())
    assert done.returncode == 0, done.stderr
    return done.stdout


def _environ() -> dict[str, str]:
    return {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "PYTHONPATH": str(ROOT), "HOME": "/nonexistent"}
