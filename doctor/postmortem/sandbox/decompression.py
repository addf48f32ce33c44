"""Decompression of files in constant memory: plain, gzip, zstd, xz or bzip2, distinguished by content."""

from __future__ import annotations

import io
import re
import zlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from doctor.core.files.read_deadline import NO_DEADLINE, ReadDeadline
from doctor.postmortem.sandbox import zstd

CHUNK = 1 << 20
"""Maximum size of a piece in bytes."""
MOST = 64 << 30
"""Maximum decompressed bytes that are read of one file."""
UNSUSPECTED = 128 << 20
"""Decompressed bytes up to which any ratio is accepted: they are read within seconds."""
RATIO = 250
"""Maximum compression ratio beyond that: logs of progress bars reach 100, gzip's limit is 1032."""

ZIP = (b"PK\x03\x04", b"PK\x05\x06")
"""Magic numbers of zip archives, the second one of an empty one."""
_TAR = b"ustar", 257
_GZIP = b"\x1f\x8b"
_XZ = b"\xfd7zXZ\0"
_BZIP2 = re.compile(rb"BZh[1-9](?:1AY&SY|\x17rE8P\x90)")
_HEAD = 10
"""Bytes by which the format is recognized."""
XZ_MEMORY = 256 << 20
"""Maximum memory for xz in bytes: ``xz -9`` needs 65 MiB."""
_READ = 1 << 16


class Readable(Protocol):
    """A source of bytes."""

    def read(self, most: int, /) -> bytes:
        """Return the next bytes; none at the end."""


class Unpacked:
    """The decompressed bytes of a file, in pieces of at most :data:`CHUNK`.

    ``size``: bytes of the file to read, without those appended later. ``taken``: bytes of the file that were read.
    After the last piece, ``cut`` is the reason why the file was not read to its end, and ``is_stopped`` tells whether
    the deadline was reached.
    """

    def __init__(self, stream: Readable, size: int, deadline: ReadDeadline = NO_DEADLINE) -> None:
        self._stream = stream
        self._deadline = deadline
        self.is_stopped = False
        self._left = size
        self.taken = 0
        self.cut: str | None = None

    def __iter__(self) -> Iterator[bytes]:
        """Iterate over the pieces, once."""
        head = self._take(_HEAD)
        if head.startswith(_GZIP):
            pieces = self._gzip(head)
        elif head.startswith(zstd.MAGIC):
            pieces = self._zstd(head)
        elif head.startswith(_XZ):
            pieces = self._members(head, "lzma", "xz")
        elif _BZIP2.match(head):
            pieces = self._members(head, "bz2", "bzip2")
        else:
            yield head
            while data := self._take(CHUNK):
                yield data
            return
        yield from self._bounded(pieces)

    def _take(self, most: int) -> bytes:
        if self._deadline.is_over:
            self.is_stopped = True
            return b""
        try:
            data = self._stream.read(min(most, self._left))
        except OSError as error:
            self.cut = f"it could not be read any further: {error.strerror or error}"
            data = b""
        self._left = self._left - len(data) if data else 0
        self.taken += len(data)
        return data

    def _bounded(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        size = 0
        for piece in pieces:
            size += len(piece)
            if size > MOST or (size > UNSUSPECTED and size > RATIO * self.taken):
                self.cut = f"it unpacks to more than {size >> 20} MiB from {self.taken} bytes"
                return
            yield piece

    def _gzip(self, data: bytes) -> Iterator[bytes]:
        """Decompress any number of members; anything else after a member ends the archive."""
        member = zlib.decompressobj(wbits=31)
        while data:
            try:
                piece = member.decompress(data, CHUNK)
            except zlib.error:
                self.cut = f"its gzip data is damaged before byte {self.taken}"
                return
            if piece:
                yield piece
            if member.eof:
                data = (member.unused_data or self._take(_READ)).lstrip(b"\0")
                if not data:
                    continue
                if not data.startswith(_GZIP[:1]):
                    self.cut = "bytes that are not gzip data follow its archive"
                    return
                member = zlib.decompressobj(wbits=31)
            else:
                data = member.unconsumed_tail or self._take(_READ)
        if not member.eof and self.cut is None:
            self.cut = "its gzip archive ends too early"

    def _members(self, data: bytes, module: str, name: str) -> Iterator[bytes]:
        """Decompress any number of members with a module of the standard library, which Python may lack."""
        try:
            start, error = _decompressor(module)
        except ImportError:
            self.cut = f"it is packed with {name}, and this Python has no module {module}"
            return
        member = start()
        while True:
            try:
                piece = member.decompress(data, CHUNK)
            except (OSError, EOFError, ValueError, MemoryError, error):
                self.cut = f"its {name} data is damaged before byte {self.taken}, or needs too much memory"
                return
            if piece:
                yield piece
            if member.eof:
                data = (member.unused_data or self._take(_READ)).lstrip(b"\0")
                if not data:
                    return
                member = start()
            else:
                data = self._take(_READ) if member.needs_input else b""
                if member.needs_input and not data:
                    self.cut = self.cut or f"its {name} archive ends too early"
                    return

    def _zstd(self, head: bytes) -> Iterator[bytes]:
        taken = iter((head,))
        try:
            yield from zstd.unpack(lambda most: next(taken, b"") or self._take(most))
        except zstd.ZstdDataError as error:
            self.cut = self.cut or str(error)


def _decompressor(module: str) -> tuple[Callable[[], Any], type[Exception]]:
    """Return what makes a decompressor, and its error. Raises :exc:`ImportError`."""
    if module == "bz2":
        import bz2

        return bz2.BZ2Decompressor, OSError
    import lzma

    return lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=XZ_MEMORY), lzma.LZMAError


def is_tar(head: bytes) -> bool:
    """Return whether ``head``, decompressed, is the beginning of a tar archive (POSIX.1-1988, or GNU tar)."""
    magic, place = _TAR
    return head[place : place + len(magic)] == magic


def is_packed(head: bytes) -> bool:
    """Return whether a file with this beginning is compressed."""
    return head.startswith((_GZIP, zstd.MAGIC, _XZ)) or _BZIP2.match(head) is not None


def beginning_of(head: bytes) -> bytes:
    """Return the first decompressed bytes of a compressed file with this beginning, as far as they can be read."""
    return next(iter(Unpacked(io.BytesIO(head), len(head))), b"")
