"""Agreement of all ranks on one namespace in the store, whatever earlier runs left there.

Every rank requests to join each leader that is announced, and is admitted once a leader lists its random token, which
leftovers of an earlier run cannot do. Rank 0 leads; another rank takes over if no leader answers.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence

import msgspec

from doctor.cluster.membership.leadership import JoinAttempt, Leadership
from doctor.cluster.membership.protocol import (
    JOIN_REQUESTS,
    JoinRequest,
    LeaderAnnouncement,
    has_room,
    has_token,
    join_tokens,
)
from doctor.cluster.transport.codec import decode_all, decode_or_none, encode
from doctor.cluster.transport.failover import StoreConnection
from doctor.cluster.transport.signing import RejectedMessages
from doctor.cluster.transport.store import Mailbox
from doctor.monitor.watchdog.protocol import TOKEN_BYTES, MemberList

LEAD = 10.0
"""Seconds without an answer after which a rank other than 0 leads."""
IN_TURN, TURNS = 0.25, 20
"""Additional seconds per rank before it leads, and the number of ranks this applies to."""
ANSWER, ANSWER_PER_RANK = 1.5, 1 / 2000
"""Seconds for an apparent leader to answer, which polls once a tick; most likely it belongs to an earlier run."""
MEMBERS = "roll"
"""Key of the member list in the namespace."""


class RunNamespace(msgspec.Struct, frozen=True):
    """The namespace of a run in the store.

    ``run``: the id of the run; ``name``: prefix of all keys; ``leads``: whether this rank admits the others.
    """

    run: str
    name: str
    leads: bool = False


def own_namespace(rank: int, derived: str) -> RunNamespace:
    """Return the namespace of a rank that leads or that was not answered.

    Only rank 0 adds a random part to the run id, so ranks that cannot reach each other still agree on the ``derived``
    id.
    """
    return RunNamespace(f"{derived}-{secrets.token_hex(4)}" if rank == 0 else derived, secrets.token_hex(8), leads=True)


def announcement_key(connection: StoreConnection) -> str:
    """Return the key under which the leader of a run is announced."""
    return f"{connection.admission_prefix}/lead"


class AdmissionRequest:
    """The search of one rank for its peers.

    ``own``: the namespace it uses alone or as leader; ``rejected``: messages of others that were not authentic.
    """

    def __init__(
        self, rank: int, world_size: int, own: RunNamespace, now: float, rejected: RejectedMessages | None = None
    ) -> None:
        self._rank = rank
        self._patience = ANSWER + ANSWER_PER_RANK * world_size
        self._own = own
        self._request = JoinRequest(secrets.token_hex(TOKEN_BYTES), rank, "")
        self._began = now
        self._rejected = rejected
        self._attempts: dict[StoreConnection, JoinAttempt] = {}
        self._announced_at: dict[StoreConnection, float] = {}

    def step(self, connections: Sequence[StoreConnection], now: float) -> RunNamespace | None:
        """Return the namespace once this rank is admitted or leads."""
        for connection in connections:
            if connection not in self._attempts:
                key = announcement_key(connection)
                self._attempts[connection] = JoinAttempt(connection, key, self._request, self._rejected)
            if self._attempts[connection].look():
                self._announced_at[connection] = now
            if not connection.is_alive:  # the request may be lost with it: post it again
                del self._attempts[connection]
                continue
            leader = self._attempts[connection].announcement
            members = decode_or_none(connection.get(f"{leader.nonce}/{MEMBERS}"), MemberList) if leader else None
            if leader and members and has_token(members.tokens, self._request.token, TOKEN_BYTES):
                return RunNamespace(members.run, leader.nonce)
        known = {one: self._attempts[one].current for one in connections if one in self._attempts}
        if not self._leads_now(known, now):
            return None
        won = [leadership_on(one, self._own, self._rank).take_over(current) for one, current in known.items()]
        return self._own if any(won) else None

    def _leads_now(self, connections: Iterable[StoreConnection], now: float) -> bool:
        """Return whether rank 0 is overdue and an apparent leader has had time to answer."""
        for connection in connections:
            standing = self._attempts[connection].current is not None
            if standing and now - self._announced_at[connection] < self._patience:
                return False
        return self._rank == 0 or now - self._began >= LEAD + IN_TURN * min(self._rank, TURNS)


def leadership_on(connection: StoreConnection, namespace: RunNamespace, rank: int) -> Leadership:
    """Return the leadership of a rank that leads on a connection."""
    return Leadership(connection, announcement_key(connection), LeaderAnnouncement(namespace.name, rank))


class AdmissionLeader:
    """Admits ranks on every connection for as long as the run lasts."""

    def __init__(self, namespace: RunNamespace, rank: int, world_size: int) -> None:
        self._namespace = namespace
        self._rank = rank
        self._world_size = world_size
        self._tokens: set[str] = set()
        self._mailboxes: dict[StoreConnection, Mailbox] = {}
        self._answered: dict[StoreConnection, int] = {}

    @property
    def admitted(self) -> int:
        """Number of tokens that were answered."""
        return len(self._tokens)

    def step(self, connections: Sequence[StoreConnection]) -> None:
        """Admit the ranks that requested to join on these connections since the last call."""
        name = self._namespace.name
        for connection in connections:
            if connection not in self._mailboxes or self.admitted < self._world_size - 1:
                # Announce this rank, again if the end of an earlier run has removed the announcement.
                leadership = leadership_on(connection, self._namespace, self._rank)
                if not leadership.is_held() and connection not in self._mailboxes:
                    leadership.take_over(connection.get(announcement_key(connection)))
                self._mailboxes.setdefault(connection, connection.mailbox(f"{name}/{JOIN_REQUESTS}"))
            for request in decode_all(self._mailboxes[connection].fresh(), JoinRequest):
                if has_room(self._tokens, self._world_size):
                    self._tokens.add(request.token)
        for connection in connections:
            if self._answered.get(connection) != len(self._tokens):
                self._answered[connection] = len(self._tokens)
                members = MemberList(self._namespace.run, join_tokens(self._tokens, TOKEN_BYTES))
                connection.set(f"{name}/{MEMBERS}", encode(members))
