"""Digest of a dataset's attributes, to compare datasets of ranks without reading a sample.

Attributes are read from memory, so that no user code runs: plain values, paths, arrays (some of their values),
containers (their ends), and objects made of these. Opaque objects (an open file, a table of a C library) may hold
anything, so a dataset with one gets no digest.
"""

from __future__ import annotations

import datetime
import enum
import functools
import hashlib
import itertools
import re
import struct
import types
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import PurePath
from typing import Any

from doctor.monitor.telemetry.data.batch_fingerprint import is_tensor

MOST_NODES = 2000
MOST_DEPTH = 14
MOST_VALUES = 64
"""Values of an array that are read; it may be memory-mapped."""
ENDS = 16
"""Items at each end of a container that are read."""
MOST_SORTED = 10_000

_STATELESS = frozenset(
    ("Generator", "RandomState", "Random", "device", "lock", "RLock", "Logger", "local", "module", "ReferenceType")
)
"""Classes whose objects may differ between ranks and say nothing about data."""
_TRANSFORMING = frozenset(("albumentations", "sentencepiece", "tiktoken", "tokenizers", "transformers"))


class _OpaqueError(Exception):
    """An object that cannot be read."""


def fingerprint(*things: object) -> str | None:
    """Return a digest, equal for equal things in any process; ``None`` if one is opaque."""
    reader = _AttributeReader()
    try:
        for thing in things:
            reader.read(thing, 0)
    except (_OpaqueError, RecursionError):
        return None
    return reader.hasher.hexdigest()


class _AttributeReader:
    def __init__(self) -> None:
        self.hasher = hashlib.blake2b(digest_size=8)
        self._nodes = 0
        self._inside: set[int] = set()

    def read(self, thing: Any, depth: int) -> None:
        self._nodes += 1
        if self._nodes > MOST_NODES or depth > MOST_DEPTH:
            raise _OpaqueError
        if id(thing) in self._inside:
            self._put("again")
            return
        if (text := _text(thing)) is not None:
            self._put(text)
            return
        self._inside.add(id(thing))
        self._put(type(thing).__name__)
        for part in _parts(thing):
            self.read(part, depth + 1)
        self._put("end")
        self._inside.discard(id(thing))

    def _put(self, text: str) -> None:
        self.hasher.update(text.encode("utf-8", "replace") + b"\0")


def _text(thing: Any) -> str | None:
    kind = type(thing)
    if kind in (str, bytes):
        return f"{len(thing)}:{thing[:200]!r}{thing[-200:]!r}"
    if kind is int:
        return f"{thing:x}"
    if thing is None or kind in _SHOWN or (kind.__module__ == "torch" and kind.__name__ in ("dtype", "Size")):
        return repr(thing)
    if isinstance(thing, (type, types.BuiltinFunctionType)):
        return thing.__qualname__
    if isinstance(thing, enum.Enum):
        return f"{kind.__name__}.{thing.name}"
    if isinstance(thing, PurePath):
        return str(thing)
    # Tokenizers and modules transform samples and hold none.
    is_transform = kind.__module__.partition(".")[0] in _TRANSFORMING or any(
        base.__name__ == "Module" and base.__module__ == "torch.nn.modules.module" for base in kind.__mro__
    )
    return f"a {kind.__name__}" if kind.__name__ in _STATELESS or is_transform else None


def _parts(thing: Any) -> Sequence[Any]:
    """Return the parts of an object, in an order that is equal in every process."""
    for base, parts in _PARTS:
        # A class that overrides how its base is read would run user code.
        if isinstance(thing, base) and all(
            getattr(type(thing), name, None) is getattr(base, name, None) for name in _READING
        ):
            return parts(thing)
    if is_tensor(thing):
        return _of_tensor(thing)
    if type(thing).__module__.partition(".")[0] == "numpy":
        return _of_array(thing)
    return _of_object(thing)


def _of_sequence(items: Any) -> Sequence[Any]:
    if len(items) <= 2 * ENDS:
        return (len(items), *items)
    return (len(items), *items[:ENDS], *items[-ENDS:])


def _of_mapping(items: dict[Any, Any]) -> Sequence[Any]:
    keys = list(itertools.islice(items, ENDS))
    if len(items) > ENDS:
        keys += list(itertools.islice(reversed(items), ENDS))
    return (len(items), *itertools.chain.from_iterable((key, items[key]) for key in keys))


def _of_set(items: Any) -> Sequence[Any]:
    """Return the sorted items: the order of a set of strings differs between processes."""
    if len(items) > MOST_SORTED or not all(type(item) in (str, int) for item in items):
        raise _OpaqueError
    return _of_sequence(sorted(items, key=str))


def _of_function(function: types.FunctionType) -> Sequence[Any]:
    return (function.__qualname__, *(_content(cell) for cell in function.__closure__ or ()))


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return "empty"


def _of_tensor(tensor: Any) -> Sequence[Any]:
    if not tensor.is_cpu:
        raise _OpaqueError
    shape = tuple(tensor.shape)
    places = range(0, tensor.numel(), _step(tensor.numel()))
    return (str(tensor.dtype), *shape, *(tensor.detach()[_row(place, shape)].item() for place in places))


def _row(place: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the index of the ``place``-th value of an array of this shape."""
    row = []
    for size in reversed(shape):
        place, here = divmod(place, size)
        row.append(here)
    return tuple(reversed(row))


def _of_array(array: Any) -> Sequence[Any]:
    """Return the parts of an array; a memory-mapped file is identified by name and offset."""
    if not hasattr(array, "dtype") or not hasattr(array, "flat"):
        return (repr(array),)
    head = (str(array.dtype), *array.shape)
    if type(array).__name__ == "memmap":
        return (*head, str(array.filename), array.offset)
    values = [array.flat[place] for place in range(0, array.size, _step(array.size))]
    return (*head, *(value.item() if hasattr(value, "item") else value for value in values))


def _of_object(thing: Any) -> Sequence[Any]:
    """Return the attributes of a Python object; Hugging Face datasets have their own digest."""
    kind = type(thing)
    attributes: Any = getattr(thing, "__dict__", None)
    slots = any(vars(one).get("__slots__") for one in kind.__mro__)
    if type(attributes) is not dict or kind.__basicsize__ > _BARE or slots:
        raise _OpaqueError
    if kind.__module__.partition(".")[0] == "datasets" and type(attributes.get("_fingerprint")) is str:
        return (attributes["_fingerprint"],)
    names = sorted(attributes, key=str)
    return tuple(itertools.chain.from_iterable((name, attributes[name]) for name in names))


def _step(size: int) -> int:
    return max(1, -(-size // MOST_VALUES)) | 1


_SHOWN = (bool, float, complex, range, slice, re.Pattern, datetime.datetime, datetime.date, datetime.timedelta)
_READING = ("__getitem__", "__len__", "__iter__")
_BARE = object.__basicsize__ + 2 * struct.calcsize("P")
"""The size of an object with attributes only; a larger one has state that only its own code can read."""
_PARTS: tuple[tuple[type, Callable[[Any], Sequence[Any]]], ...] = (
    (list, _of_sequence),
    (tuple, _of_sequence),
    (OrderedDict, _of_mapping),
    (dict, _of_mapping),
    (set, _of_set),
    (frozenset, _of_set),
    (types.FunctionType, _of_function),
    (types.MethodType, lambda method: (method.__func__.__qualname__, method.__self__)),
    (functools.partial, lambda partial: (partial.func, partial.args, partial.keywords)),
)
