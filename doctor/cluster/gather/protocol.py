"""What ranks tell one another while they gather: small typed records, as MessagePack."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import msgspec
from msgspec import Meta

from doctor.cluster.transport.codec import Count, Nonce, Token
from doctor.core.message_bounds import MOST_RANKS, Name, Port, Seconds, Word

Code = Annotated[int, Meta(ge=0, lt=1 << 8)]
Packed = Annotated[bytes, Meta(max_length=16 << 20)]
"""The facts of one process, compressed; see :data:`doctor.core.capture.RANK_LIMIT`."""
OrderBytes = Annotated[bytes, Meta(max_length=32 << 20)]
"""An order: the members of a group of a million ranks take five bytes each, along a few axes."""
Note = Annotated[bytes, Meta(max_length=64 << 10)]
Stage = Annotated[str, Meta(pattern=r"\A[a-z]{1,32}\Z")]


MOST_STEPS = 40
"""Of all stages of a survey together: none plans for ever."""


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
