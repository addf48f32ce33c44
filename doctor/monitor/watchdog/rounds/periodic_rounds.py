"""Periodic rounds of a healthy run: the lowest live rank evaluates the newest cards."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from doctor.cluster.transport.codec import Count, decode_or_none, encode
from doctor.monitor.watchdog.watchdog_context import WatchdogContext

PER_RANK = 0.05
"""Seconds by which each rank lengthens the interval: reading a card takes half a millisecond, and evaluation should
take a hundredth of the time."""
MISSED, IN_TURN = 3, 8
"""Missed heartbeats after which the next rank takes over; each rank waits for one more, up to this many."""
NAME = "rounds"


class RoundHeartbeat(msgspec.Struct, frozen=True):
    """Heartbeat of the rank that evaluates periodic rounds."""

    rank: Count
    number: Annotated[int, Meta(ge=0)] = 0


class PeriodicRounds:
    """The participation of one rank in periodic rounds."""

    def __init__(self, context: WatchdogContext, seconds: float, now: float) -> None:
        self._context = context
        self._every = max(seconds, PER_RANK * context.world_size)
        self._due = now + self._every
        self._last_heartbeat: RoundHeartbeat | None = None
        self._missed = 0

    def step(self, now: float) -> None:
        """Post a new card and evaluate all cards, if a round is due and any card is new."""
        if now < self._due:
            return
        self._due = now + self._every
        context = self._context
        context.local_state.update(context.source.card())
        context.refresh_card()
        context.local_peers.read_announcements()
        connections = context.round_peers.store.alive
        is_alone = not connections and context.rank == 0
        if self._is_evaluator() and (context.peer_table.read(connections[:1]) or is_alone):
            context.evaluate(context.peer_table.job(), "round")

    def _is_evaluator(self) -> bool:
        """Return whether no lower rank evaluates periodic rounds."""
        context = self._context
        context.round_peers.store.read_all()
        heartbeat = decode_or_none(context.round_peers.store.get(NAME), RoundHeartbeat)
        self._missed = 0 if heartbeat != self._last_heartbeat else self._missed + 1
        self._last_heartbeat = heartbeat
        by_another = heartbeat is not None and heartbeat.rank < context.rank
        if (
            context.rank > 0
            and (by_another or heartbeat is None)
            and self._missed < MISSED + min(context.rank, IN_TURN)
        ):
            return False
        self._last_heartbeat = RoundHeartbeat(context.rank, heartbeat.number + 1 if heartbeat else 0)
        context.round_peers.store.set_on_best(NAME, encode(self._last_heartbeat))
        return True
