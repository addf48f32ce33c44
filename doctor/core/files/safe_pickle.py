"""Pickles of plain values: numbers, text, lists, dictionaries. One that wants to import anything is refused, and
nothing of it is run."""

from __future__ import annotations

import io
import pickle
from typing import BinaryIO, NoReturn

from doctor.core.errors import UnusableError

PROTOCOLS = frozenset(range(2, 6))
"""Of pickles that begin with their protocol: torch writes 2 (from C++) and 4 (from Python)."""

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
"""What a pickle that is cut short or garbled ends in."""


def is_pickle(head: bytes) -> bool:
    """Whether a file that begins so is a pickle of protocol 2 or later."""
    return head[:1] == b"\x80" and len(head) > 1 and head[1] in PROTOCOLS


def load_plain(source: bytes | BinaryIO, *, limit: int) -> object:
    """The plain values in a pickle.

    Args:
        source: its bytes, or a file that is open at its beginning.
        limit: bytes that it may have at most. What is loaded takes some 5 times as much.

    Raises:
        UnusableError: it is too large, it names something to import, or it is cut short or garbled.
    """
    stream = io.BytesIO(source) if isinstance(source, bytes) else source
    size = len(source) if isinstance(source, bytes) else _size(stream)
    if size > limit:
        raise UnusableError(f"it has {size >> 20} MiB, more than the {limit >> 20} MiB that are read")
    try:
        return PlainUnpickler(stream).load()
    except UnsafePickleError as error:
        where = f"the pickle is hostile or of another kind: it wants to import {printable(str(error), 100)}"
        raise UnusableError(f"{where}; nothing was run") from None
    except _BROKEN as error:
        raise UnusableError(f"the pickle is cut short or garbled: {_words(error)}") from None
    except MemoryError:
        raise UnusableError("the pickle claims more memory than there is") from None


class UnsafePickleError(Exception):
    """The pickle asks for something to be imported or called."""


class ImportRefusal:
    """For an unpickler that has no way to any class or function."""

    def find_class(self, module: str, name: str) -> NoReturn:
        """Refuse it."""
        raise UnsafePickleError(f"{module}.{name}")

    def persistent_load(self, pid: object) -> NoReturn:
        """Refuse it."""
        raise UnsafePickleError("an object from outside")


class PlainUnpickler(ImportRefusal, pickle.Unpickler):
    """The one in C."""


def printable(words: str, most: int = 200) -> str:
    """At most so many characters of a message, which may quote what stands in a pickle."""
    return "".join(letter if letter.isprintable() else "?" for letter in words[:most])


def _size(stream: BinaryIO) -> int:
    place = stream.tell()
    end = stream.seek(0, io.SEEK_END)
    stream.seek(place)
    return end - place


def _words(error: BaseException) -> str:
    return printable(str(error), 100) or type(error).__name__
