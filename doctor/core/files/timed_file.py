"""Reads files that may block: on a mount whose server is gone, in /proc, in a file system of another user.

Neither ``O_NONBLOCK`` nor ``poll`` has an effect on regular files, so a daemon thread reads, and is abandoned if it
blocks.
"""

from __future__ import annotations

import errno
import os
import queue
import stat
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from doctor.core.background import start_daemon

SECONDS = 20.0
"""The timeout of one call, in seconds. A spun-down disk or a tape cache responds within it."""
_T = TypeVar("_T")
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)


class TimedFile(AbstractContextManager["TimedFile"]):
    """A file that is open for reading; every call ends within ``seconds``.

    Raises:
        OSError: it can't be opened; :exc:`TimeoutError` if opening it timed out.
    """

    def __init__(self, path: Path, seconds: float = SECONDS) -> None:
        self._seconds = seconds
        self._calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._descriptor = -1
        start_daemon("doctor-reader", self._work)
        self.status = self._ask(lambda: self._open(path), os.stat_result)

    def read(self, most: int) -> bytes:
        """Return the next bytes, at most ``most``; none at the end."""
        return self._ask(lambda: os.read(self._descriptor, most), bytes)

    def close(self) -> None:
        """End the thread when its call returns, and close the file."""
        self._calls.put(None)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close at its end."""
        self.close()

    def _open(self, path: Path) -> os.stat_result:
        self._descriptor = os.open(path, _FLAGS)
        status = os.fstat(self._descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        return status

    def _ask(self, call: Callable[[], object], kind: type[_T]) -> _T:
        self._calls.put(call)
        try:
            answer = self._answers.get(timeout=self._seconds)
        except queue.Empty:
            self.close()
            raise TimeoutError(errno.ETIMEDOUT, f"it did not respond within {self._seconds:g} s") from None
        if isinstance(answer, kind):
            return answer
        self.close()
        raise answer if isinstance(answer, OSError) else OSError(errno.EIO, str(answer))

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                self._answers.put(call())
            except (OSError, ValueError) as error:
                self._answers.put(error)
        if self._descriptor >= 0:
            with suppress(OSError):
                os.close(self._descriptor)
