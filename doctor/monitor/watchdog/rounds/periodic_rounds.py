"""Periodic rounds of a healthy run: the lowest live rank evaluates the newest facts.

Between them it looks for what should not wait: losses that are not finite, and parameters or settings that differ.
"""

from __future__ import annotations

from doctor.cluster.membership.heartbeat import Heartbeat, HeartbeatMonitor
from doctor.cluster.membership.protocol import HeartbeatMessage
from doctor.cluster.transport.codec import decode_or_none
from doctor.core.facts import ModelFacts, ReplicaFacts
from doctor.core.job import Job
from doctor.monitor.watchdog.watchdog_context import WatchdogContext

PER_RANK = 0.05
"""Seconds by which each rank lengthens the interval: reading its facts takes half a millisecond, and evaluation should
take a hundredth of the time."""
LOOK = 5.0
"""Seconds between two looks. In those, ranks post what a look compares with the other facts of the last round. In the
look before a round, ranks that another one evaluates post all facts, so that none in its round are older than this,
even if it begins a little before their own."""
FIRST = 8.0
"""Seconds until the first round at most: what differs from the start is in the facts of the first batches."""
MISSED, IN_TURN = 3, 8
"""Missed heartbeats after which the next rank takes over; each rank waits for one more, up to this many."""
NAME = "rounds"
Alarm = tuple[str, str]
"""The kind of a difference between ranks, and the rank, or the part of the parameters and on how many ranks."""


class PeriodicRounds:
    """The participation of one rank in periodic rounds."""

    def __init__(self, context: WatchdogContext, seconds: float, now: float) -> None:
        self._context = context
        self._every = max(seconds, PER_RANK * context.world_size)
        self._look_every = min(self._every, max(LOOK, PER_RANK * context.world_size))
        self._due, self._look_due = now + min(self._every, FIRST), now + self._look_every
        self._evaluates, self._has_news = context.rank == 0, False
        self._alarms: frozenset[Alarm] = frozenset()
        self._heartbeat = Heartbeat(lambda data: context.peer_store.set_on_best(NAME, data), context.rank)
        self._monitor = HeartbeatMonitor(lambda: context.peer_store.get(NAME))

    def step(self, now: float) -> None:
        """Post new facts and evaluate those of all ranks, if a round is due and any are new, or a look shows alarms."""
        is_round = now >= self._due
        context = self._context
        if not is_round and (now < self._look_due or context.world_size == 1):
            return
        self._look_due = now + self._look_every
        is_full = is_round or (not self._evaluates and self._look_due >= self._due)
        if is_full:
            context.update_local_state()
        else:
            context.update_for_look()
        context.refresh_card()
        context.local_peers.read_announcements()
        if is_round:
            self._due = max(self._due + self._every, now + self._look_every)  # ranks stay in step
            self._evaluates = self._is_evaluator()
        if not self._evaluates:
            return
        connections = context.peer_store.alive
        is_alone = not connections and context.rank == 0
        self._has_news |= context.peer_table.read(connections[:1]) or is_alone
        if not self._has_news:
            return
        job = context.peer_table.job()
        alarms = alarms_of(job)
        if is_round or alarms - self._alarms:
            if not is_full:
                context.update_local_state()
                job = context.peer_table.job()
            self._has_news = False
            self._alarms = alarms
            context.evaluate(job, "round")

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


def alarms_of(job: Job) -> frozenset[Alarm]:
    """Return what a look finds: ranks whose loss is not finite, and what differs between ranks after the same step.

    A difference counts again for each further rank that reports it, because two ranks do not show which one differs.
    """
    alarms: set[Alarm] = set()
    values: dict[Alarm, list[object]] = {}
    for rank in job.ranks:
        replica, model = rank.find(ReplicaFacts), rank.find(ModelFacts)
        if replica is None:
            continue
        alarms.update(("loss", str(rank.number)) for _ in replica.non_finite[:1])
        if model is not None and model.replicated:
            for one in replica.checksums:
                values.setdefault((f"{one.counted} {one.step}", one.part), []).append(one.value)
        for other in replica.settings if model is not None else ():
            values.setdefault((f"settings {other.step}", ""), []).append(other.values)
    most: dict[Alarm, int] = {}
    for (kind, part), found in values.items():
        if len(set(found)) > 1:
            key = kind.split()[0], part
            most[key] = max(most.get(key, 0), len(found))
    alarms.update((kind, f"{part} on {count} ranks") for (kind, part), count in most.items())
    return frozenset(alarms)
