"""Bytes of a flight-recorder dump into plain values. Nothing is run: a dump of any torch holds numbers, text, lists and
dictionaries, so the loader has no way to any class or function.
"""

from __future__ import annotations

import io
import pickle
import re
import struct
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import msgspec

from doctor.core.errors import UnusableError
from doctor.core.files.safe_pickle import ImportRefusal, PlainUnpickler, UnsafePickleError, printable

BUFFER = 1 << 16
_PICKLE = b"\x80"
_MARKS = (b"pg_config", b"pg_status", b"profiling_name", b"nccl_comm_state")
"""Keys that every dump has one of in its first kilobytes, and nothing else has."""
_KEYS = frozenset({"entries", "pg_config", "pg_status", "nccl_comm_state"})
_GARBLED = (
    pickle.UnpicklingError,
    ValueError,
    TypeError,
    IndexError,
    KeyError,
    AttributeError,
    OverflowError,
    ImportError,
    NotImplementedError,
    AssertionError,
    RecursionError,
    struct.error,
)
"""What the unpickler raises for bytes that make no sense."""


class LoadedDump(NamedTuple):
    """The values of a dump. ``breaks_off``: after how many bytes the file ends before the dump does; else ``None``."""

    values: Mapping[str, object]
    breaks_off: int | None = None


def looks_like_dump(head: bytes) -> bool:
    """Whether a file that begins so is a dump of the flight recorder, as pickle or JSON. ``head``: its first 64 KiB."""
    if head.startswith(_PICKLE):
        return any(mark in head for mark in _MARKS)
    return _is_json(head) and any(b'"' + mark + b'":' in re.sub(rb"\s", b"", head) for mark in _MARKS)


def load_values(data: bytes) -> LoadedDump:
    """The plain values of a dump, from pickle or JSON.

    Raises:
        UnusableError: it is hostile, broken off before anything of use, or no dump.
    """
    loaded = _load_json(data) if _is_json(data) else _load_pickle(data)
    values = {"entries": loaded.values} if isinstance(loaded.values, list) else loaded.values
    if not isinstance(values, dict) or not _KEYS.intersection(key for key in values if isinstance(key, str)):
        raise UnusableError("it is no dump of torch's flight recorder: it has neither entries nor groups")
    return LoadedDump(values, loaded.breaks_off)


def _is_json(data: bytes) -> bool:
    return data[:100].lstrip()[:1] in (b"{", b"[")


def _load_json(data: bytes) -> LoadedDump:
    try:
        return LoadedDump(msgspec.json.decode(data))
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        if "truncated" in str(error):
            raise UnusableError(f"the JSON breaks off after {len(data)} bytes") from None
        raise UnusableError(f"it is no JSON: {error}") from None


def _load_pickle(data: bytes) -> LoadedDump:
    try:
        # Without a buffer that can be peeked into, the unpickler calls for each of a hundred thousand opcodes.
        return LoadedDump(PlainUnpickler(io.BufferedReader(io.BytesIO(data), BUFFER)).load())
    except UnsafePickleError as error:
        raise UnusableError(f"it tries to load {printable(str(error))}: nothing was run") from None
    except MemoryError:
        raise UnusableError("it asks for more memory than a dump can need") from None
    except (EOFError, *_GARBLED) as error:
        if _is_broken_off(error) and (rest := _salvaged(data)) is not None:
            return LoadedDump(rest, len(data))
        how = f"the pickle breaks off after {len(data)} bytes" if _is_broken_off(error) else "it is no pickle"
        raise UnusableError(how if _is_broken_off(error) else f"{how}: {printable(str(error))}") from None


def _is_broken_off(error: BaseException) -> bool:
    """Whether the unpickler came to the end of the file, by its words: it raises the same for other reasons."""
    return isinstance(error, EOFError) or "truncated" in str(error) or "exhausted" in str(error)


# Of a dump that breaks off.


class _PythonUnpickler(ImportRefusal, pickle._Unpickler):
    """The unpickler in Python: it shows what it has on its stack when the bytes end."""

    stack: list[object]
    metastack: list[list[object]]


def _salvaged(data: bytes) -> Mapping[str, object] | None:
    """What a dump held before it broke off. Entries come last in it, oldest first, so those that are there say where
    the rank waits, and the counters before them how far it came; without counters nothing can be said."""
    unpickler = _PythonUnpickler(io.BytesIO(data))
    try:
        unpickler.load()
    except (EOFError, MemoryError, *_GARBLED, UnsafePickleError):
        pass
    levels: list[list[object]] = [*getattr(unpickler, "metastack", ()), getattr(unpickler, "stack", [])]
    outer = next((level for level in levels if _names(level) & _KEYS), [])
    found: dict[str, object] = {key: value for key, value in _pairs(outer) if key in _KEYS or key == "version"}
    found["entries"] = [one for level in levels for one in level if isinstance(one, dict) and "profiling_name" in one]
    return found if isinstance(found.get("pg_status"), dict) else None


def _names(level: list[object]) -> set[str]:
    return {one for one in level if isinstance(one, str)}


def _pairs(level: list[object]) -> Iterator[tuple[str, object]]:
    """Keys and values that wait on the stack to become a dictionary."""
    start = next(place for place, one in enumerate(level) if isinstance(one, str)) if _names(level) else len(level)
    for position in range(start, len(level) - 1, 2):
        if isinstance(key := level[position], str):
            yield key, level[position + 1]
