"""What the sentinel's thread does, beat by beat."""

from __future__ import annotations

from collections.abc import Iterable

from doctor.monitor.watchdog.admission import AdmissionLeader, AdmissionRequest
from doctor.monitor.watchdog.decision import OnHang
from doctor.monitor.watchdog.incidents import IncidentHandler
from doctor.monitor.watchdog.rounds.periodic_rounds import PeriodicRounds
from doctor.monitor.watchdog.rounds.requested_rounds import RequestedRounds
from doctor.monitor.watchdog.rounds.round_request import RoundRequest
from doctor.monitor.watchdog.run_records import EVERY
from doctor.monitor.watchdog.watchdog_context import WatchdogContext

BEAT, BEAT_PER_RANK = 0.5, 1 / 4000
"""Seconds between beats, and what each rank of the world adds: four thousand looks a second in all."""
QUICK, QUICK_PER_RANK = 0.05, 1 / 10_000
"""The same while somebody waits for an answer."""
OTHERS, OTHERS_PER_RANK = 3.0, 1 / 300
"""The same for lines that are not the best: a folder is a file server's, and only those who lost the store use it."""
OTHERS_QUICK, OTHERS_QUICK_PER_RANK = 0.5, 1 / 1000
EAGER = 10.0
"""Seconds for which a rank that looks for the others, or waits for them to come, looks quickly."""
MEETS = 1.5
"""Seconds from the start in which ranks that run alike have found one another."""
UNREACHABLE_AFTER = 15.0
"""Seconds after which a rank that has found nobody begins its record alone."""


class WatchdogLoop:
    """Of one rank."""

    def __init__(self, station: WatchdogContext, on_hang: OnHang, round_seconds: float, now: float) -> None:
        self._station = station
        self._began = now
        self._admission = AdmissionRequest(station.rank, station.world_size, station.place, now)
        self._leader: AdmissionLeader | None = None
        self._alarms = IncidentHandler(station, on_hang)
        self._meetings = RequestedRounds(station, self._alarms)
        self._rounds = PeriodicRounds(station, round_seconds, now)
        self._record_due = now + UNREACHABLE_AFTER
        self._records = 0
        self._waiting: list[RoundRequest] = []
        self._request: RoundRequest | None = None

    def beat(self, requests: Iterable[RoundRequest], now: float) -> float:
        """Do what is due; seconds until the next beat."""
        station = self._station
        station.lines.step(now, self._pause_of_others)
        self._find_the_others(now)
        self._waiting += requests
        if self._meetings.are_on:
            self._alarms.waits(now)
        self._alarms.step(now)  # that a stall is over is said before the end is
        self._take_up(now)
        self._meetings.step(now)
        if not self._is_busy:
            self._rounds.step(now)
            self._keep_record(now)
        return self._pause(now)

    def _take_up(self, now: float) -> None:
        """Begin what the training thread asks for. What ends this rank is no use to the others before all have met,
        which takes a moment where a run ends as soon as it began."""
        patient = not self._station.is_placed and now - self._began < MEETS
        ready = [one for one in self._waiting if one.occasion == "before" or not patient]
        self._waiting = [one for one in self._waiting if one not in ready]
        for request in ready:
            self._request = request
            (self._alarms.fail if request.occasion == "failure" else self._meetings.take_up)(request, now)

    @property
    def _is_busy(self) -> bool:
        return bool(self._waiting) or self._alarms.is_raised or self._meetings.are_on

    @property
    def _pause_of_others(self) -> float:
        quick, world = self._is_busy, self._station.world_size
        return OTHERS_QUICK + OTHERS_QUICK_PER_RANK * world if quick else OTHERS + OTHERS_PER_RANK * world

    def _pause(self, now: float) -> float:
        world = self._station.world_size
        awaits = self._leader.heard < world - 1 if self._leader is not None else not self._station.is_placed
        quick = self._is_busy or (awaits and now - self._began < EAGER)
        return QUICK + QUICK_PER_RANK * world if quick else BEAT + BEAT_PER_RANK * world

    def _find_the_others(self, now: float) -> None:
        station = self._station
        if self._leader is not None:
            self._leader.step(station.lines.reading)
        if station.is_placed:
            return
        alone = station.world_size == 1
        place = station.place if alone else self._admission.step(station.lines.usable(now), now)
        if place is not None:
            station.settle(place)
            self._leader = AdmissionLeader(place) if place.leads and not alone else None
            self._record_due = now
            station.own.renew(station.patient.card())
            station.leave_card()

    def _keep_record(self, now: float) -> None:
        """Write the record now and then; what others left of earlier runs is moved once they have had the time to do
        so themselves."""
        if now < self._record_due:
            return
        station = self._station
        self._record_due = now + EVERY
        if station.rank == 0 and self._records > 0:
            station.records.move_others(station.place.run)
        self._records += 1
        station.record()
        if not station.is_placed:
            station.tell_rejected()

    def give_up(self) -> None:
        """Nobody is to wait for a ruling any more."""
        for request in (*self._waiting, *((self._request,) if self._request is not None else ())):
            request.answer(None)
        self._waiting = []
        self._alarms.give_up()
        self._meetings.give_up()
