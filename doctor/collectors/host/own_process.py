"""This process: limits, CPU affinity, namespaces, and whether stdin is a TTY."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from doctor.collectors.base import (
    Machine,
    collector,
    link_target,
    parse_int,
    read_pairs,
    read_rows,
)
from doctor.core.facts import UNLIMITED, HiddenField, Limit, Namespace, ProcessFacts

NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")
"""Namespaces (namespaces(7)) that decide what two ranks of a machine share."""

INITIAL_USER_NAMESPACE = "user:[4026531837]"
"""Its fixed inode number (include/linux/proc_ns.h)."""

MPS_TIMEOUT = 1.0
"""Seconds for a connection within the host."""

CAP_IPC_LOCK = 14
"""Bit of the capability (include/uapi/linux/capability.h)."""

LIMITS = {
    "locked_memory": resource.RLIMIT_MEMLOCK,
    "open_files": resource.RLIMIT_NOFILE,
    "processes": resource.RLIMIT_NPROC,
    "stack": resource.RLIMIT_STACK,
}
"""Limits of getrlimit(2) that can stop training."""


@collector(ProcessFacts)
def collect_process(machine: Machine) -> ProcessFacts:
    """Collect the state of this process in the kernel and the interpreter."""
    links = ((kind, link_target(machine.proc / "self" / "ns" / kind)) for kind in NAMESPACES)
    spaces = tuple(Namespace(kind, identity) for kind, identity in links if identity is not None)
    limits = []
    for name, number in LIMITS.items():
        soft, hard = (UNLIMITED if value == resource.RLIM_INFINITY else value for value in resource.getrlimit(number))
        limits.append(Limit(name, soft, hard))
    device = None
    with contextlib.suppress(OSError):
        device = (machine.dev / "shm").stat().st_dev
    notes = []
    if not spaces:
        notes.append(HiddenField("namespaces", "/proc/self/ns can't be read", "mount /proc in the container"))
    if device is None:
        notes.append(HiddenField("shm_device", "no folder /dev/shm that can be read", "mount a tmpfs at /dev/shm"))
    return ProcessFacts(
        pid=os.getpid(),
        user_id=os.geteuid(),
        interactive=is_interactive(),
        cpus_allowed=tuple(sorted(os.sched_getaffinity(0))),
        limits=tuple(limits),
        namespaces=spaces,
        shm_device=device,
        threads_per_process=threads_asked(machine.environ),
        can_lock_memory=can_lock_memory(machine.proc),
        forked_after_cuda=forked_after_cuda(),
        mps_daemon=has_mps_daemon(machine),
        hidden=tuple(notes),
    )


def is_interactive() -> bool:
    """Return whether a prompt reads the input: a Python prompt, ``python -i``, or a live IPython or Jupyter shell.

    IPython in ``sys.modules`` proves nothing (libraries import it), nor does JPY_PARENT_PID: a terminal in Jupyter
    inherits it. Lightning uses ``sys.ps1`` too (lightning/fabric/utilities/imports.py).
    """
    if hasattr(sys, "ps1") or sys.flags.interactive:
        return True
    shell_of = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return shell_of is not None and shell_of() is not None


def threads_asked(environ: Mapping[str, str]) -> int | None:
    """Return OMP_NUM_THREADS, the outermost level of a list such as ``4,2`` (OpenMP 5.2, section 21.1.2)."""
    threads = parse_int(environ.get("OMP_NUM_THREADS", "").partition(",")[0])
    return threads if threads is not None and 0 < threads < 1 << 31 else None


def can_lock_memory(proc: Path) -> bool | None:
    """Return whether RLIMIT_MEMLOCK does not apply to this process; ``None`` if /proc does not show it.

    It has CAP_IPC_LOCK in the initial user namespace, the only one that can_do_mlock() of the kernel checks.
    """
    namespace = link_target(proc / "self" / "ns" / "user")
    mask = read_pairs(proc / "self" / "status", ":", limit=8192).get("CapEff")
    if namespace is None or mask is None:
        return None
    try:
        return bool(int(mask, 16) >> CAP_IPC_LOCK & 1) and namespace == INITIAL_USER_NAMESPACE
    except ValueError:
        return None


def forked_after_cuda() -> bool | None:
    """Return the state in torch if this process has imported it (torch/cuda/__init__.py)."""
    asked = getattr(sys.modules.get("torch.cuda"), "_is_in_bad_fork", None)
    return None if asked is None else bool(asked())


def has_mps_daemon(machine: Machine) -> bool | None:
    """Return whether a control daemon listens in CUDA_MPS_PIPE_DIRECTORY; ``None`` if that is not set, or unknown.

    nvidia-cuda-mps-control(1): without one, CUDA runs without MPS. A socket that is not in /proc/net/unix may belong to
    another network namespace; connecting to it is refused at once where nothing listens.
    """
    folder = machine.environ.get("CUDA_MPS_PIPE_DIRECTORY")
    if not folder:
        return None
    control = Path(folder) / "control"
    if any(row[-1:] == [str(control)] for row in read_rows(machine.proc / "net" / "unix")):
        return True
    try:
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(MPS_TIMEOUT)
            client.connect(str(control))
    except (FileNotFoundError, NotADirectoryError, ConnectionRefusedError):
        return False
    except OSError:
        return None
    return True
