"""The board on which ranks leave messages for one another, whatever carries it: a store, a folder, an actor of Ray."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Protocol, TypeVar

from doctor.core.background import start_thread
from doctor.core.files.trusted_owners import UntrustedPath

T = TypeVar("T")
Tasks = queue.SimpleQueue[Callable[[], None] | None]
"""For a thread that does one after the other; ``None``: nothing more will come."""

LARGEST = 16 << 20
"""Bytes of one message. The facts of a process take tens of kilobytes, the tokens of a million processes 8 MB."""
PATIENCE = 6.0
"""Seconds for one call. A folder on a busy file server may take its time; a gathering has half a minute."""
LEAVING = 1.0
"""Seconds for a thread that has nothing left to do to end."""


class StoreLost(Exception):
    """The board does not answer any more; says why."""


class UntrustedStore(StoreLost):
    """The board is in a folder that other users can change; the ``reason`` says whose it is and which option helps."""

    def __init__(self, description: str, reason: UntrustedPath) -> None:
        super().__init__(f"{description} is not safe to use: {reason}")
        self.reason = reason


class StoreBackend(Protocol):
    """What carries a board. Calls may block or raise anything; :class:`KeyValueStore` bounds and translates both.

    ``append`` adds ``data`` to the box ``name`` for good; ``fetch`` gives what a box holds beyond what the ``mark`` of
    an earlier call covered, and a new mark. ``exchange`` writes ``new`` only where ``old`` (``None``: nothing) stands.
    """

    description: str
    survives_coordinator: bool

    def set(self, name: str, data: bytes) -> None:
        """Write ``data`` under ``name``."""

    def get(self, name: str) -> bytes | None:
        """What stands under ``name``."""

    def exchange(self, name: str, old: bytes | None, new: bytes) -> bool:
        """Write ``new`` where ``old`` stands; whether it did."""

    def append(self, name: str, data: bytes) -> None:
        """Add an entry to a box."""

    def fetch(self, name: str, mark: object) -> tuple[list[bytes], object]:
        """The entries of a box beyond ``mark``, and the new mark."""

    def clear(self, name: str) -> None:
        """Remove everything whose name begins with ``name/``, where that can be done."""

    def close(self) -> None:
        """Give back what it holds."""


class Mailbox:
    """A box of a board: entries that stay, each read once by this reader."""

    def __init__(self, store: KeyValueStore, name: str) -> None:
        self._store = store
        self._name = name
        self._mark: object = None

    def append(self, data: bytes) -> None:
        """Add an entry."""
        self._store.call(lambda backend: backend.append(self._name, data))

    def fresh(self) -> list[bytes]:
        """Entries that this reader has not seen yet."""
        entries, self._mark = self._store.call(lambda backend: backend.fetch(self._name, self._mark))
        return entries


class KeyValueStore:
    """A carrier whose calls have a deadline.

    A client of a store whose process is stopped blocks past its own time-out, and so does a file on a dead mount: each
    call runs in a thread that is left behind when it does not come back.
    """

    def __init__(self, backend: StoreBackend, patience: float = PATIENCE) -> None:
        self.backend = backend
        self.patience = patience
        self._worker = DeadlineWorker()
        self.description = backend.description
        self.survives_coordinator = backend.survives_coordinator

    def wrap(self, layer: Callable[[StoreBackend], StoreBackend]) -> None:
        """Lay something between this board and what carries it."""
        self.backend = layer(self.backend)

    def call(self, work: Callable[[StoreBackend], T]) -> T:
        """Do ``work`` with the carrier.

        Raises:
            BoardLost: it did not answer in time, or refused.
        """
        try:
            return self._worker.run(lambda: work(self.backend), self.patience)
        except TimeoutError:
            raise StoreLost(f"{self.description} does not answer") from None
        except StoreLost:
            raise
        except UntrustedPath as refused:
            raise UntrustedStore(self.description, refused) from None
        except (OSError, RuntimeError, ValueError) as error:  # torch raises RuntimeErrors, folders OSErrors
            raise StoreLost(f"{self.description} is gone: {first_line(error)}") from None

    def set(self, name: str, data: bytes) -> None:
        """Write ``data`` under ``name``."""
        self.call(lambda backend: backend.set(name, data))

    def get(self, name: str) -> bytes | None:
        """What stands under ``name``."""
        return self.call(lambda backend: backend.get(name))

    def exchange(self, name: str, old: bytes | None, new: bytes) -> bool:
        """Write ``new`` where ``old`` stands; whether it did."""
        return self.call(lambda backend: backend.exchange(name, old, new))

    def mailbox(self, name: str) -> Mailbox:
        """A reader's own view of the box ``name``."""
        return Mailbox(self, name)

    def clear(self, name: str) -> None:
        """Remove everything below ``name``, where that can be done."""
        self.call(lambda backend: backend.clear(name))

    def close(self) -> None:
        """Give back what the carrier holds; a carrier that hangs is left behind."""
        try:
            self.call(lambda backend: backend.close())
        except StoreLost:
            return
        finally:
            self._worker.close()


def first_line(error: BaseException) -> str:
    """What an exception says, on one line; torch adds stacks of C++ below it."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


class DeadlineWorker:
    """One thread that does what may block, and is left behind when it does."""

    def __init__(self) -> None:
        self._tasks: Tasks = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stuck = False

    def run(self, work: Callable[[], T], seconds: float) -> T:
        """The result of ``work``, or what it raised. ``TimeoutError`` after ``seconds``, and from then on at once."""
        if self._stuck:
            raise TimeoutError
        if self._thread is None:
            self._thread = start_thread("doctor-board", _serve, self._tasks)
        done = threading.Event()
        results: list[T] = []
        errors: list[BaseException] = []

        def task() -> None:
            try:
                results.append(work())
            except BaseException as error:  # noqa: BLE001 - raised again below, in the caller's thread
                errors.append(error)
            done.set()

        self._tasks.put(task)
        if not done.wait(seconds):
            self._stuck = True
            raise TimeoutError
        if errors:
            raise errors[0]
        return results[0]

    def close(self) -> None:
        """End the thread once it has done what it was given, and join it for :data:`LEAVING` seconds unless a call
        blocks it. The next call starts another one."""
        self._tasks.put(None)
        if self._thread is not None and not self._stuck:
            self._thread.join(LEAVING)
        self._tasks, self._thread = queue.SimpleQueue(), None


def _serve(tasks: Tasks) -> None:
    while (task := tasks.get()) is not None:
        task()
        del task  # and with it what it gave: a store ends when nobody holds it
