"""The rounds of a run that goes on: the lowest rank that is alive judges the newest cards."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from doctor.cluster.transport.codec import Count, decode_or_none, encode
from doctor.monitor.watchdog.watchdog_context import WatchdogContext

PER_RANK = 0.05
"""Seconds by which each rank of the world lengthens a round: reading a card takes half a millisecond, and a hundredth
of the judge's time is enough."""
MISSED, IN_TURN = 3, 8
"""Rounds without a pulse after which the next rank does them; each one waits one longer, up to so many."""
NAME = "rounds"


class RoundHeartbeat(msgspec.Struct, frozen=True):
    """Of the rank that does the rounds."""

    rank: Count
    number: Annotated[int, Meta(ge=0)] = 0


class PeriodicRounds:
    """As one rank takes part in them."""

    def __init__(self, station: WatchdogContext, seconds: float, now: float) -> None:
        self._station = station
        self._every = max(seconds, PER_RANK * station.world_size)
        self._due = now + self._every
        self._heard: RoundHeartbeat | None = None
        self._missed = 0

    def step(self, now: float) -> None:
        """Leave a new card and judge those of all, if it is time to and any is new."""
        if now < self._due:
            return
        self._due = now + self._every
        station = self._station
        station.own.renew(station.patient.card())
        station.renew_card()
        station.bystander.listen()
        lines = station.circle.lines.alive
        is_alone = not lines and station.rank == 0
        if self._are_mine() and (station.ward.read(lines[:1]) or is_alone):
            station.judge(station.ward.job(), "round")

    def _are_mine(self) -> bool:
        """Whether no lower rank does them."""
        station = self._station
        station.circle.lines.read_all()
        pulse = decode_or_none(station.circle.lines.get(NAME), RoundHeartbeat)
        self._missed = 0 if pulse != self._heard else self._missed + 1
        self._heard = pulse
        by_another = pulse is not None and pulse.rank < station.rank
        if station.rank > 0 and (by_another or pulse is None) and self._missed < MISSED + min(station.rank, IN_TURN):
            return False
        self._heard = RoundHeartbeat(station.rank, pulse.number + 1 if pulse else 0)
        station.circle.lines.set_on_best(NAME, encode(self._heard))
        return True
