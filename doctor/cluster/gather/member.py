"""Member of a gather: join, send facts, run probes, await the verdict."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from doctor.cluster.gather.heartbeat import HeartbeatMonitor
from doctor.cluster.gather.protocol import (
    MOST_STEPS,
    GatherAnnouncement,
    GatherClosed,
    GatherVerdict,
    JoinRequest,
    MemberFacts,
    ProbeResult,
    ProbeTask,
    closed_marker,
)
from doctor.cluster.rendezvous.process_identity import ProcessIdentity
from doctor.cluster.transport.codec import MalformedMessage, decode_or_none, encode, pack_member
from doctor.cluster.transport.failover import Store
from doctor.cluster.transport.polling import PollInterval
from doctor.cluster.transport.signing import RejectedMessages
from doctor.cluster.transport.store import StoreLost
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
    """No process coordinates a gather, or its heartbeat timed out.

    ``announcement`` is what the store held.
    """

    def __init__(self, announcement: bytes | None) -> None:
        super().__init__()
        self.announcement = announcement


class GatherMember:
    """Member of gathers that other processes coordinate.

    ``member_facts`` returns this process's facts, or ``None`` until they are collected. ``max_seconds`` limits a
    gather, whatever its coordinator announces.
    """

    def __init__(
        self,
        store: Store,
        identity: ProcessIdentity,
        join_request: JoinRequest,
        member_facts: Callable[[], MemberFacts | None],
        schedule: ProbeSchedule | None,
        *,
        close_at: float,
        max_seconds: float = math.inf,
        rejected: RejectedMessages | None = None,
    ) -> None:
        self._store = store
        self._identity = identity
        self._join_request = join_request
        self._member_facts = member_facts
        self._schedule = schedule
        self._own_deadline = self._deadline = close_at + IN_TURN * min(identity.number, TURNS)
        self._max_seconds = max_seconds
        self._rejected = rejected or RejectedMessages()
        self._answered = b""
        self._announcements = 0
        self._last_announcement: bytes | None = None
        self._watch: HeartbeatMonitor | None = None
        self._nonce = ""
        self._sent_facts = False
        self._step = 0
        self._ended: GatherVerdict | None = None

    def participate(self) -> GatherVerdict:
        """Take part until the verdict, and return it once all may leave.

        Raises:
            StoreLost: the store is gone.
            NoCoordinator: no gather was announced, or its coordinator has not finished in time.
        """
        interval = PollInterval(self._identity.world_size)
        while True:
            self._read_announcement()
            if self._nonce:
                self._run_due_work()
                verdict = self._verdict()
                if verdict is not None and self._is_covered_by(verdict):
                    self._acknowledge()
                    return verdict
                self._check_coordinator(is_closed=verdict is not None)
            if self._ended is not None:
                return self._ended
            if time.monotonic() >= self._deadline:
                raise NoCoordinator(self._last_announcement)
            interval.rest(self._deadline)

    def _read_announcement(self) -> None:
        """Join a gather that was announced since the last poll, or record that this one is closed."""
        data = self._store.get("call")
        if data is None:
            self._answer_unauthenticated()
        if data is None or data == self._last_announcement:
            return
        self._last_announcement = data
        if data == closed_marker(self._nonce):
            last = decode_or_none(self._store.get("last"), GatherClosed)
            self._ended = last.verdict if last is not None and last.nonce == self._nonce else None
        announcement = decode_or_none(data, GatherAnnouncement)
        if announcement is None:
            return
        self._announcements += 1
        if self._announcements > MOST_CALLS:
            raise NoCoordinator(data)
        self._nonce, self._sent_facts, self._step = announcement.nonce, False, 0
        evaluation = EVALUATION_SECONDS + EVALUATION_SECONDS_PER_RANK * self._identity.world_size
        evaluation += IN_TURN * min(self._identity.number, TURNS)
        self._deadline = time.monotonic() + min(announcement.seconds, self._max_seconds) + evaluation
        self._watch = HeartbeatMonitor(self._store, announcement.nonce)
        self._store.append(f"{announcement.nonce}/hello", encode(self._join_request))

    def _answer_unauthenticated(self) -> None:
        """Reply to an announcement with another key or none, so that its sender sees this rank."""
        data = self._rejected.latest.get("call", b"")
        if data != self._answered and (announcement := decode_or_none(data, GatherAnnouncement)) is not None:
            self._answered = data
            self._store.append(f"{announcement.nonce}/hello", encode(self._join_request))

    def _is_covered_by(self, verdict: GatherVerdict) -> bool:
        """Whether this process was evaluated, or no process was."""
        return not verdict.judged or verdict.covers(self._join_request.token)

    def _check_coordinator(self, *, is_closed: bool) -> None:
        """Shorten the deadline to this process's own if the coordinator is lost or left it out.

        It may recover, another one may announce a gather, and it may be a leftover of an earlier run.
        """
        if is_closed or (self._watch is not None and self._watch.is_silent()):
            self._watch = None
            self._deadline = min(self._deadline, self._own_deadline)

    def _run_due_work(self) -> None:
        if not self._sent_facts and (member_facts := self._member_facts()) is not None:
            self._store.append(f"{self._nonce}/card", encode(member_facts))
            self._sent_facts = True
        if self._sent_facts and self._schedule is not None:
            task = decode_or_none(self._store.get(f"{self._nonce}/plan/{self._join_request.token}"), ProbeTask)
            if task is not None and self._step < task.step <= MOST_STEPS:
                self._step = task.step
                self._measure(self._schedule, task)

    def _measure(self, schedule: ProbeSchedule, task: ProbeTask) -> None:
        try:
            found = schedule.take_part(task)
        except MalformedMessage:
            return
        capture = pack_member(Member(self._identity.number, found.sections))
        result = ProbeResult(self._join_request.token, self._identity.number, capture, task.step, found.note)
        self._store.append(f"{self._nonce}/measured", encode(result))

    def _verdict(self) -> GatherVerdict | None:
        data = self._store.get(f"{self._nonce}/verdict")
        return None if data is None else decode_or_none(data, GatherVerdict)

    def _acknowledge(self) -> None:
        """Acknowledge the verdict and wait for all others; the gather may be removed by then."""
        until, interval = time.monotonic() + LEAVING, PollInterval(self._identity.world_size)
        try:
            self._store.append(f"{self._nonce}/heard", encode(self._join_request))
            while time.monotonic() < until:
                if self._store.get(f"{self._nonce}/leave") is not None:
                    return
                if self._store.get(f"{self._nonce}/verdict") is None:
                    return
                interval.rest(until)
        except StoreLost:
            return
