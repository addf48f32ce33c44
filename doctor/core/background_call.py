"""Work in a thread of its own, which may be left behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from doctor.core.background import start_thread

T = TypeVar("T")


class BackgroundCall(Generic[T]):
    """Work that was begun and is not waited for."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._results: list[T] = []
        self._errors: list[BaseException] = []
        self._ended = threading.Event()
        start_thread("doctor-soon", self._run)

    @property
    def is_done(self) -> bool:
        """Whether it has ended, one way or the other."""
        return self._ended.is_set()

    def result(self) -> T:
        """What it gave, or what it raised. ``TimeoutError`` where it has not ended."""
        if not self.is_done:
            raise TimeoutError
        if self._errors:
            raise self._errors[0]
        return self._results[0]

    def _run(self) -> None:
        try:
            self._results.append(self._work())
        except BaseException as error:  # noqa: BLE001 - raised again in result()
            self._errors.append(error)
        self._ended.set()
