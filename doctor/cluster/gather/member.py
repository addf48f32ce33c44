"""Attending a gathering that another process keeps: hear the call, bring the facts, measure, wait for the verdict."""

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
from doctor.cluster.transport.polling import PollInterval
from doctor.cluster.transport.signing import RejectedMessages
from doctor.cluster.transport.store import KeyValueStore, StoreLost
from doctor.core.job import Member

if TYPE_CHECKING:
    from doctor.cluster.gather.probe_schedule import ProbeSchedule

EVALUATION_SECONDS = 10.0
"""Seconds that the keeper may take after the gathering is closed, to measure and to judge."""
EVALUATION_SECONDS_PER_RANK = 1e-3
"""Seconds for each rank besides: a job of sixteen thousand takes four."""
LEAVING = 20.0
"""Seconds after the verdict within which the keeper lets all go, unless its terminal holds it up."""
MOST_CALLS = 16
"""Gatherings that one process hears of: each keeper that is lost is followed by another one."""
IN_TURN, TURNS = 0.2, 4
"""Seconds by which each rank waits longer than the one before it until it takes the place of a keeper that is gone."""


class NoCoordinator(Exception):
    """No process keeps a gathering, or its keeper has fallen silent. ``call`` is what stood on the board."""

    def __init__(self, call: bytes | None) -> None:
        super().__init__()
        self.call = call


class GatherMember:
    """Of gatherings that others keep. ``card``: this process's card once its facts are there, until then ``None``.
    ``longest``: seconds that a gathering may take, whatever its keeper says."""

    def __init__(
        self,
        board: KeyValueStore,
        seat: ProcessIdentity,
        hello: JoinRequest,
        card: Callable[[], MemberFacts | None],
        survey: ProbeSchedule | None,
        *,
        close_at: float,
        longest: float = math.inf,
        rejected: RejectedMessages | None = None,
    ) -> None:
        self._board = board
        self._seat = seat
        self._hello = hello
        self._card = card
        self._survey = survey
        self._own_patience = self._patience = close_at + IN_TURN * min(seat.number, TURNS)
        self._longest = longest
        self._rejected = rejected or RejectedMessages()
        self._answered = b""
        self._calls = 0
        self._heard: bytes | None = None
        self._watch: HeartbeatMonitor | None = None
        self._nonce = ""
        self._posted = False
        self._step = 0
        self._ended: GatherVerdict | None = None

    def attend(self) -> GatherVerdict:
        """The verdict, once all may leave.

        Raises:
            BoardLost: the board is gone.
            NobodyKeeps: nobody called, or the caller has not ended in time.
        """
        pace = PollInterval(self._seat.world_size)
        while True:
            self._hear()
            if self._nonce:
                self._do_what_is_due()
                verdict = self._verdict()
                if verdict is not None and self._is_meant_by(verdict):
                    self._leave_together()
                    return verdict
                self._mind_the_keeper(is_closed=verdict is not None)
            if self._ended is not None:
                return self._ended
            if time.monotonic() >= self._patience:
                raise NoCoordinator(self._heard)
            pace.rest(self._patience)

    def _hear(self) -> None:
        """Come to a gathering that was called since the last look, or note that this one is over."""
        data = self._board.get("call")
        if data is None:
            self._answer_stranger()
        if data is None or data == self._heard:
            return
        self._heard = data
        if data == closed_marker(self._nonce):
            last = decode_or_none(self._board.get("last"), GatherClosed)
            self._ended = last.verdict if last is not None and last.nonce == self._nonce else None
        call = decode_or_none(data, GatherAnnouncement)
        if call is None:
            return
        self._calls += 1
        if self._calls > MOST_CALLS:
            raise NoCoordinator(data)
        self._nonce, self._posted, self._step = call.nonce, False, 0
        judging = EVALUATION_SECONDS + EVALUATION_SECONDS_PER_RANK * self._seat.world_size
        judging += IN_TURN * min(self._seat.number, TURNS)
        self._patience = time.monotonic() + min(call.seconds, self._longest) + judging
        self._watch = HeartbeatMonitor(self._board, call.nonce)
        self._board.box(f"{call.nonce}/hello").append(encode(self._hello))

    def _answer_stranger(self) -> None:
        """Let who called with another key, or without one, see that there is a rank that can't understand it."""
        data = self._rejected.latest.get("call", b"")
        if data != self._answered and (call := decode_or_none(data, GatherAnnouncement)) is not None:
            self._answered = data
            self._board.box(f"{call.nonce}/hello").append(encode(self._hello))

    def _is_meant_by(self, verdict: GatherVerdict) -> bool:
        """Whether this process was judged, or nobody was."""
        return not verdict.judged or verdict.covers(self._hello.token)

    def _mind_the_keeper(self, *, is_closed: bool) -> None:
        """A keeper that has fallen silent, or has closed the gathering without this process, is waited for until this
        process's own time is up: it may go on, another one may call, and it may be the left-over of an earlier run."""
        if is_closed or (self._watch is not None and self._watch.is_silent()):
            self._watch = None
            self._patience = min(self._patience, self._own_patience)

    def _do_what_is_due(self) -> None:
        if not self._posted and (card := self._card()) is not None:
            self._board.box(f"{self._nonce}/card").append(encode(card))
            self._posted = True
        if self._posted and self._survey is not None:
            task = decode_or_none(self._board.get(f"{self._nonce}/plan/{self._hello.token}"), ProbeTask)
            if task is not None and self._step < task.step <= MOST_STEPS:
                self._step = task.step
                self._measure(self._survey, task)

    def _measure(self, survey: ProbeSchedule, task: ProbeTask) -> None:
        try:
            found = survey.take_part(task)
        except MalformedMessage:
            return
        capture = pack_member(Member(self._seat.number, found.sections))
        measurement = ProbeResult(self._hello.token, self._seat.number, capture, task.step, found.note)
        self._board.box(f"{self._nonce}/measured").append(encode(measurement))

    def _verdict(self) -> GatherVerdict | None:
        data = self._board.get(f"{self._nonce}/verdict")
        return None if data is None else decode_or_none(data, GatherVerdict)

    def _leave_together(self) -> None:
        """Say that the verdict was heard, and stay until everybody has. The gathering may be cleared away by then."""
        until, pace = time.monotonic() + LEAVING, PollInterval(self._seat.world_size)
        try:
            self._board.box(f"{self._nonce}/heard").append(encode(self._hello))
            while time.monotonic() < until:
                if self._board.get(f"{self._nonce}/leave") is not None:
                    return
                if self._board.get(f"{self._nonce}/verdict") is None:
                    return
                pace.rest(until)
        except StoreLost:
            return
