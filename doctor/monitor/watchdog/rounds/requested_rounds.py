"""Rounds requested by the training thread: at the start of a stage and at the end of a run."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from doctor.cluster.transport.codec import decode_all
from doctor.cluster.transport.store import Mailbox
from doctor.core.background import BackgroundCall
from doctor.monitor.telemetry.rank_telemetry import Sections
from doctor.monitor.watchdog.decision import Decision
from doctor.monitor.watchdog.incidents import IncidentHandler
from doctor.monitor.watchdog.protocol import DecisionMessage, RankPresence
from doctor.monitor.watchdog.rounds.collection_round import CollectionRound, RoundTimeouts
from doctor.monitor.watchdog.rounds.round_request import RoundRequest
from doctor.monitor.watchdog.watchdog_context import ACKNOWLEDGED, WatchdogContext

BROKEN = 1.0
"""Seconds for others to reach the end after an exception: ranks that hang never will."""
ACKNOWLEDGE_TIMEOUT = 2.0
"""Seconds for all ranks to read the final decision: a store ends with the rank that hosts it."""


class PendingFacts(msgspec.Struct, frozen=True):
    """Startup facts of this rank that are being collected for a round."""

    request: RoundRequest
    name: str
    facts: BackgroundCall[Sections]


class OpenRound(msgspec.Struct, frozen=True):
    """A collection round in progress and its request."""

    collection: CollectionRound
    request: RoundRequest


class FinalRound(msgspec.Struct, frozen=True):
    """State of the evaluator of the final round, which waits until all ranks have acknowledged."""

    open_round: OpenRound
    decision: Decision
    acknowledgments: Mailbox
    acknowledged: set[int]
    until: float


class RequestedRounds:
    """The participation of one rank in requested rounds."""

    def __init__(self, context: WatchdogContext, incidents: IncidentHandler) -> None:
        self._context = context
        self._incidents = incidents
        self._count = 0
        self._pending: list[PendingFacts] = []
        self._open_rounds: list[OpenRound] = []
        self._final: FinalRound | None = None

    @property
    def is_active(self) -> bool:
        """Whether a round is pending or in progress."""
        return bool(self._pending or self._open_rounds or self._final)

    def start(self, request: RoundRequest, now: float) -> None:
        """Start the round that the training thread requests."""
        context = self._context
        if request.trigger != "end":
            self._count += 1
            facts = BackgroundCall(context.source.startup_facts, context.wake)
            self._pending.append(PendingFacts(request, f"before-{self._count}", facts))
            return
        context.update_local_state()
        context.write_record()
        broken = context.has_failed or self._incidents.failure is not None
        seconds = min(BROKEN, request.collection_time) if broken else request.collection_time
        defers = None if broken else context.is_left_to_lower_rank
        self._open("end", request, context.evaluate_end, seconds, now, defers)

    def step(self, now: float) -> None:
        """Advance all rounds."""
        for pending in [*self._pending]:
            ready = pending.facts.is_done and self._context.is_joined
            if ready or pending.request.collection_time_left(now) == 0.0:
                self._pending.remove(pending)
                self._start(pending, now)
        for open_round in [*self._open_rounds]:
            if open_round.request.trigger == "end":
                open_round.collection.ended |= self._context.local_peers.exited(open_round.collection.missing)
            message = open_round.collection.step(now)
            if message is not None or open_round.collection.deferred or now >= open_round.request.until:
                self._open_rounds.remove(open_round)
                self._conclude(open_round, message, now)
        if self._final is not None:
            self._finish(self._final, now)

    def _start(self, pending: PendingFacts, now: float) -> None:
        context = self._context
        context.local_state.set_startup_facts(pending.facts.result() if pending.facts.is_done else {})
        context.update_local_state()
        seconds = pending.request.collection_time_left(now)
        self._open(pending.name, pending.request, context.evaluate_start, seconds, now)
        context.write_record()

    def _open(
        self,
        name: str,
        request: RoundRequest,
        evaluate: Callable[[CollectionRound], Decision],
        seconds: float,
        now: float,
        defers: Callable[[CollectionRound], bool] | None = None,
    ) -> None:
        context = self._context
        if not context.is_joined and context.rank > 0:
            request.answer(None)  # a rank without peers could only repeat what rank 0 reports
            return
        seconds = seconds if context.is_joined else 0.0
        times = RoundTimeouts(seconds, seconds)
        collection = CollectionRound(name, request.trigger, context, times, evaluate, now=now, defers=defers)
        context.post_card()
        collection.report()
        self._open_rounds.append(OpenRound(collection, request))

    def _conclude(self, open_round: OpenRound, message: DecisionMessage | None, now: float) -> None:
        context = self._context
        context.local_peers.read_announcements()
        decision = message.ruling if message is not None else None
        if open_round.request.trigger != "end":
            open_round.request.answer(decision)
        elif message is not None and message.by == context.rank:
            acknowledgments = context.peer_store.mailbox(ACKNOWLEDGED)
            self._final = FinalRound(
                open_round, message.ruling, acknowledgments, {context.rank}, now + ACKNOWLEDGE_TIMEOUT
            )
        else:
            context.leave()
            open_round.request.answer(decision)

    def _finish(self, final: FinalRound, now: float) -> None:
        """Answer once all acknowledged the final decision; clear the store if all ranks reported."""
        collection, request = final.open_round.collection, final.open_round.request
        final.acknowledged.update(presence.rank for presence in decode_all(final.acknowledgments.fresh(), RankPresence))
        if collection.reported - final.acknowledged and now < min(final.until, request.until):
            return
        self._final = None
        if not collection.missing:
            self._context.clear()
        request.answer(final.decision)

    def give_up(self) -> None:
        """Release all callers that await a decision."""
        for request in (*(one.request for one in self._pending), *(one.request for one in self._open_rounds)):
            request.answer(None)
