"""Decoding of flight-recorder dumps into plain values.

No code is executed: dumps of every torch release hold only numbers, text, lists and dictionaries, so the unpickler
refuses every class and function.
"""

from __future__ import annotations

import io
import pickle
import re
import struct
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from doctor.core.errors import UnusableError
from doctor.core.files.safe_pickle import ImportRefusal, PlainUnpickler, UnsafePickleError, printable

BUFFER = 1 << 16
_PICKLE = b"\x80"
_MARKS = (b"pg_config", b"pg_status", b"profiling_name", b"nccl_comm_state")
"""Keys of which every dump, and nothing else, has one in its first kilobytes."""
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
"""Exceptions of the unpickler for garbled bytes."""


class LoadedDump(NamedTuple):
    """The values of a dump. ``breaks_off``: size of the file if it is truncated; else ``None``."""

    values: Mapping[str, object]
    breaks_off: int | None = None


def looks_like_dump(head: bytes) -> bool:
    """Return whether a file with this beginning is a flight-recorder dump, as pickle or JSON."""
    if head.startswith(_PICKLE):
        return any(mark in head for mark in _MARKS)
    return _is_json(head) and any(b'"' + mark + b'":' in re.sub(rb"\s", b"", head) for mark in _MARKS)


def load_values(data: bytes) -> LoadedDump:
    """Decode a dump in pickle or JSON. Raises :class:`UnusableError` if it is hostile, truncated or not a dump."""
    loaded = _load_json(data) if _is_json(data) else _load_pickle(data)
    values = {"entries": loaded.values} if isinstance(loaded.values, list) else loaded.values
    if not isinstance(values, dict) or not _KEYS.intersection(key for key in values if isinstance(key, str)):
        raise UnusableError("it is not a dump of the flight recorder: it has neither entries nor groups")
    return LoadedDump(values, loaded.breaks_off)


def _is_json(data: bytes) -> bool:
    return data[:100].lstrip()[:1] in (b"{", b"[")


def _load_json(data: bytes) -> LoadedDump:
    try:
        return LoadedDump(msgspec.json.decode(data))
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        if "truncated" in str(error):
            raise UnusableError(f"the JSON breaks off after {len(data)} bytes") from None
        raise UnusableError(f"it is not valid JSON: {error}") from None


def _load_pickle(data: bytes) -> LoadedDump:
    try:
        # Without a buffer to peek into, the unpickler would call read for each of a hundred thousand opcodes.
        return LoadedDump(PlainUnpickler(io.BufferedReader(io.BytesIO(data), BUFFER)).load())
    except UnsafePickleError as error:
        raise UnusableError(f"it tries to load {printable(str(error))}: nothing was run") from None
    except MemoryError:
        raise UnusableError("it asks for more memory than a dump can need") from None
    except (EOFError, *_GARBLED) as error:
        # The unpickler raises the same types for other errors; only the text names the end of the file.
        if not (isinstance(error, EOFError) or "truncated" in str(error) or "exhausted" in str(error)):
            raise UnusableError(f"it is not a pickle: {printable(str(error))}") from None
        if (rest := _salvaged(data)) is not None:
            return LoadedDump(rest, len(data))
        raise UnusableError(f"the pickle breaks off after {len(data)} bytes") from None


# Truncated dumps.


class _PythonUnpickler(ImportRefusal, pickle._Unpickler):
    """The unpickler in Python, whose stack can be read after the data ended."""

    stack: list[object]
    metastack: list[list[object]]


def _salvaged(data: bytes) -> Mapping[str, object] | None:
    """Return the content of a truncated dump; ``None`` without the counters before the entries.

    Entries are last, oldest first: those that are left show where the rank waits, the counters its progress.
    """
    unpickler = _PythonUnpickler(io.BytesIO(data))
    try:
        unpickler.load()
    except (EOFError, MemoryError, *_GARBLED, UnsafePickleError):
        pass
    levels: list[list[object]] = [*getattr(unpickler, "metastack", ()), getattr(unpickler, "stack", [])]
    found: dict[str, object] = {}
    for level in levels:
        names = [place for place, one in enumerate(level) if isinstance(one, str)]
        if any(level[place] in _KEYS for place in names):
            # From the first name on, the keys and values of the unfinished dictionary alternate.
            pairs = zip(level[names[0] :: 2], level[names[0] + 1 :: 2], strict=False)
            found = {key: value for key, value in pairs if isinstance(key, str) and key in {*_KEYS, "version"}}
            break
    found["entries"] = [one for level in levels for one in level if isinstance(one, dict) and "profiling_name" in one]
    return found if isinstance(found.get("pg_status"), dict) else None
