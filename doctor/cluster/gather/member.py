"""Member of a gather: join, send facts, run probes, await the verdict."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

from doctor.cluster.gather.participant import Participant
from doctor.cluster.gather.protocol import (
    ANNOUNCEMENT,
    HEARTBEAT_EVERY,
    MOST_MISSED,
    MOST_STEPS,
    GatherClosed,
    GatherVerdict,
    ProbeResult,
    ProbeTask,
    closed_marker,
)
from doctor.cluster.membership.heartbeat import HeartbeatMonitor
from doctor.cluster.membership.leadership import JoinAttempt, acknowledge
from doctor.cluster.transport.codec import MalformedMessage, decode_or_none, encode, pack_member
from doctor.cluster.transport.failover import Store
from doctor.cluster.transport.polling import PollInterval
from doctor.cluster.transport.signing import RejectedMessages
from doctor.cluster.transport.store import StoreLost
from doctor.core.clock import monotonic
from doctor.core.job import Member

if TYPE_CHECKING:
    from doctor.cluster.gather.probe_schedule import ProbeSchedule

EVALUATION_SECONDS = 10.0
"""Seconds that the coordinator may take after the gather is closed, to run probes and evaluate."""
EVALUATION_SECONDS_PER_RANK = 1e-3
"""Additional seconds per rank: a job of sixteen thousand takes four."""
LEAVING = 20.0
"""Seconds after the verdict within which the coordinator dismisses its members, unless its terminal blocks it."""
MOST_CALLS = 16
"""Announcements that one process accepts: each lost coordinator is followed by another one."""
IN_TURN, TURNS = 0.2, 4
"""Seconds that each rank waits longer than the previous one before it replaces a lost coordinator."""


class NoCoordinator(Exception):
    """No process coordinates a gather, or its heartbeat timed out. ``announcement`` is what the store held."""

    def __init__(self, announcement: bytes | None) -> None:
        super().__init__()
        self.announcement = announcement


class GatherMember:
    """This process as a member of gathers that other processes coordinate.

    ``max_seconds`` limits a gather, whatever its coordinator announces.
    """

    def __init__(
        self,
        store: Store,
        participant: Participant,
        schedule: ProbeSchedule | None,
        *,
        close_at: float,
        max_seconds: float = math.inf,
        rejected: RejectedMessages | None = None,
    ) -> None:
        self._store = store
        self._participant = participant
        self._identity, self._token = participant.identity, participant.join_request.token
        self._schedule = schedule
        self._own_deadline = self._deadline = close_at + IN_TURN * min(self._identity.number, TURNS)
        self._max_seconds = max_seconds
        self._announcements = 0
        self._attempt = JoinAttempt(store, ANNOUNCEMENT, participant.join_request, rejected)
        self._watch: HeartbeatMonitor | None = None
        self._nonce = ""
        self._sent_facts = False
        self._step = 0
        self._ended: GatherVerdict | None = None

    def participate(self) -> GatherVerdict:
        """Take part until the verdict, and return it once all may leave.

        Raises:
            NoCoordinator: no gather was announced, or its coordinator has not finished in time.
        """
        interval = PollInterval(self._identity.world_size)
        while True:
            self._read_announcement()
            if self._nonce:
                self._run_due_work()
                verdict = decode_or_none(self._store.get(f"{self._nonce}/verdict"), GatherVerdict)
                if verdict is not None and (not verdict.judged or verdict.covers(self._token)):
                    self._acknowledge()
                    return verdict
                # It may recover, another one may announce a gather, and it may be a leftover of an earlier run.
                if verdict is not None or (self._watch is not None and self._watch.look() >= MOST_MISSED):
                    self._watch = None
                    self._deadline = min(self._deadline, self._own_deadline)
            if self._ended is not None:
                return self._ended
            if monotonic() >= self._deadline:
                raise NoCoordinator(self._attempt.latest)
            interval.rest(self._deadline)

    def _read_announcement(self) -> None:
        """Join a gather that was announced since the last poll, or record that this one is closed."""
        is_new, announcement = self._attempt.look(), self._attempt.announcement
        if is_new and self._attempt.latest == closed_marker(self._nonce):
            last = decode_or_none(self._store.get("last"), GatherClosed)
            self._ended = last.verdict if last is not None and last.nonce == self._nonce else None
        if not is_new or announcement is None:
            return
        self._announcements += 1
        if self._announcements > MOST_CALLS:
            raise NoCoordinator(self._attempt.latest)
        self._nonce, self._sent_facts, self._step = announcement.nonce, False, 0
        evaluation = EVALUATION_SECONDS + EVALUATION_SECONDS_PER_RANK * self._identity.world_size
        evaluation += IN_TURN * min(self._identity.number, TURNS)
        self._deadline = monotonic() + min(announcement.seconds, self._max_seconds) + evaluation
        self._watch = HeartbeatMonitor(partial(self._store.get, f"{announcement.nonce}/pulse"), HEARTBEAT_EVERY)

    def _run_due_work(self) -> None:
        if not self._sent_facts and (member_facts := self._participant.member_facts()) is not None:
            self._store.append(f"{self._nonce}/facts", encode(member_facts))
            self._sent_facts = True
        if self._sent_facts and self._schedule is not None:
            task = decode_or_none(self._store.get(f"{self._nonce}/plan/{self._token}"), ProbeTask)
            if task is not None and self._step < task.step <= MOST_STEPS:
                self._step = task.step
                self._measure(self._schedule, task)

    def _measure(self, schedule: ProbeSchedule, task: ProbeTask) -> None:
        try:
            found = schedule.take_part(task)
        except MalformedMessage:
            return
        capture = pack_member(Member(self._identity.number, found.sections))
        result = ProbeResult(self._token, self._identity.number, capture, task.step, found.note)
        self._store.append(f"{self._nonce}/measured", encode(result))

    def _acknowledge(self) -> None:
        """Acknowledge the verdict and wait for all others; the gather may be removed by then."""
        until, interval = monotonic() + LEAVING, PollInterval(self._identity.world_size)
        try:
            acknowledge(self._store, self._nonce, "verdict", "heard", self._token.encode())
            while monotonic() < until and self._store.get(f"{self._nonce}/leave") is None:
                if self._store.get(f"{self._nonce}/verdict") is None:
                    return
                interval.rest(until)
        except StoreLost:
            return
