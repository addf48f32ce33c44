"""Keeping a gathering: call, wait for those who come, have them measure, and let all leave together."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Protocol

from doctor.analysis.launch_origin import ranks_in_words
from doctor.cluster.gather.heartbeat import CoordinatorHeartbeat
from doctor.cluster.gather.membership import MemberRecord, Membership
from doctor.cluster.gather.protocol import (
    GatherAnnouncement,
    GatherClosed,
    GatherVerdict,
    JoinRequest,
    MemberFacts,
    ProbeTask,
    closed_marker,
)
from doctor.cluster.rendezvous.process_identity import ProcessIdentity
from doctor.cluster.transport.codec import encode
from doctor.cluster.transport.polling import PollInterval
from doctor.cluster.transport.signing import RejectedMessages
from doctor.cluster.transport.store import KeyValueStore, StoreLost
from doctor.core.job import Job, build_job

if TYPE_CHECKING:
    from doctor.cluster.gather.probe_schedule import ProbeRound, ProbeSchedule

GRACE = 0.2
"""Seconds of calm after all have come, for a process that claims a rank which another one has taken."""
EXTRA = 1.0
"""Seconds of calm where as many came as were expected, but one rank more than once and another one not."""
ON_THE_WAY = 5.0
"""Seconds of calm where processes are known to be on the way beyond those expected."""
FIRST_STATUS_AFTER, STATUS_EVERY = 3.0, 10.0
"""Seconds after which the user is told who is still missing, and again."""
ACKNOWLEDGE_SECONDS = 3.0
"""Seconds for all who came to have read the verdict."""


class Superseded(Exception):
    """Another process keeps the gathering now."""


class MemberRegistry(Protocol):
    """What is known of the ranks from elsewhere than the board: a cluster has a list of its nodes."""

    def host_of(self, number: int) -> str:
        """The name of the host on which a rank is to be."""

    def gone(self) -> Collection[int]:
        """The ranks that have ended, or could not be started: those that have not come will not."""


class Coordinator:
    """Of one gathering. ``close_at`` is the monotonic moment after which nobody is waited for."""

    def __init__(
        self,
        board: KeyValueStore,
        seat: ProcessIdentity,
        nonce: str,
        *,
        close_at: float,
        tell: Callable[[str], None],
        register: MemberRegistry | None = None,
        overtime: float = 0.0,
        rejected: RejectedMessages | None = None,
    ) -> None:
        self._board = board
        self._seat = seat
        self._nonce = nonce
        self._call = encode(GatherAnnouncement(nonce, seat.number, max(0.0, close_at - time.monotonic()) + overtime))
        self._close_at = close_at
        self._tell = tell
        self._register = register
        self._rejected = rejected or RejectedMessages()
        self._own = ""
        self._verdict = GatherVerdict(0)
        self._asked: list[MemberRecord] = []
        self._next_news = time.monotonic() + FIRST_STATUS_AFTER
        self._calm = _QuietPeriod()
        self._pulse = CoordinatorHeartbeat(board, nonce)
        self.roll = Membership(board, nonce, seat.world_size)

    def open(self, hello: JoinRequest | None = None) -> None:
        """Call, whatever stood there before. ``hello``: of this process, for those who may have to go on without it."""
        self._board.set("call", self._call)
        if hello is not None:
            self._board.box(f"{self._nonce}/hello").append(encode(hello))

    def take_over(self, after: bytes | None) -> bool:
        """Call in the place of a keeper that is gone; ``False`` where another process did so first."""
        if not self._board.exchange("call", after, self._call):
            return False
        self.roll.recall(after)
        return True

    def gather(self, own: Callable[[], MemberFacts | None] | None, survey: ProbeSchedule | None) -> Job:
        """Wait until all are here or the time is up, measure on the way, and make the job of it. ``own``: the card of
        this process, once its facts are there; ``None`` where it is no rank.

        Raises:
            BoardLost: the board is gone.
            Superseded: another process keeps the gathering now.
        """
        if own is not None:
            self._own = self._enter(own)
        begin = self._close_at if survey is None else self._close_at - (survey.seconds - survey.overtime)
        self._wait(lambda: self._are_all_here() or self._is_complete(), until=begin)
        if survey is not None:
            self._measure(survey)
        self._wait(self._is_complete, until=self._close_at)
        self._pulse.rest()
        if damaged := self.roll.damaged:
            self._tell(f"{len(damaged)} of the messages of other ranks can't be read: {damaged[0]}")
        return self.job()

    def _enter(self, own: Callable[[], MemberFacts | None]) -> str:
        """Take this process into the roll, whose collectors have deadlines of their own."""
        cards: list[MemberFacts] = []

        def is_here() -> bool:
            cards.extend(card for card in [own()] if card is not None)
            return bool(cards)

        self._wait(is_here, until=math.inf)
        self.roll.enter_own(cards[0])
        return cards[0].token

    def job(self) -> Job:
        """The job as far as it came."""
        waited = time.monotonic() >= self._close_at or not self.roll.awaited
        # Ranks whose messages were not authentic may be there: nobody can tell.
        is_known = waited and not self._rejected.count and not self.roll.disputed
        absent = self.roll.missing if is_known else ()
        listed = {number: self._register.host_of(number) for number in absent} if self._register else {}
        return build_job(
            self.roll.members(),
            world_size=self._seat.world_size,
            absent=absent,
            last_seen=self.roll.last_seen(self._asked, listed),
        )

    def _are_all_here(self) -> bool:
        return not self.roll.awaited and not self.roll.expected_soon

    def _is_complete(self) -> bool:
        """Whether nobody else is to be expected."""
        calm = self._calm.lasts(len(self.roll.arrivals))
        if self._are_all_here():
            return calm >= GRACE
        if not self.roll.awaited:
            return calm >= ON_THE_WAY
        return len(self.roll.arrivals) >= self.roll.world_size and calm >= EXTRA

    def _wait(self, done: Callable[[], bool], *, until: float) -> None:
        pace = PollInterval(self._seat.world_size)
        while True:
            self._look()
            if done() or time.monotonic() >= until:
                return
            self._news()
            pace.rest(until)

    def _look(self) -> None:
        self.roll.look()
        self._pulse.beat()
        if self._register is not None:
            self.roll.gone.update(self._register.gone())
        standing = self._board.get("call")
        if standing is None:  # removed, or written over by who has no key
            self._board.set("call", self._call)
        elif standing != self._call:
            raise Superseded

    def _news(self) -> None:
        now = time.monotonic()
        awaited = self.roll.awaited
        if now >= self._next_news and awaited:
            self._next_news = now + STATUS_EVERY
            left = max(0.0, self._close_at - now)
            came = f"{len(self.roll.numbers)} of {self.roll.world_size} ranks are here"
            self._tell(f"{came}; waiting for {ranks_in_words(awaited)}, {left:.0f} s at most")

    def _measure(self, survey: ProbeSchedule) -> None:
        end = time.monotonic() + survey.seconds
        while True:
            plan = survey.next(self.job(), self.roll.in_order, self.roll.notes, end - time.monotonic())
            if plan is None:
                return
            self.roll.notes.clear()
            self._hand_out(plan.tasks, survey)
            self._wait_for(plan)
            for token in self._unmeasured(plan.tasks):
                self.roll.note_silent(token, plan.makes)

    def _wait_for(self, plan: ProbeRound) -> None:
        self._wait(lambda: not self._unmeasured(plan.tasks), until=time.monotonic() + plan.seconds)

    def _hand_out(self, tasks: Mapping[str, ProbeTask], survey: ProbeSchedule) -> None:
        self._asked = [arrival for token, arrival in self.roll.arrivals.items() if token in tasks]
        for token, task in tasks.items():
            if token != self._own:
                self._board.set(f"{self._nonce}/plan/{token}", encode(task))
        if self._own in tasks:
            threading.Thread(target=self._take_part, args=(survey, tasks[self._own]), daemon=True).start()

    def _unmeasured(self, tasks: Mapping[str, ProbeTask]) -> list[str]:
        """The tokens of those who have not done their task, and may still."""
        gone = {token for token, arrival in self.roll.arrivals.items() if arrival.number in self.roll.gone}
        return [
            token for token, task in tasks.items() if self.roll.steps.get(token, 0) < task.step and token not in gone
        ]

    def _take_part(self, survey: ProbeSchedule, task: ProbeTask) -> None:
        found = survey.take_part(task)
        self.roll.note_measured(self._own, task.step, found.sections, found.note)

    def announce(self, code: int) -> None:
        """Let everybody know how all will leave."""
        self._verdict = GatherVerdict.of(code, self.roll.arrivals)
        try:
            self._board.set(f"{self._nonce}/verdict", encode(self._verdict))
        except StoreLost:
            self._tell("the other ranks can't be reached any more, and do not hear the verdict")

    @property
    def _others(self) -> int:
        """How many came and are still there, without this process."""
        came = ((token, arrival.number) for token, arrival in self.roll.arrivals.items())
        return sum(token != self._own and number not in self.roll.gone for token, number in came)

    def dismiss(self, others: int | None = None, seconds: float | None = None) -> None:
        """Wait until those who came have heard, or so many ``others``, and let them go. Takes ``seconds`` at most, by
        default a few."""
        heard, count = self._board.box(f"{self._nonce}/heard"), 0
        others = self._others if others is None else others
        until, pace = (
            time.monotonic() + (ACKNOWLEDGE_SECONDS if seconds is None else seconds),
            PollInterval(self._seat.world_size),
        )
        try:
            while count < others and time.monotonic() < until:
                count += len(heard.fresh())
                pace.rest(until)
            self._board.set(f"{self._nonce}/leave", b"")
            if self._board.get("call") == self._call:
                self._board.set("last", encode(GatherClosed(self._nonce, self._verdict)))
                self._board.set("call", closed_marker(self._nonce))
            self._board.clear(self._nonce)
        except StoreLost:
            return


class _QuietPeriod:
    """How long a number has not changed."""

    def __init__(self) -> None:
        self._number: int | None = None
        self._since = 0.0

    def lasts(self, number: int) -> float:
        """Seconds since another number than this one was given."""
        now = time.monotonic()
        if number != self._number:
            self._number, self._since = number, now
        return now - self._since
