"""Hearings that the training thread asks for: before the first batch of each stage, and at the end of the run."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from doctor.cluster.transport.codec import decode_all
from doctor.cluster.transport.failover import FailoverReader
from doctor.core.background import BackgroundCall
from doctor.monitor.watchdog.decision import Decision, Sections
from doctor.monitor.watchdog.incidents import IncidentHandler
from doctor.monitor.watchdog.protocol import DecisionMessage, RankPresence
from doctor.monitor.watchdog.rounds.collection_round import CollectionRound, RoundTimeouts
from doctor.monitor.watchdog.rounds.round_request import RoundRequest
from doctor.monitor.watchdog.watchdog_context import HEARD, WatchdogContext

BROKEN = 1.0
"""Seconds for others to come to the end after an exception: those that hang never will."""
FAREWELL = 2.0
"""Seconds for all to have heard the last ruling: a store ends with the rank that hosts it."""


class PendingFacts(NamedTuple):
    """Facts of this rank that are being collected for a meeting."""

    request: RoundRequest
    name: str
    facts: BackgroundCall[Sections]


class OpenRound(NamedTuple):
    """A hearing that goes on, and who asked for it."""

    hearing: CollectionRound
    request: RoundRequest


class FinalRound(NamedTuple):
    """The one who judged the end waits until all have heard."""

    held: OpenRound
    ruling: Decision
    heard: FailoverReader
    who: set[int]
    until: float


class RequestedRounds:
    """As one rank takes part in them."""

    def __init__(self, station: WatchdogContext, alarms: IncidentHandler) -> None:
        self._station = station
        self._alarms = alarms
        self._count = 0
        self._openings: list[PendingFacts] = []
        self._held: list[OpenRound] = []
        self._parting: FinalRound | None = None

    @property
    def are_on(self) -> bool:
        """Whether somebody waits for one."""
        return bool(self._openings or self._held or self._parting)

    def take_up(self, request: RoundRequest, now: float) -> None:
        """Begin what the training thread asks for."""
        if request.occasion == "end":
            self._end(request, now)
        else:
            self._count += 1
            facts = BackgroundCall(self._station.patient.opening)
            self._openings.append(PendingFacts(request, f"before-{self._count}", facts))

    def step(self, now: float) -> None:
        """Go on with all of them."""
        for opening in [*self._openings]:
            ready = opening.facts.is_done and self._station.is_placed
            if ready or opening.request.is_gathered(now):
                self._openings.remove(opening)
                self._begin(opening, now)
        for held in [*self._held]:
            if held.request.occasion == "end":
                held.hearing.left |= self._station.bystander.gone(held.hearing.missing)
            said = held.hearing.step(now)
            if said is not None or held.hearing.deferred or now >= held.request.until:
                self._held.remove(held)
                self._conclude(held, said, now)
        if self._parting is not None:
            self._part(self._parting, now)

    def _begin(self, opening: PendingFacts, now: float) -> None:
        station = self._station
        station.own.open(opening.facts.result() if opening.facts.is_done else {})
        station.own.renew(station.patient.card())
        self._hold(opening.name, opening.request, station.rule_before, opening.request.gathering_left(now), now)
        station.record()

    def _end(self, request: RoundRequest, now: float) -> None:
        station = self._station
        station.own.renew(station.patient.card())
        station.record()
        broken = station.has_failed or self._alarms.failure is not None
        seconds = min(BROKEN, request.gathering) if broken else request.gathering
        defers = None if broken else station.is_followed
        self._hold("end", request, station.rule_at_end, seconds, now, defers)

    def _hold(
        self,
        name: str,
        request: RoundRequest,
        judge: Callable[[CollectionRound], Decision],
        seconds: float,
        now: float,
        defers: Callable[[CollectionRound], bool] | None = None,
    ) -> None:
        station = self._station
        if not station.is_placed and station.rank > 0:
            request.answer(None)  # it knows nothing of the others, and would repeat what rank 0 says
            return
        seconds = seconds if station.is_placed else 0.0
        times = RoundTimeouts(seconds, seconds)
        hearing = CollectionRound(name, request.occasion, station.circle, times, judge, now=now, defers=defers)
        station.leave_card()
        hearing.come()
        self._held.append(OpenRound(hearing, request))

    def _conclude(self, held: OpenRound, said: DecisionMessage | None, now: float) -> None:
        station = self._station
        station.bystander.listen()
        ruling = said.ruling if said is not None else None
        if held.request.occasion != "end":
            held.request.answer(ruling)
        elif said is not None and said.by == station.rank:
            heard = station.circle.lines.reader(HEARD)
            self._parting = FinalRound(held, said.ruling, heard, {station.rank}, now + FAREWELL)
        else:
            station.leave()
            held.request.answer(ruling)

    def _part(self, parting: FinalRound, now: float) -> None:
        """Let go once all have heard, and leave nothing behind where all have come."""
        hearing, request = parting.held
        parting.who.update(here.rank for here in decode_all(parting.heard.fresh(), RankPresence))
        if hearing.came - parting.who and now < min(parting.until, request.until):
            return
        self._parting = None
        if not hearing.missing:
            self._station.clear()
        request.answer(parting.ruling)

    def give_up(self) -> None:
        """Nobody is to wait for a ruling any more."""
        for request in (*(one.request for one in self._openings), *(one.request for one in self._held)):
            request.answer(None)
