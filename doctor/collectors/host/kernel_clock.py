"""Whether the kernel's clock is disciplined, read with adjtimex(2) in its read-only mode."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from doctor.core.facts import HiddenField

STA_UNSYNC = 0x0040
"""Status bit of include/uapi/linux/timex.h: nothing disciplines the clock."""


class _Timex(ctypes.Structure):
    """The head of ``struct timex``, and room for the rest of it."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * 256),
    )


@dataclass(frozen=True)
class ClockState:
    """``error``: the kernel's bound on the deviation, seconds; ``None`` while nothing disciplines the clock."""

    synchronised: bool | None
    error: float | None
    hidden: tuple[HiddenField, ...] = ()


def read_clock() -> ClockState:
    """Ask the kernel; ``modes`` 0 changes nothing."""
    state = _Timex(modes=0)
    try:
        library = ctypes.CDLL(None, use_errno=True)
        answer = int(library.adjtimex(ctypes.byref(state)))
    except (OSError, AttributeError):
        return _unseen("this system has no adjtimex")
    if answer < 0:
        return _unseen("adjtimex is not allowed here")
    if state.status & STA_UNSYNC:
        return ClockState(False, None)
    return ClockState(True, state.maxerror / 1e6)


def _unseen(reason: str) -> ClockState:
    return ClockState(None, None, (HiddenField("clock_synchronised", reason, "timedatectl show -p NTPSynchronized"),))
