"""Which process list this process sees."""

from __future__ import annotations

import os
from pathlib import Path

INITIAL_PID_NAMESPACE = "pid:[4026531836]"
"""PROC_PID_INIT_INO of the kernel's include/linux/proc_ns.h: the same number on every Linux host."""


def sees_host_processes(proc: Path) -> bool:
    """Whether the process list below ``proc`` is the host's own and not that of a container."""
    try:
        return os.readlink(proc / "self/ns/pid") == INITIAL_PID_NAMESPACE
    except OSError:
        return False
