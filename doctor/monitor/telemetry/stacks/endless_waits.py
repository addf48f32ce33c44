"""What the other threads of a process show of a thread that waits for them.

An event, a condition, a future or the end of a thread comes from another thread. Of a future of a pool, or of the end
of a thread, that thread is known, and so is what it waits for itself. If all others wait without a timeout, or there
are none, what the thread waits for never comes. What native threads bring about is not seen: only waits of the user's
own code count, see :mod:`doctor.analysis.hang.rank_state`.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import FrameType

from doctor.core.frames import frames_of_stack, waits_in
from doctor.monitor.telemetry.stacks.blocking_call import OF_THREADS, blocking_call

ENDLESS = ", which no other thread can bring about"
WHOSE_THREAD = ", whose thread waits for "
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
_FUTURES, _POOLS = (
    str(Path(threading.__file__).parent / "concurrent/futures" / name) for name in ("_base.py", "thread.py")
)
"""``Future.result`` waits; ``_WorkItem.run`` of a ``ThreadPoolExecutor`` computes the future of its item."""
_TIMED = ("wait", "join", "_wait_for_tstate_lock")
"""Functions of ``threading`` that may have a timeout."""


def shown_by_threads(thread: int, words: str) -> str:
    """Return what the other threads show of the training thread, which waits for ``words``; empty if it is nothing.

    :data:`WHOSE_THREAD` with what the one that it waits for waits for itself, or :data:`ENDLESS`.
    """
    if words not in OF_THREADS:
        return ""
    frames = sys._current_frames()
    if _has_timeout(frames.get(thread)):
        return ""
    # Without its lock, which the training thread may hold.
    known = getattr(threading, "_enumerate", threading.enumerate)()
    native = {one.ident: one.native_id for one in known}
    others = {one: frame for one, frame in frames.items() if one not in (thread, threading.get_ident())}
    if awaited := _awaited_of(frames.get(thread), others, native):
        return WHOSE_THREAD + awaited
    stand = (_sets_nothing(frame) or _stands(frame, native.get(ident)) for ident, frame in others.items())
    return ENDLESS if all(stand) else ""


def _awaited_of(waiting: FrameType | None, others: dict[int, FrameType], native: dict[int | None, int | None]) -> str:
    """Return what the thread waits for that a stack waits for; empty if it is not known."""
    future = _own_of(waiting, _FUTURES, "result")
    joined = _own_of(waiting, threading.__file__, "join")
    for ident, frame in others.items():
        item = _own_of(frame, _POOLS, "run") if future is not None else None
        if (item is not None and getattr(item, "future", None) is future) or getattr(joined, "ident", None) == ident:
            native_id = native.get(ident)
            return "" if native_id is None else blocking_call(native_id, frames_of_stack(frame))
    return ""


def _own_of(frame: FrameType | None, file: str, function: str) -> object | None:
    """Return ``self`` of the innermost call of a method on a stack."""
    while frame is not None:
        if frame.f_code.co_name == function and frame.f_code.co_filename == file:
            own: object = frame.f_locals.get("self")
            return own
        frame = frame.f_back
    return None


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
