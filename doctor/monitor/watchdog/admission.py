"""How ranks come to the same place on the board, whatever earlier runs left there.

Every rank rings with a token that it has just drawn, and is admitted where a leader answers that very token: nothing
that is left of an earlier run can. Rank 0 leads; another one does where rank 0 keeps everybody waiting.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from doctor.cluster.transport.codec import decode_all, decode_or_none, encode
from doctor.cluster.transport.failover import ConnectionReader, StoreConnection
from doctor.monitor.watchdog.protocol import AdmissionToken, LeaderClaim, MemberList

LEAD = 10.0
"""Seconds without an answer after which a rank other than 0 leads."""
IN_TURN, TURNS = 0.25, 20
"""Seconds by which each rank waits longer than the one before it, and for how many."""
ANSWER, ANSWER_PER_RANK = 1.5, 1 / 2000
"""Seconds for somebody who seems to lead already, and looks once a beat: most likely an earlier run's."""
RING = 5.0
"""Seconds until a bell is rung again: the end of an earlier run may have swept the folder since."""


class RunNamespace(NamedTuple):
    """Where the ranks of a run meet. ``run``: the id of the run; ``name``: what the names on the board begin with;
    ``leads``: this rank answers the bells."""

    run: str
    name: str
    leads: bool = False


def own_namespace(rank: int, derived: str) -> RunNamespace:
    """Of a rank that leads, or whom nobody answered. The id of the run has a drawn part only where rank 0 draws it:
    ranks that do not hear one another still agree on the ``derived`` one."""
    return RunNamespace(f"{derived}-{secrets.token_hex(4)}" if rank == 0 else derived, secrets.token_hex(8), leads=True)


class AdmissionRequest:
    """Of one rank that looks for the others. ``own``: the place that it has alone, or leads."""

    def __init__(self, rank: int, world_size: int, own: RunNamespace, now: float) -> None:
        self._rank = rank
        self._patience = ANSWER + ANSWER_PER_RANK * world_size
        self._own = own
        self._token = secrets.token_hex(8)
        self._began = now
        self._ring_at: dict[StoreConnection, float] = {}
        self._stood: dict[StoreConnection, tuple[bytes, float]] = {}

    def step(self, lines: Sequence[StoreConnection], now: float) -> RunNamespace | None:
        """The place, once this rank is admitted or leads."""
        standing = {line: line.get(f"{line.admission_prefix}/lead") for line in lines}
        answers = (self._answer(line, data) for line, data in standing.items())
        if (place := next((answer for answer in answers if answer), None)) is not None:
            return place
        if self._leads_now(standing, now):
            won = [_claim(line, data, self._own) for line, data in standing.items()]
            return self._own if any(won) else None
        self._ring(lines, now)
        return None

    def _answer(self, line: StoreConnection, standing: bytes | None) -> RunNamespace | None:
        lead = decode_or_none(standing, LeaderClaim)
        roll = decode_or_none(line.get(f"{lead.place}/roll"), MemberList) if lead else None
        return RunNamespace(roll.run, lead.place) if lead and roll and roll.covers(self._token) else None

    def _leads_now(self, standing: Mapping[StoreConnection, bytes | None], now: float) -> bool:
        """Whether rank 0 kept this one waiting, and whoever leads has had the time to answer."""
        for line, lead in standing.items():
            if lead is not None and self._stood.get(line, (None, 0.0))[0] != lead:
                self._stood[line] = (lead, now)
        if any(lead and now - self._stood[line][1] < self._patience for line, lead in standing.items()):
            return False
        return self._rank == 0 or now - self._began >= LEAD + IN_TURN * min(self._rank, TURNS)

    def _ring(self, lines: Sequence[StoreConnection], now: float) -> None:
        for line in lines:
            if now >= self._ring_at.get(line, now):
                self._ring_at[line] = now + RING
                line.append(f"{line.admission_prefix}/doorbell", encode(AdmissionToken(self._token, self._rank)))


def _claim(line: StoreConnection, standing: bytes | None, place: RunNamespace) -> bool:
    return bool(line.exchange(f"{line.admission_prefix}/lead", standing, encode(LeaderClaim(place.name))))


class AdmissionLeader:
    """Answers those who ring, on every line, as long as the run goes on."""

    def __init__(self, place: RunNamespace) -> None:
        self._place = place
        self._tokens: set[str] = set()
        self._doors: dict[StoreConnection, ConnectionReader] = {}
        self._answered: dict[StoreConnection, int] = {}

    @property
    def heard(self) -> int:
        """How many bells were answered."""
        return len(self._tokens)

    def step(self, lines: Sequence[StoreConnection]) -> None:
        """Answer those who have rung since, on these lines."""
        for line in lines:
            if line not in self._doors:
                self._open(line)
            self._tokens.update(bell.token for bell in decode_all(self._doors[line].fresh(), AdmissionToken))
        for line in lines:
            if self._answered.get(line) != len(self._tokens):
                self._answer(line)

    def _answer(self, line: StoreConnection) -> None:
        self._answered[line] = len(self._tokens)
        tokens = b"".join(bytes.fromhex(token) for token in sorted(self._tokens))
        line.set(f"{self._place.name}/roll", encode(MemberList(self._place.run, tokens)))

    def _open(self, line: StoreConnection) -> None:
        self._doors[line] = line.reader(f"{line.admission_prefix}/doorbell")
        standing = line.get(f"{line.admission_prefix}/lead")
        lead = decode_or_none(standing, LeaderClaim)
        if lead is None or lead.place != self._place.name:
            _claim(line, standing, self._place)
