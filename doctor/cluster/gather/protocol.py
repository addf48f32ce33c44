"""Messages between the ranks of a gather: small typed records, as MessagePack."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import msgspec
from msgspec import Meta

from doctor.cluster.membership.protocol import JoinRequest, has_token, join_tokens
from doctor.cluster.transport.codec import Count, Nonce, Token
from doctor.core.message_bounds import MOST_RANKS, Port, Seconds, Word

Code = Annotated[int, Meta(ge=0, lt=1 << 8)]
Packed = Annotated[bytes, Meta(max_length=16 << 20)]
"""The facts of one process, compressed; see :data:`doctor.core.capture.RANK_LIMIT`."""
OrderBytes = Annotated[bytes, Meta(max_length=32 << 20)]
"""An order: the members of a group of a million ranks take five bytes each, along a few axes."""
Note = Annotated[bytes, Meta(max_length=64 << 10)]
Stage = Annotated[str, Meta(pattern=r"\A[a-z]{1,32}\Z")]
ANNOUNCEMENT = "call"
"""Key of the announcement."""
HEARTBEAT_EVERY, MOST_MISSED = 1.0, 5
"""Seconds between heartbeats, and missed ones after which a coordinator counts as dead or stopped."""
MOST_STEPS = 40
"""Limit of the steps of all stages together, so that a gather ends."""


class MemberFacts(JoinRequest, frozen=True):
    """A member: the join request of a process, completed with its facts.

    ``duplicates``: processes of its host with the same rank that may still be joining. ``port`` and ``word``: where it
    answers probes for its host, if it does.
    """

    capture: Packed
    duplicates: Count = 0
    port: Port | None = None
    word: Word = ""


class ProbeTask(msgspec.Struct, frozen=True):
    """What one process is to measure next. ``step`` counts the tasks of a gather from 1; ``seconds``: for all."""

    step: Count
    stage: Stage
    seconds: Seconds
    order: OrderBytes = b""


class ProbeResult(msgspec.Struct, frozen=True):
    """Probe results of one process for the task ``step``: sections, and a note for the planner."""

    token: Token
    number: Count
    capture: Packed
    step: Count = 1
    note: Note = b""


TOKEN_PREFIX_BYTES = 3
"""Bytes of a token in a verdict, which sixteen thousand processes read.

By chance one latecomer in a thousand is mistaken for a member.
"""


class GatherVerdict(msgspec.Struct, frozen=True):
    """The exit code of all members. ``judged``: the token prefixes of those evaluated, joined."""

    code: Code
    judged: Annotated[bytes, Meta(max_length=TOKEN_PREFIX_BYTES * MOST_RANKS)] = b""

    @classmethod
    def of(cls, code: int, tokens: Iterable[str]) -> GatherVerdict:
        """Return the verdict on the processes with these tokens."""
        return cls(code, join_tokens(tokens, TOKEN_PREFIX_BYTES))

    def covers(self, token: str) -> bool:
        """Return whether the process with that token was evaluated."""
        return has_token(self.judged, token, TOKEN_PREFIX_BYTES)


class GatherClosed(msgspec.Struct, frozen=True):
    """The gather that ended last, for members that were too slow to read its verdict."""

    nonce: Nonce
    verdict: GatherVerdict


def closed_marker(nonce: str) -> bytes:
    """Return what replaces the announcement of a closed gather; short, because many processes may poll it."""
    return b"ended " + nonce.encode()
