"""Agreement of all ranks on one namespace in the store, whatever earlier runs left there.

Every rank posts a random token and is admitted once a leader lists that very token, which leftovers of an earlier run
cannot do. Rank 0 leads; another rank takes over if rank 0 does not answer.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from doctor.cluster.transport.codec import decode_all, decode_or_none, encode
from doctor.cluster.transport.failover import StoreConnection
from doctor.cluster.transport.store import Mailbox
from doctor.monitor.watchdog.protocol import AdmissionToken, LeaderClaim, MemberList

LEAD = 10.0
"""Seconds without an answer after which a rank other than 0 leads."""
IN_TURN, TURNS = 0.25, 20
"""Additional seconds per rank before it leads, and the number of ranks this applies to."""
ANSWER, ANSWER_PER_RANK = 1.5, 1 / 2000
"""Seconds for an apparent leader to answer, which polls once a tick; most likely it belongs to an earlier run."""
RETRY = 5.0
"""Seconds until a token is posted again: the end of an earlier run may have cleared the folder since."""


class RunNamespace(NamedTuple):
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


class AdmissionRequest:
    """The search of one rank for its peers. ``own``: the namespace it uses alone or as leader."""

    def __init__(self, rank: int, world_size: int, own: RunNamespace, now: float) -> None:
        self._rank = rank
        self._patience = ANSWER + ANSWER_PER_RANK * world_size
        self._own = own
        self._token = secrets.token_hex(8)
        self._began = now
        self._post_at: dict[StoreConnection, float] = {}
        self._claims_seen: dict[StoreConnection, tuple[bytes, float]] = {}

    def step(self, connections: Sequence[StoreConnection], now: float) -> RunNamespace | None:
        """Return the namespace once this rank is admitted or leads."""
        claims = {connection: connection.get(f"{connection.admission_prefix}/lead") for connection in connections}
        answers = (self._answer(connection, data) for connection, data in claims.items())
        if (namespace := next((answer for answer in answers if answer), None)) is not None:
            return namespace
        if self._leads_now(claims, now):
            won = [_claim(connection, data, self._own) for connection, data in claims.items()]
            return self._own if any(won) else None
        self._post_token(connections, now)
        return None

    def _answer(self, connection: StoreConnection, claim: bytes | None) -> RunNamespace | None:
        lead = decode_or_none(claim, LeaderClaim)
        members = decode_or_none(connection.get(f"{lead.place}/roll"), MemberList) if lead else None
        return RunNamespace(members.run, lead.place) if lead and members and members.covers(self._token) else None

    def _leads_now(self, claims: Mapping[StoreConnection, bytes | None], now: float) -> bool:
        """Return whether rank 0 is overdue and an apparent leader has had time to answer."""
        for connection, lead in claims.items():
            if lead is not None and self._claims_seen.get(connection, (None, 0.0))[0] != lead:
                self._claims_seen[connection] = (lead, now)
        if any(lead and now - self._claims_seen[connection][1] < self._patience for connection, lead in claims.items()):
            return False
        return self._rank == 0 or now - self._began >= LEAD + IN_TURN * min(self._rank, TURNS)

    def _post_token(self, connections: Sequence[StoreConnection], now: float) -> None:
        for connection in connections:
            if now >= self._post_at.get(connection, now):
                self._post_at[connection] = now + RETRY
                connection.append(
                    f"{connection.admission_prefix}/doorbell", encode(AdmissionToken(self._token, self._rank))
                )


def _claim(connection: StoreConnection, current: bytes | None, namespace: RunNamespace) -> bool:
    return bool(
        connection.exchange(f"{connection.admission_prefix}/lead", current, encode(LeaderClaim(namespace.name)))
    )


class AdmissionLeader:
    """Admits ranks on every connection for as long as the run lasts."""

    def __init__(self, namespace: RunNamespace) -> None:
        self._namespace = namespace
        self._tokens: set[str] = set()
        self._readers: dict[StoreConnection, Mailbox] = {}
        self._answered: dict[StoreConnection, int] = {}

    @property
    def admitted(self) -> int:
        """Number of tokens that were answered."""
        return len(self._tokens)

    def step(self, connections: Sequence[StoreConnection]) -> None:
        """Admit the ranks that posted a token on these connections since the last call."""
        for connection in connections:
            if connection not in self._readers:
                self._claim_connection(connection)
            self._tokens.update(
                posted.token for posted in decode_all(self._readers[connection].fresh(), AdmissionToken)
            )
        for connection in connections:
            if self._answered.get(connection) != len(self._tokens):
                self._answer(connection)

    def _answer(self, connection: StoreConnection) -> None:
        self._answered[connection] = len(self._tokens)
        tokens = b"".join(bytes.fromhex(token) for token in sorted(self._tokens))
        connection.set(f"{self._namespace.name}/roll", encode(MemberList(self._namespace.run, tokens)))

    def _claim_connection(self, connection: StoreConnection) -> None:
        self._readers[connection] = connection.mailbox(f"{connection.admission_prefix}/doorbell")
        current = connection.get(f"{connection.admission_prefix}/lead")
        lead = decode_or_none(current, LeaderClaim)
        if lead is None or lead.place != self._namespace.name:
            _claim(connection, current, self._namespace)
