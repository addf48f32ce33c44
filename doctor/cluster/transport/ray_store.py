"""Key-value store of the head node of a Ray cluster (GCS).

An actor could hold the messages by public names alone. It is not used: an actor is one more process to start, every
node would need a route to its randomly chosen port, and a broken network could not be distinguished from a broken node.
Every node has a route to the head. ``ray.experimental.internal_kv`` has had the same functions from Ray 2.9 to 2.60 at
least; Ray's own libraries (Serve, Jobs) keep their state there.
"""

from __future__ import annotations

import hashlib
import secrets
from typing import Any

from doctor.cluster.transport.store import first_line
from doctor.core.clock import time

NAMESPACE = b"rankdoctor"
STALE_AFTER = 3600.0
"""Seconds after which the keys of a killed driver are removed. No gather takes longer than minutes; the clocks of two
drivers may differ."""


def new_run() -> str:
    """Return a unique name for a gather, with its start time, which dates leftovers."""
    return f"{int(time())}-{secrets.token_hex(6)}"


class RayStoreBackend:
    """Store backend in GCS (:mod:`doctor.cluster.transport.store`); a mailbox is all keys below its name."""

    description = "the key-value store of the Ray cluster"
    survives_coordinator = False

    def __init__(self, run: str) -> None:
        self._run = run

    def set(self, name: str, data: bytes) -> None:
        """Write a key."""
        self._put(name, data, overwrite=True)

    def get(self, name: str) -> bytes | None:
        """Read the value of a key."""
        value: bytes | None = _call("get", self._key(name))
        return value

    def exchange(self, name: str, old: bytes | None, new: bytes) -> bool:
        """Write ``new`` if the value is ``old``: GCS creates the turn key only once."""
        if self.get(name) != old:
            return False
        turn = f"turns/{hashlib.sha256(old or b'').hexdigest()[:16]}"
        if not self._put(turn, b"", overwrite=False):
            return False
        self.set(name, new)
        return True

    def append(self, name: str, data: bytes) -> None:
        """Write the entry under a random key below the mailbox."""
        self.set(f"{name}/{secrets.token_hex(8)}", data)

    def fetch(self, name: str, mark: object) -> tuple[list[bytes], object]:
        """Return new entries; ``mark`` is the set of keys that were read."""
        known = mark if isinstance(mark, set) else set()
        fresh = [key for key in _keys(self._key(f"{name}/")) if key not in known]
        entries = [entry for key in fresh if (entry := _call("get", key)) is not None]
        return entries, known.union(fresh)

    def clear(self, name: str) -> None:
        """Remove a finished gather."""
        _remove(self._key(f"{name}/"))

    def close(self) -> None:
        """Remove the keys of this run and stale keys of others: GCS outlives every driver."""
        _remove(f"{self._run}/".encode())
        for key in _keys(b""):
            began = key.partition(b"-")[0]
            if began.isdigit() and time() - int(began) > STALE_AFTER:
                _remove(key)

    def _key(self, name: str) -> bytes:
        return f"{self._run}/{name}".encode()

    def _put(self, name: str, data: bytes, *, overwrite: bool) -> bool:
        """Write a key; return ``False`` if it exists and must not be overwritten."""
        already_there = _call("put", self._key(name), data, overwrite)
        return overwrite or not already_there


def _keys(prefix: bytes) -> list[bytes]:
    return list(_call("list", prefix))


def _remove(prefix: bytes) -> None:
    _call("del", prefix, del_by_prefix=True)


def _call(function: str, *arguments: object, **options: object) -> Any:
    """Call a function of ``internal_kv``. Ray's errors do not derive from OSError; here they do."""
    from ray.exceptions import RayError
    from ray.experimental import internal_kv

    try:
        return getattr(internal_kv, f"_internal_kv_{function}")(*arguments, namespace=NAMESPACE, **options)
    except RayError as error:
        raise OSError(first_line(error)) from None
