"""Periodic rounds of a healthy run: the lowest live rank evaluates the newest facts."""

from __future__ import annotations

from doctor.cluster.membership.heartbeat import Heartbeat, HeartbeatMonitor
from doctor.cluster.membership.protocol import HeartbeatMessage
from doctor.cluster.transport.codec import decode_or_none
from doctor.monitor.watchdog.watchdog_context import WatchdogContext

PER_RANK = 0.05
"""Seconds by which each rank lengthens the interval: reading its facts takes half a millisecond, and evaluation should
take a hundredth of the time."""
MISSED, IN_TURN = 3, 8
"""Missed heartbeats after which the next rank takes over; each rank waits for one more, up to this many."""
NAME = "rounds"


class PeriodicRounds:
    """The participation of one rank in periodic rounds."""

    def __init__(self, context: WatchdogContext, seconds: float, now: float) -> None:
        self._context = context
        self._every = max(seconds, PER_RANK * context.world_size)
        self._due = now + self._every
        self._heartbeat = Heartbeat(lambda data: context.peer_store.set_on_best(NAME, data), context.rank)
        self._monitor = HeartbeatMonitor(lambda: context.peer_store.get(NAME))

    def step(self, now: float) -> None:
        """Post new facts and evaluate those of all ranks, if a round is due and any are new."""
        if now < self._due:
            return
        self._due = now + self._every
        context = self._context
        context.update_local_state()
        context.refresh_card()
        context.local_peers.read_announcements()
        connections = context.peer_store.alive
        is_alone = not connections and context.rank == 0
        if self._is_evaluator() and (context.peer_table.read(connections[:1]) or is_alone):
            context.evaluate(context.peer_table.job(), "round")

    def _is_evaluator(self) -> bool:
        rank = self._context.rank
        self._context.peer_store.read_all()
        missed = self._monitor.look()
        heartbeat = decode_or_none(self._monitor.value, HeartbeatMessage)
        by_another = heartbeat is None or heartbeat.number < rank
        if rank > 0 and by_another and missed < MISSED + min(rank, IN_TURN):
            return False
        self._heartbeat.beat()
        return True
