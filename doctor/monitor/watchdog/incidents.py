"""Incidents: a rank stalls or fails, and all ranks report their position."""

from __future__ import annotations

import math
import signal
from pathlib import Path

import msgspec

from doctor.cluster.transport.codec import decode_all, encode
from doctor.cluster.transport.store import Mailbox
from doctor.monitor.telemetry.progress import Stall
from doctor.monitor.watch_options import OnHang
from doctor.monitor.watchdog.abort import abort_process
from doctor.monitor.watchdog.decision import Decision
from doctor.monitor.watchdog.protocol import DecisionMessage, RankPresence, RankResumed
from doctor.monitor.watchdog.rounds.collection_round import CollectionRound, RoundTimeouts
from doctor.monitor.watchdog.rounds.round_request import RoundRequest
from doctor.monitor.watchdog.stall_tracker import StallTracker
from doctor.monitor.watchdog.watchdog_context import WatchdogContext

TIMES = RoundTimeouts(grace=2.0, longest=5.0, broken=1.0)
"""A live rank sees an incident within one tick; reading its newest collectives for the first time takes a second or
more; after an exception, other ranks may fail right away as well."""
PER_RANK = 1 / 500
"""Seconds of grace added per rank of the world: a rank may be busy evaluating a round."""


class ActiveIncident(msgspec.Struct, frozen=True):
    """A stall that this rank confirmed, and its ``seconds`` on each rank that has resumed."""

    decision: Decision
    resumed: Mailbox
    seconds: dict[int, float]

    @property
    def is_over(self) -> bool:
        """Whether all ranks at fault have resumed, or any rank if none was at fault."""
        return bool(self.seconds) and self.seconds.keys() >= {*self.decision.ranks}


class IncidentHandler:
    """Raises incidents of this rank and takes part in those of others.

    Incidents have the same number on all ranks; each is over once it is evaluated.
    """

    def __init__(self, context: WatchdogContext, on_hang: OnHang) -> None:
        self._context = context
        self._on_hang = on_hang
        self._number = 1
        self._stalls = StallTracker()
        self._collection: CollectionRound | None = None
        self._waiting: list[RoundRequest] = []
        self._is_shared = False  # whether the incident is shared by all ranks, not private to this one
        self._evaluated: ActiveIncident | None = None
        self._resumed_locally = False
        self._pending_abort: tuple[DecisionMessage, int] | None = None  # and the points that had been passed by then
        self._waited_until = -math.inf
        self._killed: set[int] = set()
        self.failure: DecisionMessage | None = None

    @property
    def is_active(self) -> bool:
        """Whether an incident is in progress."""
        return self._collection is not None

    def step(self, now: float) -> None:
        """Raise an incident if there is a reason, join those of others, and advance the current one."""
        stall = self._context.source.stall()
        self._stalls.note(stall, now)
        self._check_recovery(now)
        if stall is not None:  # without the time that the training thread spent awaiting a decision
            idle = min(stall.idle, now - self._waited_until)
            stall = msgspec.structs.replace(stall, idle=idle) if idle > stall.limit else None
        self._abort_if_stalled(stall)
        if self._collection is not None:
            self._step_collection(self._collection, now)
        elif self._stalls.is_news(stall, now) or self._has_killed_peer(stall):
            self._raise_incident()
            self._join_collection(now)
        elif self._context.peer_store.get(f"{self._name}/raised") is not None:
            self._join_collection(now)

    def _has_killed_peer(self, stall: Stall | None) -> bool:
        """Return whether a peer on this host was killed or ended with an error, once for each: a launcher ends the
        others soon.

        An abort during a hang may be that of a timeout.
        """
        rank, number = self._context.local_peers.killed_neighbor or (-1, 0)
        if not number or rank in self._killed or (number == signal.SIGABRT and stall is not None):
            return False
        self._killed.add(rank)
        return True

    def note_waiting(self, now: float) -> None:
        """Record that the training thread is blocked because it awaits a decision."""
        self._waited_until = now

    def fail(self, request: RoundRequest, now: float) -> None:
        """Report that an exception has ended this rank.

        Failures after an evaluated one are its consequences.
        """
        context = self._context
        if self.failure is not None:
            context.take_position()
            request.answer(self.failure.ruling)
            return
        self._waiting.append(request)
        self._raise_incident()
        if self._collection is None:
            self._collection = self._open_collection(now)
        self._collection.announce()  # taking stacks takes time, and the others must not evaluate without it
        context.take_position()
        self._collection.report(failed=True)

    @property
    def _name(self) -> str:
        return f"alarm-{self._number}"

    def _raise_incident(self) -> None:
        self._context.peer_store.set(f"{self._name}/raised", b"1")

    def _open_collection(self, now: float) -> CollectionRound:
        context = self._context
        presences = decode_all(context.peer_store.mailbox("end/here").fresh(), RankPresence)
        self._is_shared = context.is_joined
        extra = PER_RANK * context.world_size
        times = msgspec.structs.replace(TIMES, grace=TIMES.grace + extra, longest=TIMES.longest + extra)
        ended = {presence.rank for presence in presences if presence.came}
        return CollectionRound(
            self._name, "stall", context, times, context.evaluate_incident, now=now, observes=True, ended=ended
        )

    def _join_collection(self, now: float) -> None:
        self._collection = self._open_collection(now)
        self._collection.announce()
        self._context.take_position()
        self._collection.report()

    def _step_collection(self, collection: CollectionRound, now: float) -> None:
        message = collection.step(now)
        if message is None and not collection.is_over(now):
            return
        self._collection, waiting, self._waiting = None, self._waiting, []
        self._number += self._is_shared
        if message is not None:
            self._apply(collection, message, now)
        for request in waiting:
            if message is None or message.occasion == "failure":
                request.answer(message.ruling if message else None)
            else:
                self.fail(request, now)  # the exception occurred while the others were being evaluated for a stall

    def _apply(self, collection: CollectionRound, message: DecisionMessage, now: float) -> None:
        incident, confirmed = collection.name, message.ruling.has_errors
        self._stalls.evaluated(incident, now, confirmed=confirmed, passed=self._context.progress.passed)
        if confirmed:
            resumed = self._context.peer_store.mailbox(_resumed(incident))
            self._evaluated = ActiveIncident(message.ruling, resumed, {}) if message.by == self._context.rank else None
            self._resumed_locally = False
        if message.occasion == "failure":
            self.failure = message if confirmed else self.failure
            return
        dump = self._context.local_state.dump
        if self._evaluated is not None and dump is not None:
            self._context.write_line(f"flight-recorder dumps, one per rank: {Path(dump).parent}")
        if confirmed and self._on_hang == "abort":
            # At once if the decision is authentic, else once this rank stalls itself.
            if collection.is_trusted:
                self._abort(message)
            self._pending_abort = message, self._context.progress.passed

    def _abort_if_stalled(self, stall: Stall | None) -> None:
        if self._pending_abort is None:
            return
        message, passed = self._pending_abort
        if stall is not None:
            self._abort(message)
            return
        self._context.update_local_state()
        if self._context.progress.passed > passed:
            self._pending_abort = None
            self._context.write_line(f"rank {self._context.rank} makes progress, so it does not abort")

    def _abort(self, message: DecisionMessage) -> None:
        self._context.write_record()
        self._context.write_line(f"rank {self._context.rank}: aborting (on_hang='abort'): {message.ruling.words}")
        abort_process()

    def _check_recovery(self, now: float) -> None:
        """Notify the evaluating rank of recovery; there, withdraw the decision once."""
        presence = self._local_resume(now)
        stall = self._evaluated
        self._resumed_locally |= bool(presence)
        if stall is None:
            return
        for one in (*presence, *decode_all(stall.resumed.fresh(), RankResumed)):
            stall.seconds[one.rank] = one.seconds
        # Unsigned messages can be forged: withdraw only if this rank resumed, too.
        if stall.is_over and (self._resumed_locally or self._context.store.are_authentic):
            self._evaluated = None
            self._context.on_recovery(stall.decision, max(stall.seconds.values()))

    def _local_resume(self, now: float) -> tuple[RankResumed, ...]:
        """Post and return that this rank resumed, if it did."""
        context = self._context
        if not self._stalls.may_have_resumed:
            return ()
        context.update_local_state()
        stall = None if context.has_failed else self._stalls.take_resumed(context.progress.passed)
        if stall is None:
            return ()
        one = RankResumed(context.rank, now - stall.since)
        context.post_card()
        context.peer_store.append(_resumed(stall.incident), encode(one))
        return (one,)

    def give_up(self) -> None:
        """Release all callers that await a decision."""
        for request in self._waiting:
            request.answer(None)


def _resumed(incident: str) -> str:
    return f"{incident}/goes-on"
