"""Messages between processes as bytes: MessagePack records with bounded fields, and facts as compressed captures."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from doctor.core.capture import FILE_LIMIT, Capture, DecodedSections, EncodedSections, parse_capture, to_document
from doctor.core.decoding import prepared
from doctor.core.errors import UnusableError
from doctor.core.job import Member, build_job
from doctor.core.message_bounds import Number

M = TypeVar("M", bound=msgspec.Struct)

Token = Annotated[str, Meta(pattern=r"\A[0-9a-f]{16}\Z")]
"""Random id that a process draws for itself."""
Nonce = Annotated[str, Meta(pattern=r"\A[0-9a-z]{1,32}\Z")]
"""Random id of a gather or of a run. It becomes part of store keys, which may be file paths."""
Count = Number


class MalformedMessage(Exception):
    """Bytes in the store are not a valid message of the expected kind."""


def encode(message: msgspec.Struct) -> bytes:
    """The message as bytes."""
    return msgspec.msgpack.encode(message)


def decode(data: bytes, kind: type[M]) -> M:
    """The message of that ``kind``. Raises :class:`MalformedMessage` if the bytes are not one."""
    try:
        return msgspec.msgpack.decode(data, type=prepared(kind))
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise MalformedMessage(str(error)) from None


def decode_or_none(data: bytes | None, kind: type[M]) -> M | None:
    """The message of that ``kind``, or ``None`` if the bytes are not one."""
    try:
        return decode(data, kind) if data else None
    except MalformedMessage:
        return None


def decode_all(entries: Iterable[bytes], kind: type[M]) -> list[M]:
    """The mailbox entries that are messages of that ``kind``."""
    return [message for data in entries if (message := decode_or_none(data, kind)) is not None]


def pack_member(member: Member, encoded: EncodedSections | None = None) -> bytes:
    """The facts of one process, as its capture, compressed. ``encoded``: sections that were packed before."""
    return zlib.compress(msgspec.json.encode(to_document(build_job([member]), encoded=encoded)), 1)


def unpack_capture(data: bytes, name: str, decoded: DecodedSections | None = None) -> Capture:
    """The inverse of :func:`pack_member`; ``decoded``: as in :func:`.parse_capture`.

    Raises:
        MalformedMessage: it is damaged or too large.
    """
    inflate = zlib.decompressobj()
    try:
        plain = inflate.decompress(data, FILE_LIMIT >> 6)
    except zlib.error as error:
        raise MalformedMessage(f"{name}: {error}") from None
    if not inflate.eof:
        raise MalformedMessage(f"{name} is truncated or too large")
    try:
        return parse_capture(plain, name, masked=True, decoded=decoded)
    except (UnusableError, UnicodeError) as error:
        raise MalformedMessage(f"{name}: {error}") from None
