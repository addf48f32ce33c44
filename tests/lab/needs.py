"""What scenes and labs need of the machine: rights, tools, and an environment without anything of the user's."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.lab.speed import patience

ROOT = Path(__file__).parents[2]

LIGHTER = () if "DOCTOR_LONG_TESTS" in os.environ else (ROOT / "tests" / "lab" / "store_of_torch",)
"""What saves processes of the doctor the time to import all of torch; see there."""

OPTIONAL = ("ping", "ethtool", "nft", "mpirun", "orted", "srun", "sbatch", "chromium")
"""Tools of packages that not every machine has; .ci/run installs them."""
_NOT_FOUND = re.compile(rf"\b({'|'.join(OPTIONAL)})\W*: (?:command not found|No such file or directory)$", re.MULTILINE)


class CannotPlay(Exception):
    """A tool or a right is missing here; says which."""


def clean_environ(home: Path) -> dict[str, str]:
    """What every process starts from: nothing of the user's settings, launchers or sessions."""
    return {
        "PATH": f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": str(home),
        "LANG": "C.UTF-8",
        "PYTHONPATH": ":".join(map(str, (*LIGHTER, ROOT, ROOT / "checks"))),
    }


def require_tools(*tools: str) -> None:
    """Raise :class:`CannotPlay` where one of ``tools`` is not on the path of the clean environment."""
    path = clean_environ(Path())["PATH"]
    missing = [tool for tool in tools if shutil.which(tool, path=path) is None]
    if missing:
        raise CannotPlay(f"needs {', '.join(missing)}")


def require_found(done: subprocess.CompletedProcess[str]) -> None:
    """Raise :class:`CannotPlay` if a command failed because an optional tool is missing here."""
    if done.returncode == 127:
        missing = sorted({*OPTIONAL}.intersection(_NOT_FOUND.findall(done.stderr)))
        require_tools(*missing)


def require_namespaces() -> None:
    """Raise :class:`CannotPlay` where hosts can't be made."""
    if not _may_unshare():
        raise CannotPlay("needs root, unshare (util-linux) and ip (iproute2)")


@functools.cache
def _may_unshare() -> bool:
    if shutil.which("unshare") is None or shutil.which("ip") is None or os.geteuid() != 0:
        return False
    spaces = ("--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--mount-proc")
    command = ["unshare", *spaces, "mount", "-t", "sysfs", "none", "/sys"]
    return subprocess.run(command, capture_output=True, timeout=patience(20)).returncode == 0
