"""Locks of ``multiprocessing`` that a thread waits for, and whether a living process can still release them.

Such a lock is a semaphore in memory that processes map (sem_overview(7)); a process that is killed does not release it.
The kernel does not know who has taken it. It does know which processes map it, and ``SemLock._count`` how often this
process has taken it (Modules/_multiprocessing/semaphore.c). A lock that this process waits for without having taken it,
and that no other process maps, was taken by one that has ended.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from doctor.collectors.base import listed, read_text
from doctor.core.clock import monotonic
from doctor.core.facts.telemetry import LOST, SHARED_LOCK

_PRIVATE = 128
"""FUTEX_PRIVATE_FLAG of futex(2): only threads of this process use the address."""
_LONGEST_SCAN = 0.5
"""Seconds that the search for other processes with the lock may take."""
_LARGEST_MAP, _TEXT = 16 << 20, 3


def shared_lock(arguments: Sequence[int | None], proc: Path = Path("/proc")) -> str:
    """Return ``a lock that other processes share (multiprocessing), …`` for the arguments of a call of futex(2).

    Empty if it is no lock of ``multiprocessing``, or has a timeout. Ends with :data:`LOST` if its holder has ended.
    """
    if len(arguments) < 4 or arguments[0] is None or arguments[1] is None:
        return ""
    if arguments[1] & _PRIVATE or arguments[3]:
        return ""
    lock = _lock_at(arguments[0])
    memory = _memory_at(arguments[0], proc) if lock is not None else ""
    if lock is None or not memory:
        return ""
    words = f"{SHARED_LOCK} (multiprocessing)"
    other = _other_with(memory, proc)
    if other:
        name = (read_text(proc / other / "comm") or "").strip()
        return f"{words}, which PID {other} ({name}) has open too"
    return words if other is None or lock._semlock._count() else words + LOST


def _lock_at(address: int) -> Any:
    """Return the ``Lock`` or ``RLock`` of ``multiprocessing`` whose semaphore has an address; ``None`` for others.

    Not a ``Semaphore``, as those of queues and conditions: who releases it need not have taken it.
    """
    synchronize, util = (sys.modules.get(f"multiprocessing.{name}") for name in ("synchronize", "util"))
    if synchronize is None or util is None:
        return None
    kinds = synchronize.Lock, synchronize.RLock
    # Every lock that was made here or before a fork, to be reset after the next one; not those that were unpickled.
    known = list(getattr(util, "_afterfork_registry", {}).values())
    return next((one for one in known if isinstance(one, kinds) and one._semlock.handle == address), None)


def _memory_at(address: int, proc: Path) -> str:
    """Return `` 00:1a 1234 ``, device and inode of the file that is mapped at an address; empty if there is none."""
    for line in (read_text(proc / "self" / "maps", _LARGEST_MAP) or "").splitlines():
        fields = line.split(maxsplit=5)
        first, _, end = fields[0].partition("-")
        if int(first, 16) <= address < int(end, 16):
            return f" {fields[3]} {fields[4]} " if fields[1].endswith("s") and fields[4] != "0" else ""
    return ""


def _other_with(memory: str, proc: Path) -> str | None:
    """Return the number of another process that maps a file; empty if none does, ``None`` if unknown."""
    until = monotonic() + _LONGEST_SCAN
    for pid in (name for name in listed(proc) if name.isdecimal() and int(name) != os.getpid()):
        if monotonic() > until:
            return None
        text = read_text(proc / pid / "maps", _LARGEST_MAP)
        if text is not None and memory in text:
            return pid
        if text is None and _text_size(proc / pid) == _text_size(proc / "self"):
            return None
    return ""


def _text_size(folder: Path) -> str:
    """Return the size of the program of a process, which all may read; that of a fork is the same (proc_pid_statm(5)).

    A process that has executed another program maps nothing of before; threads of the kernel have none.
    """
    columns = (read_text(folder / "statm") or "").split()
    return columns[_TEXT] if len(columns) > _TEXT else ""
