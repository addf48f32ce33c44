"""Messages by which processes agree on a leader and on members, as MessagePack."""

from __future__ import annotations

from collections.abc import Iterable, Sized
from typing import Annotated

import msgspec
from msgspec import Meta

from doctor.cluster.transport.codec import Count, Nonce, Token
from doctor.core.message_bounds import Name, Seconds

JOIN_REQUESTS = "hello"
"""Mailbox of a leader, below its nonce."""
MOST_TIMES, SPARE = 4, 64
"""Limit of members: this multiple of the world size, and a few more. Two launches at once are twice."""


class LeaderAnnouncement(msgspec.Struct, frozen=True):
    """The leader and the prefix of all keys, which may be file paths.

    ``number``: rank of the leader; ``seconds`` until a gather is closed, 0 for a run.
    """

    nonce: Nonce
    number: Count
    seconds: Seconds = 0.0


class JoinRequest(msgspec.Struct, frozen=True):
    """Sent on joining, before facts are collected.

    ``token`` distinguishes processes with the same rank; ``host``: its name, for a sentence if no facts follow.
    """

    token: Token
    number: Count
    host: Name


class HeartbeatMessage(msgspec.Struct, frozen=True):
    """Heartbeat of the process with that rank; ``count`` changes each time."""

    number: Count
    count: Annotated[int, Meta(ge=0)] = 0


def has_room(members: Sized, world_size: int) -> bool:
    """Return whether another process may join, so that a flood of messages is bounded."""
    return len(members) < MOST_TIMES * world_size + SPARE


def join_tokens(tokens: Iterable[str], size: int) -> bytes:
    """Return the first ``size`` bytes of each token, joined in order."""
    return b"".join(sorted(bytes.fromhex(token)[:size] for token in tokens))


def has_token(joined: bytes, token: str, size: int) -> bool:
    """Return whether a token is among those that were joined with that ``size``."""
    return bytes.fromhex(token)[:size] in {joined[at : at + size] for at in range(0, len(joined), size)}
