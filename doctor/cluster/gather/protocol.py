"""What ranks tell one another while they gather: small typed records, as MessagePack."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from doctor.core.capture import FILE_LIMIT, Capture, parse_capture, to_document
from doctor.core.errors import UnusableError
from doctor.core.job import Member, build_job
from doctor.core.message_bounds import MOST_RANKS, Name, Number, Port, Seconds, Word

M = TypeVar("M", bound=msgspec.Struct)

Token = Annotated[str, Meta(pattern=r"\A[0-9a-f]{16}\Z")]
"""Of a process, drawn by itself."""
Nonce = Annotated[str, Meta(pattern=r"\A[0-9a-z]{1,32}\Z")]
"""Of a gathering. It becomes part of the names on the board, which may be paths."""
Count = Number
Code = Annotated[int, Meta(ge=0, lt=1 << 8)]
Packed = Annotated[bytes, Meta(max_length=16 << 20)]
"""The facts of one process, compressed; see :data:`doctor.core.capture.RANK_LIMIT`."""
OrderBytes = Annotated[bytes, Meta(max_length=32 << 20)]
"""An order: the members of a group of a million ranks take five bytes each, along a few axes."""
Note = Annotated[bytes, Meta(max_length=64 << 10)]
Stage = Annotated[str, Meta(pattern=r"\A[a-z]{1,32}\Z")]


MOST_STEPS = 40
"""Of all stages of a survey together: none plans for ever."""


class MalformedMessage(Exception):
    """Bytes on the board that are none of ours."""


class GatherAnnouncement(msgspec.Struct, frozen=True):
    """Opens a gathering. ``nonce`` names it; ``number`` is the rank that keeps it; ``seconds`` until it is closed."""

    nonce: Nonce
    number: Count
    seconds: Seconds


class JoinRequest(msgspec.Struct, frozen=True):
    """Said on arrival, before the facts are there. ``token`` tells processes apart that claim one rank."""

    token: Token
    number: Count
    host: Name


class MemberFacts(msgspec.Struct, frozen=True):
    """A process and its facts. ``twins``: processes of its host that claim the same rank and may still be on their way.
    ``port`` and ``word``: where it answers probes for its host, if it does."""

    token: Token
    number: Count
    capture: Packed
    twins: Count = 0
    port: Port | None = None
    word: Word = ""


class ProbeTask(msgspec.Struct, frozen=True):
    """What one process is to measure next. ``step`` counts the tasks of a gathering from 1; ``seconds``: for all."""

    step: Count
    stage: Stage
    seconds: Seconds
    order: OrderBytes = b""


class ProbeResult(msgspec.Struct, frozen=True):
    """What the probes of one process gave for the task of that ``step``: the sections of a capture, and a note for
    whoever plans."""

    token: Token
    number: Count
    capture: Packed
    step: Count = 1
    note: Note = b""


TOKEN_PREFIX_BYTES = 3
"""Bytes of a token that stand for it in a verdict, which sixteen thousand processes read: chance takes one latecomer of
a thousand for a member of the roll."""


class GatherVerdict(msgspec.Struct, frozen=True):
    """How all leave: the exit code. ``judged``: the first bytes of the tokens of those that were judged, joined."""

    code: Code
    judged: Annotated[bytes, Meta(max_length=TOKEN_PREFIX_BYTES * MOST_RANKS)] = b""

    @classmethod
    def of(cls, code: int, tokens: Iterable[str]) -> GatherVerdict:
        """The verdict on the processes with these tokens."""
        return cls(code, b"".join(sorted(bytes.fromhex(token)[:TOKEN_PREFIX_BYTES] for token in tokens)))

    def covers(self, token: str) -> bool:
        """Whether the process with that token was judged."""
        prints = {self.judged[at : at + TOKEN_PREFIX_BYTES] for at in range(0, len(self.judged), TOKEN_PREFIX_BYTES)}
        return bytes.fromhex(token)[:TOKEN_PREFIX_BYTES] in prints


class GatherClosed(msgspec.Struct, frozen=True):
    """The gathering that ended last, for those who were too slow to see its verdict."""

    nonce: Nonce
    verdict: GatherVerdict


def closed_marker(nonce: str) -> bytes:
    """What stands in the place of the call of a gathering that is over. Short: many may look at it for a while."""
    return b"ended " + nonce.encode()


def encode(message: msgspec.Struct) -> bytes:
    """The message as bytes."""
    return msgspec.msgpack.encode(message)


def decode(data: bytes, kind: type[M]) -> M:
    """The message of that ``kind``.

    Raises:
        Unreadable: it is none.
    """
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise MalformedMessage(str(error)) from None


def pack_member(member: Member) -> bytes:
    """The facts of one process, as its capture, compressed."""
    return zlib.compress(msgspec.json.encode(to_document(build_job([member]))), 1)


def unpack_capture(data: bytes, name: str) -> Capture:
    """The inverse of :func:`pack_member`.

    Raises:
        Unreadable: it is damaged, or larger than any capture.
    """
    inflate = zlib.decompressobj()
    try:
        plain = inflate.decompress(data, FILE_LIMIT >> 6)
    except zlib.error as error:
        raise MalformedMessage(f"{name}: {error}") from None
    if not inflate.eof:
        raise MalformedMessage(f"{name} is cut off or too large")
    try:
        return parse_capture(plain, name, masked=True)
    except (UnusableError, UnicodeError) as error:
        raise MalformedMessage(f"{name}: {error}") from None
