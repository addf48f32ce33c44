"""Coordinates a gather: announce it, wait for members, schedule probes, dismiss all."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from doctor.cluster.gather.member_table import MemberTable
from doctor.cluster.gather.protocol import (
    ANNOUNCEMENT,
    HEARTBEAT_EVERY,
    GatherClosed,
    GatherVerdict,
    MemberFacts,
    ProbeTask,
    closed_marker,
)
from doctor.cluster.membership.heartbeat import Heartbeat
from doctor.cluster.membership.leadership import Leadership
from doctor.cluster.membership.protocol import JOIN_REQUESTS, JoinRequest, LeaderAnnouncement
from doctor.cluster.rendezvous.process_identity import ProcessIdentity
from doctor.cluster.transport.codec import encode
from doctor.cluster.transport.failover import Store
from doctor.cluster.transport.polling import PollInterval
from doctor.cluster.transport.signing import RejectedMessages
from doctor.cluster.transport.store import StoreLost
from doctor.core.background import start_daemon
from doctor.core.clock import monotonic
from doctor.core.job import Job, build_job
from doctor.core.text import ranks_in_words

if TYPE_CHECKING:
    from doctor.cluster.gather.probe_schedule import ProbeRound, ProbeSchedule

GRACE = 0.2
"""Seconds without a new member after all have joined, for a process with a duplicate rank."""
EXTRA = 1.0
"""Seconds without a new member if the count is complete but one rank joined twice and another did not."""
ON_THE_WAY = 5.0
"""Seconds without a new member if more processes are known to be joining than expected."""
FIRST_STATUS_AFTER, STATUS_EVERY = 3.0, 10.0
"""Seconds until the first report of missing ranks, and between later ones."""
ACKNOWLEDGE_SECONDS = 3.0
"""Seconds for all members to read the verdict."""


class Superseded(Exception):
    """Another process coordinates the gather now."""


class MemberRegistry(NamedTuple):
    """Information about ranks from outside the store: a cluster has a list of its nodes.

    ``hosts``: their names, by rank; ``gone`` returns the ranks that have ended or could not be started.
    """

    hosts: Sequence[str]
    gone: Callable[[], Collection[int]]


class Coordinator:
    """Coordinator of one gather, which is closed at the monotonic time ``close_at``."""

    def __init__(
        self,
        store: Store,
        identity: ProcessIdentity,
        nonce: str,
        *,
        close_at: float,
        write_line: Callable[[str], None],
        registry: MemberRegistry | None = None,
        overtime: float = 0.0,
        rejected: RejectedMessages | None = None,
    ) -> None:
        self._store = store
        self._identity = identity
        self._nonce = nonce
        seconds = max(0.0, close_at - monotonic()) + overtime
        announcement = LeaderAnnouncement(nonce, identity.number, seconds)
        self._leadership = Leadership(store, ANNOUNCEMENT, announcement)
        self._close_at = close_at
        self._write_line = write_line
        self._registry = registry
        self._rejected = rejected or RejectedMessages()
        self._own_token = ""
        self._verdict = GatherVerdict(0)
        self._asked: list[MemberFacts] = []
        self._next_status = monotonic() + FIRST_STATUS_AFTER
        self._joined, self._joined_at = -1, 0.0
        self._heartbeat = Heartbeat(partial(store.set, f"{nonce}/pulse"), identity.number, HEARTBEAT_EVERY)
        self.table = MemberTable(store, nonce, identity.world_size)

    def open(self, join_request: JoinRequest | None = None) -> None:
        """Announce the gather, replacing any earlier announcement.

        ``join_request``: of this process, for members that may have to continue without it.
        """
        self._leadership.announce()
        if join_request is not None:
            self._store.append(f"{self._nonce}/{JOIN_REQUESTS}", encode(join_request))

    def take_over(self, after: bytes | None) -> bool:
        """Replace a lost coordinator; return ``False`` if another process did so first."""
        if not self._leadership.take_over(after):
            return False
        self.table.recall(after)
        return True

    def gather(self, own_facts: Callable[[], MemberFacts | None] | None, schedule: ProbeSchedule | None) -> Job:
        """Wait until all have joined or the time is up, run the probes, and return the job.

        ``own_facts`` returns the facts of this process once they are collected; ``None`` if it is not a rank.

        Raises:
            Superseded: another process coordinates the gather now.
        """
        if own_facts is not None:
            self._enter_own(own_facts)
        begin = self._close_at if schedule is None else self._close_at - (schedule.seconds - schedule.overtime)
        self._wait(lambda: self._are_all_here() or self._is_complete(), until=begin)
        if schedule is not None:
            self._measure(schedule)
        self._wait(self._is_complete, until=self._close_at)
        self._heartbeat.pause()
        if damaged := self.table.damaged:
            self._write_line(f"{len(damaged)} messages of other ranks could not be decoded: {damaged[0]}")
        return self.job()

    def _enter_own(self, own_facts: Callable[[], MemberFacts | None]) -> None:
        """Add this process to the membership, without a deadline: its collectors have their own."""

        def is_here() -> bool:
            if (facts := own_facts()) is not None:
                self._own_token = facts.token
                self.table.enter_own(facts)
            return facts is not None

        self._wait(is_here, until=math.inf)

    def job(self) -> Job:
        """Return the job as far as it has been collected."""
        waited = monotonic() >= self._close_at or not self.table.awaited
        # Ranks whose messages were not authentic may have joined.
        is_known = waited and not self._rejected.count and not self.table.disputed
        absent = self.table.missing if is_known else ()
        listed = {number: self._registry.hosts[number] for number in absent} if self._registry else {}
        return build_job(
            self.table.members(),
            world_size=self._identity.world_size,
            absent=absent,
            last_seen=self.table.last_seen(self._asked, listed),
        )

    def _are_all_here(self) -> bool:
        return not self.table.awaited and not self.table.expected_soon

    def _is_complete(self) -> bool:
        now, joined = monotonic(), len(self.table.joined)
        if joined != self._joined:
            self._joined, self._joined_at = joined, now
        quiet = now - self._joined_at
        if self._are_all_here():
            return quiet >= GRACE
        if not self.table.awaited:
            return quiet >= ON_THE_WAY
        return joined >= self.table.world_size and quiet >= EXTRA

    def _wait(self, done: Callable[[], bool], *, until: float) -> None:
        interval = PollInterval(self._identity.world_size)
        while True:
            self._look()
            if done() or monotonic() >= until:
                return
            self._report_status()
            interval.rest(until)

    def _look(self) -> None:
        self.table.look()
        self._heartbeat.beat()
        if self._registry is not None:
            self.table.gone.update(self._registry.gone())
        if not self._leadership.is_held():
            raise Superseded

    def _report_status(self) -> None:
        now = monotonic()
        awaited = self.table.awaited
        if now >= self._next_status and awaited:
            self._next_status = now + STATUS_EVERY
            left = max(0.0, self._close_at - now)
            joined = f"{len(self.table.numbers)} of {self.table.world_size} ranks joined"
            self._write_line(f"{joined}; waiting for {ranks_in_words(awaited)}, at most {left:.0f} s")

    def _measure(self, schedule: ProbeSchedule) -> None:
        end, table = monotonic() + schedule.seconds, self.table
        while probe_round := schedule.next(self.job(), table.in_order, table.notes, end - monotonic()):
            table.notes.clear()
            self._run_round(probe_round, schedule)

    def _run_round(self, probe_round: ProbeRound, schedule: ProbeSchedule) -> None:
        tasks = probe_round.tasks
        self._asked = [facts for token, facts in self.table.joined.items() if token in tasks]
        for token, task in tasks.items():
            if token != self._own_token:
                self._store.set(f"{self._nonce}/plan/{token}", encode(task))
        if self._own_token in tasks:
            task = tasks[self._own_token]

            def take_part() -> None:
                found = schedule.take_part(task)
                self.table.note_measured(self._own_token, task.step, found.sections, found.note)

            start_daemon("doctor-probe", take_part)
        self._wait(lambda: not self._unmeasured(tasks), until=monotonic() + probe_round.seconds)
        for token in self._unmeasured(tasks):
            self.table.note_timeout(token, probe_round.makes)

    def _unmeasured(self, tasks: Mapping[str, ProbeTask]) -> list[str]:
        """Return the tokens of the members that have not finished their task and still may."""
        gone = {token for token, facts in self.table.joined.items() if facts.number in self.table.gone}
        return [
            token for token, task in tasks.items() if self.table.steps.get(token, 0) < task.step and token not in gone
        ]

    def announce(self, code: int) -> None:
        """Publish the exit code with which all leave."""
        self._verdict = GatherVerdict.of(code, self.table.joined)
        try:
            self._store.set(f"{self._nonce}/verdict", encode(self._verdict))
        except StoreLost:
            self._write_line("the other ranks are no longer reachable and do not receive the verdict")

    def dismiss(self, others: int | None = None, seconds: float | None = None) -> None:
        """Dismiss the members once those that still run, or so many ``others``, have acknowledged the verdict."""
        mailbox, acknowledged = self._store.mailbox(f"{self._nonce}/heard"), set[bytes]()
        if others is None:
            members = [facts for token, facts in self.table.joined.items() if token != self._own_token]
            others = sum(facts.number not in self.table.gone for facts in members)
        until = monotonic() + (ACKNOWLEDGE_SECONDS if seconds is None else seconds)
        interval = PollInterval(self._identity.world_size)
        try:
            while len(acknowledged) < others and monotonic() < until:
                acknowledged.update(mailbox.fresh())  # a set: a member may have written to two connections
                interval.rest(until)
            self._store.set(f"{self._nonce}/leave", b"")
            if self._leadership.is_held():
                self._store.set("last", encode(GatherClosed(self._nonce, self._verdict)))
                self._store.set(ANNOUNCEMENT, closed_marker(self._nonce))
            self._store.clear(self._nonce)
        except StoreLost:
            return
