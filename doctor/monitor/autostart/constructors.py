"""Has ranks watched that have not wrapped a model yet, once other ranks wait for them in the constructor of a wrapper.

DistributedDataParallel and others exchange shapes and parameters while they are constructed, so a rank that hangs
before its own constructor stops all others there. A rank that is in one for :data:`CALL_AFTER` seconds begins its run,
and leaves a key in the store of the process group; so does one that waits as long for others before its first step,
because ``fully_shard`` exchanges nothing, and one that waits for the process group itself, by the store of torchrun.
The others look for that key until they wrap a model, from a thread
that sleeps in between, and begin theirs when it is there. So does a rank that waits as long in any other collective
while nothing watches it: in a barrier before the model or after a Trainer has returned, or in a loop without a wrapper.
Of a program in which nobody waits, nothing else is watched.
"""

from __future__ import annotations

import atexit
import contextlib
import inspect
import itertools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from doctor.core.background import start_daemon

CALL_AFTER = 3.0
"""Seconds in a constructor after which the others are called: creating communicators takes less on a few hosts."""
FIRST_LOOK, LOOK_EVERY = 3.0, 2.0
"""Seconds after the process group was created, and between two looks at its store."""
LOOKS = 4
"""Looks at the thread of this rank between two looks at the store."""
END_WITHIN = 1.0
"""Seconds for the thread to end: a return from torch's store as the interpreter ends would raise SIGABRT."""
GROUPS = ("process_group", "device_mesh", "mesh_device", "mpu")
"""Arguments of constructors that name the ranks of a model."""
RESTARTS = "TORCHELASTIC_RESTART_COUNT"
"""torchrun keeps its store when it starts the ranks anew."""
_created = 0
_refused: list[weakref.ref[Any]] = []
"""The last wrapper whose constructor raised an exception, for example since other ranks have another model."""


class LateRank:
    """Waits in a thread of this process until another rank calls, or this one waits for others or wraps a model."""

    def __init__(self, begin: Callable[[int, int], object]) -> None:
        global _created
        _created += 1
        self._key = _key()
        self._begin = begin
        self._thread_id, self._native_id = threading.get_ident(), threading.get_native_id()
        self._pid = os.getpid()
        self._over = threading.Event()
        self._waited = 0.0
        self._thread = start_daemon("doctor-late", self._await_call)
        atexit.register(self.end)

    def end(self) -> None:
        """Look no more."""
        atexit.unregister(self.end)
        self._over.set()
        if os.getpid() == self._pid and threading.current_thread() is not self._thread:
            self._thread.join(END_WITHIN)

    def _await_call(self) -> None:
        with contextlib.suppress(Exception):  # the store is gone, or is not a TCPStore
            if self._is_needed():
                self._begin(self._thread_id, self._native_id)
                if self._waited >= CALL_AFTER and not self._over.is_set() and (store := store_of_group()) is not None:
                    store.set(self._key, b"1")

    def _is_needed(self) -> bool:
        """Await a reason to watch this rank; return whether there is one, and not an end before."""
        from doctor.collectors.host.launched_ranks import launched_ranks

        launched, pause, store = launched_ranks(), LOOK_EVERY / LOOKS, None
        launched.look()  # what has ended later is known by what it was
        for look in itertools.count():
            if self._over.wait(pause):
                return False
            self._waited = self._waited + pause if self._waits_unwatched() else 0.0
            if self._waited >= CALL_AFTER or launched.failed():
                return True
            if look * pause < FIRST_LOOK or look % LOOKS:
                continue
            store = store or store_of_group()
            if store is not None and store.get(self._key) is not None:
                return True
        return False

    def _waits_unwatched(self) -> bool:
        """Return whether this rank waits for others in a collective, and no Trainer's run watches it."""
        from doctor.monitor.telemetry.stacks.live_stacks import is_waiting_in_collective

        module = sys.modules.get("doctor.monitor.watch_session")
        is_watched = module is not None and module.WatchSession.open_sessions
        return not is_watched and is_waiting_in_collective(self._thread_id)


def _key() -> str:
    """Return the key of the default process group, of which a program may create several one after the other."""
    return f"constructor-waits-{os.environ.get(RESTARTS, '0')}-{_created}"


def store_of_group() -> Any:
    """Return a connection of our own to the store of the default process group, or to that of torchrun if the group
    has another kind of store; ``None`` if there is none to share.

    Raises:
        OSError: it does not respond.
    """
    from doctor.monitor.watchdog.store_discovery import agent_store, connect, find_store

    address = find_store() or agent_store(os.environ)
    return None if address is None else connect(address)


def call_late_ranks() -> None:
    """Have the ranks watched that have not wrapped a model.

    Raises:
        OSError: the store does not respond.
    """
    store = store_of_group()
    if store is not None:
        store.set(_key(), b"1")


_inside = threading.local()


@contextlib.contextmanager
def calling_late_ranks(begin: Callable[[int, int], object], *, is_of_all: bool) -> Iterator[None]:
    """Call the ranks that are missing if this block, which all ranks pass together, takes long."""
    if getattr(_inside, "is_within", False) or not is_of_all or not (_has_peers() or awaits_group()):
        yield
        return
    over = threading.Event()
    own = threading.get_ident(), threading.get_native_id()

    def call() -> None:
        if over.wait(CALL_AFTER):
            return
        with contextlib.suppress(Exception):
            begin(*own)
            if not over.is_set():
                call_late_ranks()

    with contextlib.suppress(RuntimeError):  # no memory for a thread
        start_daemon("doctor-constructor", call)
    _inside.is_within = True
    try:
        yield
    finally:
        _inside.is_within = False
        over.set()


def _has_peers() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return bool(
        distributed is not None
        and distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    )


def awaits_group() -> bool:
    """Return whether this process is a rank of torchrun that will be in a process group of several.

    Not a process that a rank started, which has its variables.
    """
    environ = os.environ
    size = environ.get("WORLD_SIZE", "")
    is_rank = "RANK" in environ and size.isdecimal() and int(size) > 1
    if not is_rank or environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return False
    with contextlib.suppress(OSError):
        given = Path(f"/proc/{os.getppid()}/environ").read_bytes()
        return not any(entry.startswith(b"RANK=") for entry in given.split(b"\0"))
    return False


def is_of_all_ranks(construct: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether no argument of a constructor names a group of its own."""
    try:
        given = inspect.signature(construct).bind_partial(*args, **kwargs).arguments
    except (TypeError, ValueError):
        return False
    return all(given.get(name) is None for name in GROUPS)


def note_refused(wrapper: object) -> None:
    """Remember a wrapper whose constructor raised an exception, as long as it exists."""
    _refused[:] = [weakref.ref(wrapper)]


def refused_wrapper() -> Any:
    """Return the last one, or ``None``."""
    return next((one() for one in _refused), None)
