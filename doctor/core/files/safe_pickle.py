"""Loads pickles of plain values: numbers, text, lists, dictionaries. A pickle that imports anything is rejected
without executing any of it."""

from __future__ import annotations

import io
import pickle
from typing import BinaryIO, NoReturn

from doctor.core.errors import UnusableError

PROTOCOLS = frozenset(range(2, 6))
"""First bytes of pickles that begin with their protocol: torch writes 2 (C++) and 4 (Python)."""

_BROKEN = (
    pickle.UnpicklingError,
    EOFError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
"""Exceptions that a truncated or corrupt pickle raises."""


def is_pickle(head: bytes) -> bool:
    """Whether a file that begins with these bytes is a pickle of protocol 2 or later."""
    return head[:1] == b"\x80" and len(head) > 1 and head[1] in PROTOCOLS


def load_plain(source: bytes | BinaryIO, *, limit: int) -> object:
    """Return the plain values in a pickle of at most ``limit`` bytes; they take about 5 times as much memory.

    Raises:
        UnusableError: it is too large, imports something, or is truncated or corrupt.
    """
    stream = io.BytesIO(source) if isinstance(source, bytes) else source
    size = stream.seek(0, io.SEEK_END)
    stream.seek(0)
    if size > limit:
        raise UnusableError(f"it has {size >> 20} MiB, more than the {limit >> 20} MiB that are read")
    try:
        return PlainUnpickler(stream).load()
    except UnsafePickleError as error:
        where = f"the pickle is hostile or of another kind: it wants to import {printable(str(error), 100)}"
        raise UnusableError(f"{where}; nothing was run") from None
    except _BROKEN as error:
        words = printable(str(error), 100) or type(error).__name__
        raise UnusableError(f"the pickle is cut short or garbled: {words}") from None
    except MemoryError:
        raise UnusableError("the pickle claims more memory than there is") from None


class UnsafePickleError(Exception):
    """The pickle imports or calls something."""


class ImportRefusal:
    """Base of unpicklers without access to any class or function."""

    def find_class(self, module: str, name: str) -> NoReturn:
        """Reject the import."""
        raise UnsafePickleError(f"{module}.{name}")

    def persistent_load(self, pid: object) -> NoReturn:
        """Reject the reference."""
        raise UnsafePickleError("an object from outside")


class PlainUnpickler(ImportRefusal, pickle.Unpickler):
    """The C implementation."""


def printable(words: str, most: int = 200) -> str:
    """The message, truncated, because it may quote content of the pickle."""
    return "".join(letter if letter.isprintable() else "?" for letter in words[:most])
