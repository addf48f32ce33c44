"""Alarms: a rank stands still, or an exception ends it, and all of them say where they are."""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from doctor.cluster.transport.codec import decode_all, encode
from doctor.cluster.transport.failover import FailoverReader
from doctor.monitor.telemetry.progress import Stall
from doctor.monitor.watchdog.abort import abort_process
from doctor.monitor.watchdog.decision import Decision, OnHang
from doctor.monitor.watchdog.protocol import DecisionMessage, RankPresence, RankResumed
from doctor.monitor.watchdog.rounds.collection_round import CollectionRound, RoundTimeouts
from doctor.monitor.watchdog.rounds.round_request import RoundRequest
from doctor.monitor.watchdog.stall_tracker import StallTracker
from doctor.monitor.watchdog.watchdog_context import WatchdogContext

TIMES = RoundTimeouts(grace=2.0, longest=5.0, broken=1.0)
"""A rank that is alive hears an alarm within a beat; its last collectives take a second or more to be read the first
time; after an exception others may raise in their turn, at once."""
PER_RANK = 1 / 500
"""Seconds of grace that each rank of the world adds: one of them may be judging a round, which takes its time."""


class ActiveIncident(NamedTuple):
    """A stall that this rank judged sick. ``seconds``: how long each rank stood that has gone on since."""

    ruling: Decision
    resumed: FailoverReader
    seconds: dict[int, float]

    @property
    def is_over(self) -> bool:
        """Whether those who were blamed go on, or anybody where nobody was."""
        return bool(self.seconds) and self.seconds.keys() >= {*self.ruling.ranks}


class PendingAbort(NamedTuple):
    """A ruling by which this rank is to end itself, and the points that it had passed by then."""

    said: DecisionMessage
    passed: int


class IncidentHandler:
    """As one rank raises and hears them. They are numbered alike on all ranks: each is over when it is judged."""

    def __init__(self, station: WatchdogContext, on_hang: OnHang) -> None:
        self._station = station
        self._on_hang = on_hang
        self._number = 1
        self._stalls = StallTracker()
        self._hearing: CollectionRound | None = None
        self._waiting: list[RoundRequest] = []
        self._counts = False  # the alarm that is raised is one of all ranks, not of this one alone
        self._judged_here: ActiveIncident | None = None
        self._goes_on_here = False
        self._doomed: PendingAbort | None = None
        self._waited_until = -math.inf
        self.failure: DecisionMessage | None = None

    @property
    def is_raised(self) -> bool:
        """Whether one is being heard."""
        return self._hearing is not None

    def step(self, now: float) -> None:
        """Look for a reason to raise one, for those of others, and go on with the one that is raised."""
        stall = self._station.patient.stall()
        self._stalls.note(stall, now)
        self._notice_that_it_goes_on(now)
        stall = self._without_waiting(stall, now)
        self._end_if_supported(stall)
        if self._hearing is not None:
            self._hear(self._hearing, now)
        elif self._stalls.is_news(stall, now):
            self._raise()
            self._take_part(now)
        elif self._station.circle.lines.get(f"{self._name}/raised") is not None:
            self._take_part(now)

    def _without_waiting(self, stall: Stall | None, now: float) -> Stall | None:
        """The stall without the time that the training thread spent in waiting for a ruling."""
        idle = min(stall.idle, now - self._waited_until) if stall else 0.0
        return Stall(idle, stall.limit) if stall and idle > stall.limit else None

    def waits(self, now: float) -> None:
        """The training thread waits for a ruling, and stands still for no other reason."""
        self._waited_until = now

    def fail(self, request: RoundRequest, now: float) -> None:
        """An exception has ended this rank. Failures that follow one which was judged are its consequences."""
        station = self._station
        if self.failure is not None:
            station.take_position()
            request.answer(self.failure.ruling)
            return
        self._waiting.append(request)
        self._raise()
        if self._hearing is None:
            self._hearing = self._open(now)
        self._hearing.announce()  # stacks take their time, and the others are not to judge without it
        station.take_position()
        self._hearing.come(failed=True)

    @property
    def _name(self) -> str:
        return f"alarm-{self._number}"

    def _raise(self) -> None:
        self._station.circle.lines.set(f"{self._name}/raised", b"1")

    def _open(self, now: float) -> CollectionRound:
        circle, left = self._station.circle, self._those_who_ended()
        self._counts = self._station.is_placed
        more = PER_RANK * circle.world_size
        times = TIMES._replace(grace=TIMES.grace + more, longest=TIMES.longest + more)
        return CollectionRound(
            self._name, "stall", circle, times, self._station.rule_at, now=now, looks=True, left=left
        )

    def _those_who_ended(self) -> Collection[int]:
        reader = self._station.circle.lines.reader("end/here")
        return {here.rank for here in decode_all(reader.fresh(), RankPresence) if here.came}

    def _take_part(self, now: float) -> None:
        """Say where this rank is."""
        self._hearing = self._open(now)
        self._hearing.announce()
        self._station.take_position()
        self._hearing.come()

    def _hear(self, hearing: CollectionRound, now: float) -> None:
        said = hearing.step(now)
        if said is None and not hearing.is_over(now):
            return
        self._hearing, waiting, self._waiting = None, self._waiting, []
        self._number += self._counts
        if said is not None:
            self._take(hearing, said, now)
        for request in waiting:
            if said is None or said.occasion == "failure":
                request.answer(said.ruling if said else None)
            else:
                self.fail(request, now)  # the exception came when the others were being judged for standing still

    def _take(self, hearing: CollectionRound, said: DecisionMessage, now: float) -> None:
        alarm, sick = hearing.name, said.ruling.sick
        self._stalls.judged(alarm, now, sick=sick, passed=self._station.progress.passed)
        if sick:
            resumed = self._station.circle.lines.reader(_resumed(alarm))
            self._judged_here = ActiveIncident(said.ruling, resumed, {}) if said.by == self._station.rank else None
            self._goes_on_here = False
        if said.occasion == "failure":
            self.failure = said if sick else self.failure
        else:
            self._point_to_dumps()
            if sick and self._on_hang == "abort":
                self._doom(said, is_supported=hearing.is_supported)

    def _point_to_dumps(self) -> None:
        """Tell, once a stall, where more is to be had than a finding shows."""
        dump = self._station.own.dump
        if self._judged_here is not None and dump is not None:
            self._station.tell(f"dumps of the flight recorder, one a rank: {Path(dump).parent}")

    def _doom(self, said: DecisionMessage, *, is_supported: bool) -> None:
        """End this rank: at once by a ruling that is certainly of this job, else when it stands still itself."""
        if is_supported:
            self._end(said)
        self._doomed = PendingAbort(said, self._station.progress.passed)

    def _end_if_supported(self, stall: Stall | None) -> None:
        doomed = self._doomed
        if doomed is None:
            return
        if stall is not None:
            self._end(doomed.said)
        elif self._station.passed_now() > doomed.passed:
            self._doomed = None
            self._station.tell(f"rank {self._station.rank} makes progress and does not abort, as it was told to")

    def _end(self, said: DecisionMessage) -> None:
        self._station.record()
        self._station.tell(f"rank {self._station.rank} ends itself, as on_hang='abort' says: {said.ruling.words}")
        abort_process()

    def _notice_that_it_goes_on(self, now: float) -> None:
        """Those who stood still tell the one who judged, who takes back what was said, once."""
        here = self._resumed_here(now)
        stall = self._judged_here
        self._goes_on_here |= bool(here)
        if stall is None:
            return
        for one in (*here, *decode_all(stall.resumed.fresh(), RankResumed)):
            stall.seconds[one.rank] = one.seconds
        # Anybody may have written the others' words: what was said is taken back when this rank goes on, too.
        if stall.is_over and (self._goes_on_here or self._station.lines.are_authentic):
            self._judged_here = None
            self._station.goes_on(stall.ruling, max(stall.seconds.values()))

    def _resumed_here(self, now: float) -> tuple[RankResumed, ...]:
        """That this rank goes on, if it does."""
        station = self._station
        if not self._stalls.may_go_on or station.looks_failed():
            return ()
        held = self._stalls.goes_on(station.progress.passed)
        if held is None:
            return ()
        one = RankResumed(station.rank, now - held.since)
        station.leave_card()
        station.circle.lines.append(_resumed(held.alarm), encode(one))
        return (one,)

    def give_up(self) -> None:
        """Nobody is to wait for a ruling any more."""
        for request in self._waiting:
            request.answer(None)


def _resumed(alarm: str) -> str:
    """The box of those who go on after it."""
    return f"{alarm}/goes-on"
