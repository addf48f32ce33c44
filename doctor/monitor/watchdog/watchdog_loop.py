"""The work of the watchdog's thread, tick by tick."""

from __future__ import annotations

from collections.abc import Iterable

from doctor.monitor.watch_options import OnHang
from doctor.monitor.watchdog.admission import AdmissionLeader, AdmissionRequest
from doctor.monitor.watchdog.incidents import IncidentHandler
from doctor.monitor.watchdog.rounds.periodic_rounds import PeriodicRounds
from doctor.monitor.watchdog.rounds.requested_rounds import RequestedRounds
from doctor.monitor.watchdog.rounds.round_request import RoundRequest
from doctor.monitor.watchdog.run_records import EVERY
from doctor.monitor.watchdog.watchdog_context import WatchdogContext

TICK, TICK_PER_RANK = 0.5, 1 / 4000
"""Seconds between ticks, and the addition per rank of the world: four thousand polls a second in all."""
FAST_TICK, FAST_TICK_PER_RANK = 0.05, 1 / 10_000
"""The same while a caller awaits an answer."""
FALLBACK, FALLBACK_PER_RANK = 3.0, 1 / 300
"""The same for connections other than the preferred one: a folder loads a file server, and only ranks that lost the
store use it."""
FALLBACK_FAST, FALLBACK_FAST_PER_RANK = 0.5, 1 / 1000
FAST_JOIN = 10.0
"""Seconds for which a rank that has not joined, or awaits others, uses fast ticks."""
JOIN_GRACE = 1.5
"""Seconds from the start within which healthy ranks have joined."""
LATE_JOINS = 5.0
"""Seconds between two looks for further requests to join, once all ranks have joined and a fast start is over: only a
connection that was lost and opened again has any."""
RECORD_AFTER = 15.0
"""Seconds after which a rank that has not joined starts its record alone."""


class WatchdogLoop:
    """The loop of one rank."""

    def __init__(self, context: WatchdogContext, on_hang: OnHang, round_seconds: float, now: float) -> None:
        self._context = context
        self._began = now
        self._admission = AdmissionRequest(context.rank, context.world_size, context.namespace, now, context.rejected)
        self._leader: AdmissionLeader | None = None
        self._late_joins_due = now
        self._incidents = IncidentHandler(context, on_hang)
        self._requested = RequestedRounds(context, self._incidents)
        self._rounds = PeriodicRounds(context, round_seconds, now)
        self._record_due = now + RECORD_AFTER
        self._records = 0
        self._waiting: list[RoundRequest] = []
        self._request: RoundRequest | None = None

    def tick(self, requests: Iterable[RoundRequest], now: float) -> float:
        """Do what is due; return the seconds until the next tick."""
        context, world = self._context, self._context.world_size
        fallback = FALLBACK + FALLBACK_PER_RANK * world
        fallback_fast = FALLBACK_FAST + FALLBACK_FAST_PER_RANK * world
        context.store.step(now, fallback_fast if self._is_busy else fallback)
        self._join_peers(now)
        self._waiting += requests
        if self._requested.is_active:
            self._incidents.note_waiting(now)
        self._incidents.step(now)  # recovery is reported before the end of the run
        self._start_requests(now)
        self._requested.step(now)
        if not self._is_busy:
            self._rounds.step(now)
            self._keep_record(now)
        awaits = self._leader.admitted < world - 1 if self._leader is not None else not context.is_joined
        fast = self._is_busy or (awaits and now - self._began < FAST_JOIN)
        return FAST_TICK + FAST_TICK_PER_RANK * world if fast else TICK + TICK_PER_RANK * world

    def _start_requests(self, now: float) -> None:
        """Start the requests of the training thread.

        The end or failure of this rank is held back until the ranks have joined, which takes a moment if a run ends
        right after its start.
        """
        waits_for_peers = not self._context.is_joined and now - self._began < JOIN_GRACE
        ready = [one for one in self._waiting if one.trigger == "before" or not waits_for_peers]
        self._waiting = [one for one in self._waiting if one not in ready]
        for request in ready:
            self._request = request
            (self._incidents.fail if request.trigger == "failure" else self._requested.start)(request, now)

    @property
    def _is_busy(self) -> bool:
        return bool(self._waiting) or self._incidents.is_active or self._requested.is_active

    def _join_peers(self, now: float) -> None:
        context = self._context
        if self._leader is not None:
            self._admit(self._leader, now)
        if context.is_joined:
            return
        alone = context.world_size == 1
        namespace = context.namespace if alone else self._admission.step(context.store.usable(now), now)
        if namespace is not None:
            context.join(namespace)
            if namespace.leads and not alone:
                self._leader = AdmissionLeader(namespace, context.rank, context.world_size)
            self._record_due = now
            context.update_local_state()
            context.post_card()

    def _admit(self, leader: AdmissionLeader, now: float) -> None:
        context = self._context
        if now - self._began < FAST_JOIN or leader.admitted < context.world_size - 1:
            leader.step(context.store.reading)
        elif now >= self._late_joins_due:
            self._late_joins_due = now + LATE_JOINS
            leader.step(context.store.usable(now))

    def _keep_record(self, now: float) -> None:
        """Write the record periodically; move those of earlier runs that their ranks did not move."""
        if now < self._record_due:
            return
        context = self._context
        self._record_due = now + EVERY
        if context.rank == 0 and self._records > 0:
            context.records.move_others(context.namespace.run)
        self._records += 1
        context.write_record()
        if not context.is_joined:
            context.report_rejected()

    def give_up(self) -> None:
        """Release all callers that await a decision."""
        for request in (*self._waiting, *((self._request,) if self._request is not None else ())):
            request.answer(None)
        self._waiting = []
        self._incidents.give_up()
        self._requested.give_up()
