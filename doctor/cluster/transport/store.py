"""Key-value store through which ranks exchange messages, on any backend."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Protocol, TypeVar

from doctor.core.background import PendingCall, start_thread
from doctor.core.files.trusted_owners import UntrustedPath

T = TypeVar("T")
Tasks = queue.SimpleQueue[Callable[[], None] | None]
"""Work of a thread, in order; ``None`` ends it."""

Marks = dict["StoreBackend", object]
"""How far a mailbox was read in each backend; see :meth:`StoreBackend.fetch`."""

LARGEST = 16 << 20
"""Bytes of one message. The facts of a process take tens of kilobytes, the tokens of a million processes 8 MB."""
PATIENCE = 6.0
"""Seconds for one call: a busy file server may be slow, and a gather has half a minute."""
LEAVING = 1.0
"""Seconds for an idle thread to end."""


class StoreLost(Exception):
    """The store does not answer any more; the message is the reason."""


class UntrustedStore(StoreLost):
    """The store is in a folder that other users can change. ``reason`` names its owner and the option that helps."""

    def __init__(self, description: str, reason: UntrustedPath) -> None:
        super().__init__(f"{description} is not safe to use: {reason}")
        self.reason = reason


class StoreBackend(Protocol):
    """Backend of a store, whose calls may block or raise: :class:`KeyValueStore` handles both.

    ``append`` adds ``data`` to the mailbox ``name`` permanently; ``fetch`` returns the entries beyond the ``mark`` of
    an earlier call, and a new mark. ``exchange`` writes ``new`` only if the value is ``old`` (``None``: no value).
    """

    description: str
    survives_coordinator: bool

    def set(self, name: str, data: bytes) -> None:
        """Write ``data`` under ``name``."""

    def get(self, name: str) -> bytes | None:
        """Return the value of ``name``."""

    def exchange(self, name: str, old: bytes | None, new: bytes) -> bool:
        """Write ``new`` if the value is ``old``; return whether it was written."""

    def append(self, name: str, data: bytes) -> None:
        """Append an entry to a mailbox."""

    def fetch(self, name: str, mark: object) -> tuple[list[bytes], object]:
        """Return the entries of a mailbox beyond ``mark``, and the new mark."""

    def clear(self, name: str) -> None:
        """Remove all names that begin with ``name/``, if the backend can."""

    def close(self) -> None:
        """Release its resources."""


class Mailbox:
    """Reader of a mailbox: entries are permanent, and it returns each once per store."""

    def __init__(self, name: str, fetch: Callable[[str, Marks], list[bytes]]) -> None:
        self._name = name
        self._fetch = fetch
        self._marks: Marks = {}

    def fresh(self) -> list[bytes]:
        """Return the entries that this reader has not returned yet."""
        return self._fetch(self._name, self._marks)


class KeyValueStore:
    """Store whose calls have a timeout, and raise :class:`StoreLost` if the store does not answer or fails.

    A client of a stopped TCPStore blocks beyond its own timeout, and so does a file on a dead mount: each call runs in
    a thread that is abandoned if it does not return.
    """

    def __init__(self, backend: StoreBackend, patience: float = PATIENCE) -> None:
        self.backend = backend
        self.patience = patience
        self._worker = DeadlineWorker()

    @property
    def description(self) -> str:
        """Description of the backend."""
        return self.backend.description

    @property
    def survives_coordinator(self) -> bool:
        """Whether the backend outlives the process that coordinates."""
        return self.backend.survives_coordinator

    def wrap(self, layer: Callable[[StoreBackend], StoreBackend]) -> None:
        """Wrap the backend in another one."""
        self.backend = layer(self.backend)

    def call(self, work: Callable[[StoreBackend], T]) -> T:
        """Run ``work`` with the backend."""
        try:
            return self._worker.run(lambda: work(self.backend), self.patience)
        except TimeoutError:
            raise StoreLost(f"{self.description} does not respond") from None
        except StoreLost:
            raise
        except UntrustedPath as refused:
            raise UntrustedStore(self.description, refused) from None
        except (OSError, RuntimeError, ValueError) as error:  # torch raises RuntimeErrors, folders OSErrors
            raise StoreLost(f"{self.description} is no longer reachable: {first_line(error)}") from None

    def use(self, work: Callable[[StoreBackend], T], otherwise: T) -> T:
        """Run ``work`` with the backend; an optional store returns ``otherwise`` if it is lost."""
        return self.call(work)

    def set(self, name: str, data: bytes) -> None:
        """Write ``data`` under ``name``."""
        self.use(lambda backend: backend.set(name, data), None)

    def get(self, name: str) -> bytes | None:
        """Return the value of ``name``."""
        return self.use(lambda backend: backend.get(name), None)

    def exchange(self, name: str, old: bytes | None, new: bytes) -> bool:
        """Write ``new`` if the value is ``old``; return whether it was written."""
        return self.use(lambda backend: backend.exchange(name, old, new), False)

    def append(self, name: str, data: bytes) -> None:
        """Append an entry to a mailbox."""
        self.use(lambda backend: backend.append(name, data), None)

    def mailbox(self, name: str) -> Mailbox:
        """Return a reader of the mailbox ``name``; it reads all entries again from another backend."""
        return Mailbox(name, self.fetch)

    def fetch(self, name: str, marks: Marks) -> list[bytes]:
        """Return the entries of a mailbox beyond ``marks``, which are updated."""
        return self.use(lambda backend: _fetch(backend, name, marks), [])

    def clear(self, name: str) -> None:
        """Remove all keys below ``name``, if the backend can."""
        self.use(lambda backend: backend.clear(name), None)

    def close(self) -> None:
        """Release the backend, or abandon it if it blocks."""
        try:
            self.call(lambda backend: backend.close())
        except StoreLost:
            return
        finally:
            self._worker.close()


def _fetch(backend: StoreBackend, name: str, marks: Marks) -> list[bytes]:
    entries, marks[backend] = backend.fetch(name, marks.get(backend))
    return entries


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message; torch appends C++ stacks."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


class DeadlineWorker:
    """One thread for calls that may block, abandoned when one does."""

    def __init__(self) -> None:
        self._tasks: Tasks = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stuck = False

    def run(self, work: Callable[[], T], seconds: float) -> T:
        """Return the result of ``work``. Raises ``TimeoutError`` after ``seconds``, and at once in all later calls."""
        if self._stuck:
            raise TimeoutError
        if self._thread is None:
            self._thread = start_thread("doctor-store", _serve, self._tasks)
        call = PendingCall(work)
        self._tasks.put(call.run)
        try:
            return call.result(seconds)
        except TimeoutError:
            self._stuck = not call.is_done
            raise

    def close(self) -> None:
        """End the thread when it has finished its work, and join it unless a call blocks it.

        Joins for :data:`LEAVING` seconds. The next call starts a new thread.
        """
        self._tasks.put(None)
        if self._thread is not None and not self._stuck:
            self._thread.join(LEAVING)
        self._tasks, self._thread = queue.SimpleQueue(), None


def _serve(tasks: Tasks) -> None:
    while (task := tasks.get()) is not None:
        task()
        del task  # and its result: a TCPStore closes when the last reference is gone
