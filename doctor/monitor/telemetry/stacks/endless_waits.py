"""What the other threads of a process show of a thread that waits for them.

An event, a condition, a future or the end of a thread comes from another thread. Of a future of a pool, of the end of a
thread, or of a queue that one other thread has, that thread is known, and so is what it waits for itself. If all others
wait without a timeout, or there are none, what the thread waits for never comes. What native threads bring about is not
seen: only waits of the user's own code count, see :mod:`doctor.analysis.hang.rank_state`.
"""

from __future__ import annotations

import gc
import queue
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType

from doctor.core.clock import sleep
from doctor.core.facts.telemetry import ENDLESS, IDLE, OWN_LOCK, PROCESS_EVENT, SHARED_LOCK, WHOSE_THREAD
from doctor.core.frames import frames_of_stack, waits_in
from doctor.monitor.telemetry.stacks.blocking_call import OF_THREADS, blocking_call
from doctor.monitor.telemetry.stacks.loop_exits import variables_of
from doctor.monitor.telemetry.stacks.stillness import MOST_FRAMES, nanoseconds_run

_OWN = str(Path(__file__).resolve().parents[3])
_SAVES = "/torch/serialization.py"
"""Of a thread that saves, perhaps to a slow disk."""
_MONITOR = "/tqdm/_monitor.py"
"""The thread of tqdm, which sets nothing of others."""
_QUEUES = ("an item of a queue (queue.get)", "room in a queue (queue.put)")
"""Words of waits for queues of this process, which another thread fills and empties."""
_STANDS = (
    *OF_THREADS,
    *_QUEUES,
    OWN_LOCK,
    PROCESS_EVENT,
    SHARED_LOCK,
    "a lock on ",
    "room in a pipe",
    "the other end of a named pipe",
)
"""Starts of the words of waits in which a thread does nothing for others."""
_FUTURES, _POOLS = (
    str(Path(threading.__file__).parent / "concurrent/futures" / name) for name in ("_base.py", "thread.py")
)
"""``Future.result`` waits; ``_WorkItem.run`` of a ``ThreadPoolExecutor`` computes the future of its item."""
_OF_ITEM = {"future", "fn", "args", "kwargs"}
"""Attributes of a ``_WorkItem``, whose dictionary is an object of its own before Python 3.11."""
_LONGEST, _MOST_THREADS = 4, 256
"""Threads of a chain of waits that are named, and threads that are looked at for a deadlock."""
_MOMENT = 0.05
"""Seconds in which a thread that only waits for the interpreter's lock runs."""
_IMPORT, _TAKES = "<frozen importlib._bootstrap>", "acquire"
"""``_ModuleLock.acquire`` waits until another thread has imported a module."""
_TIMED = ("wait", "join", "_wait_for_tstate_lock")
"""Functions of ``threading`` that may have a timeout."""


def shown_by_threads(thread: int, words: str) -> str:
    """Return what the other threads show of the training thread, which waits for ``words``; empty if it is nothing.

    :data:`WHOSE_THREAD` with what the one that it waits for waits for itself, :data:`ENDLESS` or :data:`IDLE`.
    """
    frames = sys._current_frames()
    awaits_import = words.startswith(OWN_LOCK) and _is_in_import(frames.get(thread))
    if words not in (*OF_THREADS, *_QUEUES) and not awaits_import:
        return ""
    # Without its lock, which the training thread may hold.
    known = getattr(threading, "_enumerate", threading.enumerate)()
    native = {one.ident: one.native_id for one in known}
    frames.pop(threading.get_ident(), None)
    if awaits_import or _has_timeout(frames.get(thread)):
        return _idle(thread, frames, native)
    shown = _awaited_by(thread, frames, native) + (ENDLESS if _is_deadlock(thread, frames) else "")
    if shown and (shown.endswith(ENDLESS) or words not in _QUEUES):
        return shown if shown.endswith(ENDLESS) else shown + _idle(thread, frames, native)
    others = {one: frame for one, frame in frames.items() if one != thread}
    stand = (_sets_nothing(frame) or _stands(frame, native.get(ident)) for ident, frame in others.items())
    return shown + (ENDLESS if all(stand) else _idle(thread, frames, native))


def _is_in_import(frame: FrameType | None) -> bool:
    return frame is not None and (frame.f_code.co_filename, frame.f_code.co_name) == (_IMPORT, _TAKES)


def _idle(thread: int, frames: dict[int, FrameType], native: dict[int | None, int | None]) -> str:
    others = {ident: frame for ident, frame in frames.items() if ident != thread and not _sets_nothing(frame)}
    if len(others) > _MOST_THREADS:
        return ""
    before = {ident: nanoseconds_run(native_id) for ident in others if (native_id := native.get(ident)) is not None}
    sleep(_MOMENT)
    for ident, frame in others.items():
        native_id, ran = native.get(ident), before.get(ident)
        if native_id is None or ran is None or ran != nanoseconds_run(native_id):
            return ""
        stack = frames_of_stack(frame)
        words = blocking_call(native_id, stack)
        if not words or words.startswith("the file ") or any(_SAVES in one.file for one in stack):
            return ""
    return IDLE


def _awaited_by(thread: int, frames: dict[int, FrameType], native: dict[int | None, int | None]) -> str:
    """Return what the thread waits for that a thread waits for, and so on; empty if it is not known."""
    words, seen = "", {thread}
    for _ in range(_LONGEST):
        found = _worker_for(frames.get(thread), frames)
        native_id = native.get(found)
        if found is None or native_id is None or found in seen:
            break
        awaited = _waits_for(native_id, frames[found])
        words += WHOSE_THREAD + awaited if awaited else ""
        if awaited not in (*OF_THREADS, *_QUEUES) or _has_timeout(frames[found]):
            break
        thread = found
        seen.add(found)
    return words


def _waits_for(native_id: int, frame: FrameType) -> str:
    """Return what a thread waits for; nothing if it waited for the interpreter's lock, which this thread had."""
    words = blocking_call(native_id, frames_of_stack(frame))
    return "" if words.startswith(OWN_LOCK) and _computes(native_id) else words


def _computes(native_id: int) -> bool:
    """Return whether a thread of this process has run within :data:`_MOMENT`; also if that is unknown."""
    before = nanoseconds_run(native_id)
    sleep(_MOMENT)
    return before is None or before != nanoseconds_run(native_id)


def _worker_for(waiting: FrameType | None, frames: dict[int, FrameType]) -> int | None:
    """Return the thread that computes the future, or has to end, that a stack waits for; ``None`` if none is known.

    Of a queue, the only other thread that has it."""
    for function in ("get", "put"):
        if (awaited := _own_of(waiting, queue.__file__, function)) is not None:
            return _other_with(awaited, function, frames)
    future = _own_of(waiting, _FUTURES, "result")
    joined = getattr(_own_of(waiting, threading.__file__, "join"), "ident", None)
    for ident, frame in frames.items():
        item = _own_of(frame, _POOLS, "run") if future is not None else None
        if (item is not None and getattr(item, "future", None) is future) or joined == ident:
            return ident
    return None


def _other_with(awaited: object, function: str, frames: Mapping[int, FrameType]) -> int | None:
    """Return the only thread that has a queue in a local variable, or in an attribute of one that is called ``self``,
    and does not wait in the same function of it; ``None`` if there is none, or are several."""
    if len(frames) > _MOST_THREADS:
        return None
    others = (ident for ident, frame in frames.items() if _own_of(frame, queue.__file__, function) is not awaited)
    found = [ident for ident in others if _has_in_variables(frames[ident], awaited)]
    return found[0] if len(found) == 1 else None


def _has_in_variables(frame: FrameType | None, wanted: object) -> bool:
    for _ in range(MOST_FRAMES):
        if frame is None:
            return False
        with variables_of(frame) as variables:
            values = list(variables.values())
            with suppress(AttributeError):  # without running code of the program
                values += object.__getattribute__(variables.get("self"), "__dict__").values()
            if any(one is wanted for one in values):
                return True
        frame = frame.f_back
    return False


def _is_deadlock(thread: int, frames: dict[int, FrameType]) -> bool:
    """Return whether a thread waits, without a timeout, only for threads that wait in the same way.

    A future that is still in the queue of a pool waits for every thread of all pools whose queue is not empty: the
    queue itself does not show what it holds.
    """
    seen: set[int] = set()
    to_see = [thread]
    while to_see:
        ident = to_see.pop()
        if ident in seen:
            continue
        seen.add(ident)
        frame = frames.get(ident)
        if frame is None or len(seen) > _MOST_THREADS or not _is_in_wait(frame) or _has_timeout(frame):
            return False
        needed = _worker_for(frame, frames)
        workers = [needed] if needed is not None else _workers_of_queued(_own_of(frame, _FUTURES, "result"), frames)
        if not workers:
            return False
        to_see += workers
    return True


def _is_in_wait(frame: FrameType) -> bool:
    """Return whether a thread is in a wait of ``threading``, and in nothing that a signal handler calls above it."""
    return frame.f_code.co_filename == threading.__file__


def _workers_of_queued(future: object, frames: dict[int, FrameType]) -> list[int]:
    """Return the threads one of which has to compute a future that is in the queue of a pool; none if it is not."""
    if getattr(future, "_state", "") != "PENDING":
        return []
    busy = []
    for ident, frame in frames.items():
        queue = _local_of(frame, _POOLS, "_worker", "work_queue")
        is_empty = getattr(queue, "empty", None)
        if queue is not None and not (is_empty is not None and is_empty()):
            busy.append(ident)
    return busy if busy and any(map(_is_item_of_pool, gc.get_referrers(future))) else []


def _is_item_of_pool(one: object) -> bool:
    """Return whether an object is a ``_WorkItem`` of a pool, or the dictionary of one: other futures, such as those of
    processes and of asyncio, are not computed by threads of a pool."""
    if type(one) is dict:
        return one.keys() == _OF_ITEM
    return (type(one).__module__, type(one).__name__) == ("concurrent.futures.thread", "_WorkItem")


def _own_of(frame: FrameType | None, file: str, function: str) -> object | None:
    """Return ``self`` of the innermost call of a method on a stack."""
    return _local_of(frame, file, function, "self")


def _local_of(frame: FrameType | None, file: str, function: str, name: str) -> object | None:
    """Return a local variable of the innermost call of a function on a stack."""
    while frame is not None:
        if frame.f_code.co_name == function and frame.f_code.co_filename == file:
            own: object = frame.f_locals.get(name)
            return own
        frame = frame.f_back
    return None


def _stands(frame: FrameType, native_id: int | None) -> bool:
    stack = frames_of_stack(frame)
    if native_id is None or waits_in(stack) or _has_timeout(frame):
        return False
    return _waits_for(native_id, frame).startswith(_STANDS)


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
