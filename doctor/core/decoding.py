"""Decoding into types by several threads at once."""

from __future__ import annotations

import threading
from typing import TypeVar

import msgspec

T = TypeVar("T")
_prepared: set[object] = set()
_building = threading.Lock()


def prepared(kind: T) -> T:
    """``kind``, a type to decode into, after msgspec has built what it caches for the structs in it.

    For types that refer to themselves, msgspec 0.22 publishes the cache of a struct to other threads before it is
    complete; a thread that decodes into the type meanwhile crashes the process with a segmentation fault. So the cache
    is built under a lock, before the first use of each type.
    """
    if kind not in _prepared:
        with _building:
            msgspec.json.Decoder(kind)
            _prepared.add(kind)
    return kind
