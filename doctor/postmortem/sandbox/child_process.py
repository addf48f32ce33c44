"""Parsing in a fresh interpreter: a few bytes of a pickle can exhaust memory or never end."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from doctor.core.decoding import prepared
from doctor.core.errors import UnusableError
from doctor.core.process import abandon_child, start_python

T = TypeVar("T")


def parse_isolated(module: str, arguments: Sequence[str], deadline: float, kind: type[T]) -> T:
    """Call ``main`` of ``module`` in a child process, and decode its answer into ``kind``.

    Raises:
        OSError: no interpreter can be started.
        UnusableError: it takes longer than ``deadline`` seconds, or ends without an answer.
    """
    child = start_python(module, arguments)
    try:
        answer, _ = child.communicate(timeout=deadline)
    except subprocess.TimeoutExpired:
        abandon_child(child)
        raise UnusableError(f"it could not be read within {deadline:.0f} seconds") from None
    try:
        return msgspec.json.decode(answer, type=prepared(kind))
    except msgspec.MsgspecError:
        raise UnusableError(f"the process that read it ended with {child.returncode} and no answer") from None


def send_answer(answer: object) -> None:
    """Write the answer of a child process to its stdout."""
    sys.stdout.buffer.write(msgspec.json.encode(answer))


def limit_memory(extra: int) -> None:
    """Limit the address space to its present size plus ``extra`` bytes, where the system can."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        with open("/proc/self/statm", "rb") as stream:  # noqa: PTH123 - a path object is not worth its import here
            used = int(stream.read().split()[0]) * resource.getpagesize()
        limit_resource(resource.RLIMIT_AS, used + extra)


def limit_resource(kind: int, value: int) -> None:
    """Set a soft limit; only that of processor time, which accumulates, may be raised."""
    import resource

    soft, hard = resource.getrlimit(kind)
    bounds = (hard,) if kind == resource.RLIMIT_CPU else (soft, hard)
    wanted = min([value, *(bound for bound in bounds if bound != resource.RLIM_INFINITY)])
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(kind, (wanted, hard))
