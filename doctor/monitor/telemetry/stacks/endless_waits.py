"""Whether a thread waits for what no other thread of its process can bring about any more.

An event, a condition, a future or the end of a thread comes from another thread. If all others wait without a timeout
themselves, or there are none, it never comes. What native threads bring about is not seen: only waits of the user's own
code count, see :mod:`doctor.analysis.hang.rank_state`.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import FrameType

from doctor.core.frames import frames_of_stack, waits_in
from doctor.monitor.telemetry.stacks.blocking_call import OF_THREADS, blocking_call

ENDLESS = ", which no other thread can bring about"
"""What is added to the words of such a wait."""
_OWN = str(Path(__file__).resolve().parents[3])
_MONITOR = "/tqdm/_monitor.py"
"""The thread of tqdm, which sets nothing of others."""
_STANDS = (
    *OF_THREADS,
    "an item of a queue (queue.get)",
    "room in a queue (queue.put)",
    "a lock of its own process",
    "a lock on ",
    "room in a pipe",
    "the other end of a named pipe",
)
"""Starts of the words of waits in which a thread does nothing for others."""
_TIMED = ("wait", "join", "_wait_for_tstate_lock")
"""Functions of ``threading`` that may have a timeout."""


def endless(thread: int, words: str) -> str:
    """Return :data:`ENDLESS` if the training thread, which waits for ``words``, waits in vain, and else nothing."""
    if words not in OF_THREADS:
        return ""
    frames = sys._current_frames()
    if _has_timeout(frames.get(thread)):
        return ""
    # Without its lock, which the training thread may hold.
    known = getattr(threading, "_enumerate", threading.enumerate)()
    native = {one.ident: one.native_id for one in known}
    others = {one: frame for one, frame in frames.items() if one not in (thread, threading.get_ident())}
    stand = (_sets_nothing(frame) or _stands(frame, native.get(ident)) for ident, frame in others.items())
    return ENDLESS if all(stand) else ""


def _stands(frame: FrameType, native_id: int | None) -> bool:
    stack = frames_of_stack(frame)
    if native_id is None or waits_in(stack) or _has_timeout(frame):
        return False
    return blocking_call(native_id, stack).startswith(_STANDS)


def _has_timeout(frame: FrameType | None) -> bool:
    while frame is not None:
        code = frame.f_code
        may_have = code.co_name in _TIMED and code.co_filename == threading.__file__
        if may_have and frame.f_locals.get("timeout") not in (None, -1):
            return True
        frame = frame.f_back
    return False


def _sets_nothing(frame: FrameType | None) -> bool:
    """Whether a thread is the doctor's own, or one of which it is known."""
    outermost = ""
    while frame is not None:
        if frame.f_code.co_filename != threading.__file__:
            outermost = frame.f_code.co_filename
        frame = frame.f_back
    return outermost.startswith(_OWN) or outermost.endswith(_MONITOR)
