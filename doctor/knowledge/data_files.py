"""Read the data files of this package. Callers cache the result."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from doctor.core.decoding import prepared

T = TypeVar("T")


def read(name: str, shape: type[T]) -> T:
    """Return the JSON file ``name`` of this package as ``shape``. ``msgspec.ValidationError`` if it does not fit."""
    text = (Path(__file__).parent / name).read_bytes()
    return msgspec.json.decode(text, type=prepared(shape))
