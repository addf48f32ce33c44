"""Whether the clock of the kernel is synchronized, by adjtimex(2) in read-only mode."""

from __future__ import annotations

import ctypes

import msgspec

from doctor.core.facts import HiddenField

STA_UNSYNC = 0x0040
"""Status bit of include/uapi/linux/timex.h: the clock is not synchronized."""


class _Timex(ctypes.Structure):
    """The first fields of ``struct timex``, and space for the others."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * 256),
    )


class ClockState(msgspec.Struct, frozen=True):
    """``error``: the kernel's bound on the deviation, in seconds; ``None`` if the clock is not synchronized."""

    synchronised: bool | None
    error: float | None
    hidden: tuple[HiddenField, ...] = ()


def read_clock() -> ClockState:
    """Return the state of the clock; ``modes`` 0 changes nothing."""
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
