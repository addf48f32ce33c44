"""Daemon threads for calls that may block forever; at the end of a run, those that can end are joined."""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from doctor.core.clock import monotonic

T = TypeVar("T")

_started: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_named: set[str] = set()
_lock = threading.Lock()
"""Held while the set is changed or copied: threads are started from several threads."""
START_SECONDS = 10.0
"""Seconds within which a new thread must run."""


class _BoundedEvent(threading.Event):
    def wait(self, timeout: float | None = None) -> bool:
        return super().wait(START_SECONDS if timeout is None else timeout)


def start_daemon(name: str, target: Callable[..., object], *args: Any) -> threading.Thread:
    """Start a daemon thread.

    ``Thread.start()`` waits without a limit for the new thread, which never answers if it has no memory to begin with.

    Raises:
        RuntimeError: The thread does not run, for want of memory or by a limit on processes.
    """
    thread = threading.Thread(target=target, args=args, name=name, daemon=True)
    thread._started = _BoundedEvent()  # type: ignore[attr-defined]
    thread.start()
    if thread.ident is None:
        raise RuntimeError("can't start new thread")
    return thread


def start_thread(name: str, target: Callable[..., object], *args: Any) -> threading.Thread:
    """Start a daemon thread that :func:`join_threads` joins; see :func:`start_daemon`."""
    thread = start_daemon(name, target, *args)
    with _lock:
        _started.add(thread)
    return thread


def join_threads(seconds: float, tell: Callable[[str], None]) -> None:
    """Join the threads of :func:`start_thread`, for at most ``seconds`` together; ``tell`` gets one line for each name
    of those that are still blocked, once per process."""
    until = monotonic() + seconds
    for thread in _others():
        thread.join(max(0.0, until - monotonic()))
    for thread in _others():
        if thread.is_alive() and thread.name not in _named:
            _named.add(thread.name)
            frame = sys._current_frames().get(thread.ident or 0)
            place = f" at {frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""
            tell(f"thread {thread.name} is blocked{place}; it is left behind as a daemon thread")


class WakeUp:
    """An event for one waiting thread, which is cleared when its wait ends. Waiting for a lock takes half the CPU time
    of a :class:`threading.Event`, which makes a lock for each wait."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        """End the current wait, or the next one. For any thread."""
        with contextlib.suppress(RuntimeError):  # it is set already
            self._lock.release()

    def wait(self, seconds: float) -> bool:
        """Wait at most ``seconds``; return whether it was set."""
        return self._lock.acquire(timeout=seconds)


class PendingCall(Generic[T]):
    """A call whose result another thread awaits. ``on_end``: called in its thread once the result is there."""

    def __init__(self, work: Callable[[], T], on_end: Callable[[], object] = lambda: None) -> None:
        self._work = work
        self._on_end = on_end
        self._results: list[T] = []
        self._errors: list[BaseException] = []
        self._is_done = False
        self._ended = threading.Lock()  # held until then; an Event takes twice the CPU time of each call of a store
        self._ended.acquire()

    @property
    def is_done(self) -> bool:
        """Whether it has returned or raised."""
        return self._is_done

    def run(self) -> None:
        """Make the call."""
        try:
            self._results.append(self._work())
        except BaseException as error:  # noqa: BLE001 - raised again in result()
            self._errors.append(error)
        self._is_done = True
        self._ended.release()
        self._on_end()

    def result(self, seconds: float = 0.0) -> T:
        """Return its result or raise its exception; ``TimeoutError`` if it has not ended after ``seconds``."""
        if not self._is_done:
            if not self._ended.acquire(timeout=max(0.0, seconds)):
                raise TimeoutError
            self._ended.release()  # for others that wait
        if self._errors:
            raise self._errors[0]
        return self._results[0]


class BackgroundCall(PendingCall[T]):
    """A call in a daemon thread of its own."""

    def __init__(self, work: Callable[[], T], on_end: Callable[[], object] = lambda: None) -> None:
        super().__init__(work, on_end)
        start_thread("doctor-background", self.run)


def _others() -> list[threading.Thread]:
    with _lock:
        return [thread for thread in _started if thread is not threading.current_thread()]
