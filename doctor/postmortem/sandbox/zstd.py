"""Decompression of zstd archives in bounded pieces, by Python 3.14 or its backport.

Both refuse windows above 128 MiB. A truncated archive is an error.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

MAGIC = b"\x28\xb5\x2f\xfd"
"""The first bytes of a frame."""
PIECE = 1 << 17
"""Size of a decompressed piece in bytes: that of a block (RFC 8878)."""
_SKIPPED = range(0x184D2A50, 0x184D2A60)
_READ = 1 << 14


class ZstdDataError(Exception):
    """The archive cannot be read any further; the message is the reason."""


def unpack(take: Callable[[int], bytes]) -> Iterator[bytes]:
    """Decompress all frames; ``take(most)`` returns the next bytes. Raises :class:`ZstdDataError`."""
    module = _module()
    if module is None:
        raise ZstdDataError("it is packed with zstd, which the Python package backports.zstd unpacks")
    data = _at_least(b"", 4, take)
    try:
        while data:
            if data[:4] != MAGIC and int.from_bytes(data[:4], "little") not in _SKIPPED:
                raise ZstdDataError("bytes that are not zstd follow its archive")
            frame = module.ZstdDecompressor()
            yield from _frame(frame, data, take)
            data = _at_least(frame.unused_data, 4, take)
    except module.ZstdError as error:
        raise ZstdDataError("its zstd data is damaged") from error


def _frame(frame: Any, data: bytes, take: Callable[[int], bytes]) -> Iterator[bytes]:
    while True:
        piece: bytes = frame.decompress(data, max_length=PIECE)
        if piece:
            yield piece
        if frame.eof:
            return
        data = take(_READ) if frame.needs_input else b""
        if frame.needs_input and not data:
            raise ZstdDataError("its zstd archive ends too early")


def _at_least(data: bytes, size: int, take: Callable[[int], bytes]) -> bytes:
    while len(data) < size and (more := take(_READ)):
        data += more
    return data


def _module() -> Any:
    """Import the decompressor; ``None`` if there is none."""
    for name in ("compression.zstd", "backports.zstd"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    return None
