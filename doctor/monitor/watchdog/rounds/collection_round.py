"""One collection round: all ranks report and one of them evaluates.

A rank announces itself at once, and reports when its facts are posted. Missing ranks are observed by the lowest rank of
their host that reported. Once all ranks are accounted for, or the time is up, the lowest rank that reported evaluates;
if it makes no decision in time, the next one does. All ranks adopt the decision.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

import msgspec

from doctor.cluster.transport.codec import decode_all, decode_or_none, encode
from doctor.collectors.host.local_processes import SILENT
from doctor.monitor.watchdog.decision import Decision, Trigger
from doctor.monitor.watchdog.protocol import DecisionMessage, PeerObservation, RankPresence

if TYPE_CHECKING:
    from doctor.monitor.watchdog.watchdog_context import WatchdogContext

EVALUATION_TIMEOUT, MOST_EVALUATORS = 8.0, 3
"""Seconds that each evaluator has, and how many evaluators in turn are awaited."""
SETTLE = 0.5
"""Seconds for observations of missing ranks to arrive."""
CANDIDATES = 16
"""Only ranks below this one read all presences, until none of them evaluates: with thousands of ranks, reading
everything everywhere would be millions of entries."""


class RoundTimeouts(msgspec.Struct, frozen=True):
    """Seconds since the start of a round.

    ``grace``: for announcements; ``longest``: for facts; ``broken``: minimum after an exception, even if all ranks
    reported.
    """

    grace: float
    longest: float
    broken: float = 0.0


class CollectionRound:
    """The participation of one rank in a round.

    ``observes``: missing local peers are observed. ``ended``: ranks that have ended and are not expected. ``defers``:
    returns whether this rank leaves the evaluation to one that reports later; it is then ``deferred``.
    """

    def __init__(
        self,
        name: str,
        trigger: Trigger,
        context: WatchdogContext,
        times: RoundTimeouts,
        evaluate: Callable[[CollectionRound], Decision],
        *,
        now: float,
        observes: bool = False,
        ended: Collection[int] = (),
        defers: Callable[[CollectionRound], bool] | None = None,
    ) -> None:
        self.name = name
        self.reported: set[int] = set()
        self.announced: set[int] = set()
        self.failed: set[int] = set()
        self.observations: dict[int, PeerObservation] = {}
        self.ended = set(ended)
        self.deferred = False
        self._defers = defers
        self._trigger = trigger
        self._rank, self._world_size = context.rank, context.world_size
        self._store, self._local_peers = context.peer_store, context.local_peers
        self._times = times
        self._evaluate = evaluate
        self._began = now
        self._observes = observes
        self._all_presences = self._store.mailbox(f"{name}/here")
        self._local_presences = self._store.mailbox(f"{name}/here-{self._local_peers.host}")
        self._observation_reader = self._store.mailbox(f"{name}/seen")
        self._complete_at: float | None = None
        self._last_turn = -1
        self._is_apart = False
        self._own_message: DecisionMessage | None = None

    @property
    def trigger(self) -> Trigger:
        """The trigger of the round: an exception outweighs a stall."""
        return "failure" if self.failed else self._trigger

    @property
    def missing(self) -> set[int]:
        """The expected ranks that did not report."""
        return set(range(self._world_size)) - self.reported - self.ended

    def announce(self) -> None:
        """Announce that this rank is about to report."""
        self._post(RankPresence(self._rank))

    def report(self, *, failed: bool = False) -> None:
        """Report that this rank has posted its facts; ``failed``: after an exception."""
        self._post(RankPresence(self._rank, came=True, failed=failed))

    def _post(self, here: RankPresence) -> None:
        self._add(here)
        for box in ("here", f"here-{self._local_peers.host}") if self._observes else ("here",):
            self._store.append(f"{self.name}/{box}", encode(here))

    def _add(self, here: RankPresence) -> None:
        self.announced.add(here.rank)
        if here.came:
            self.reported.add(here.rank)
        if here.failed:
            self.failed.add(here.rank)

    def is_over(self, now: float) -> bool:
        """Return whether no decision can be expected any more."""
        return now - self._began > self._times.longest + SETTLE + MOST_EVALUATORS * EVALUATION_TIMEOUT

    def step(self, now: float) -> DecisionMessage | None:
        """Do what is due; return the decision once there is one."""
        message = self._own_message or decode_or_none(self._store.get(f"{self.name}/ruling"), DecisionMessage)
        if message is not None and self.is_trusted:
            return message
        self._read_messages(now)
        if message is not None and not self._is_first_evaluator(now):
            return message
        if self._observes:
            self._observe_local_peers(now)
        if not self._is_my_turn(now):
            return None
        self._own_message = DecisionMessage(self._rank, self.trigger, self._evaluate(self))
        self._store.set(f"{self.name}/ruling", encode(self._own_message))
        return self._own_message

    @property
    def is_trusted(self) -> bool:
        """Whether the decision was made here or messages are signed, so that it is not forged."""
        return self._own_message is not None or self._store.are_authentic

    def _is_first_evaluator(self, now: float) -> bool:
        """Return whether no other rank can have decided yet, so that a decision is forged."""
        if self.deferred or now - self._began > self._times.longest + EVALUATION_TIMEOUT:
            return False
        return self._rank < CANDIDATES and self._rank == min(self.reported, default=-1)

    def _reads_all_ranks(self, now: float) -> bool:
        return self._rank < CANDIDATES or now - self._began > self._times.longest + EVALUATION_TIMEOUT

    def _read_messages(self, now: float) -> None:
        boxes = [self._local_presences] if self._observes else []
        if self._reads_all_ranks(now):
            boxes.append(self._all_presences)
            for observation in decode_all(self._observation_reader.fresh(), PeerObservation):
                self.observations[observation.rank] = observation
        for box in boxes:
            for here in decode_all(box.fresh(), RankPresence):
                self._add(here)

    def _observe_local_peers(self, now: float) -> None:
        """Observe missing local peers, unless a lower rank on this host does."""
        local_peers = self._local_peers
        local_peers.read_announcements()
        if min(self.reported & (local_peers.ranks | {self._rank}), default=-1) != self._rank:
            return
        for rank in sorted(local_peers.ranks - self.announced - self.ended):
            before = self.observations.get(rank)
            observation = local_peers.observe(rank, before, in_grace=now - self._began < self._times.grace)
            if observation is not None and self._is_own_absence(observation):
                self._is_apart = True
                continue
            if observation is not None and observation != before:
                self._add_observation(observation)
        for rank in self.ended - self.observations.keys():
            if (ended := local_peers.exit_with_error(rank)) is not None:
                self._add_observation(ended)

    def _add_observation(self, observation: PeerObservation) -> None:
        self.observations[observation.rank] = observation
        self._store.append(f"{self.name}/seen", encode(observation))

    def _is_own_absence(self, observation: PeerObservation) -> bool:
        """Whether a peer that runs may not respond because this rank uses another store than most ranks."""
        if observation.state != SILENT or self._local_peers.has_announced(observation.rank):
            return False
        present = len(self.announced)
        return 2 * present < self._world_size or (2 * present == self._world_size and 0 not in self.announced)

    def _is_my_turn(self, now: float) -> bool:
        """Return whether it is this rank's turn to evaluate. Each turn is tried once."""
        if not self._reads_all_ranks(now) or not self._is_complete(now - self._began):
            return False
        if self._complete_at is None:
            self._complete_at = now
        self.deferred = self._defers is not None and self._defers(self)
        if self.deferred:
            return False
        turn, order = int((now - self._complete_at) / EVALUATION_TIMEOUT), sorted(self.reported)
        if self._is_apart and not self.failed:
            return False  # the others see what this rank does not do
        if turn == self._last_turn or turn >= len(order) or order[turn] != self._rank:
            return False
        self._last_turn = turn
        store = self._store
        if not store.alive and not self._observes and self._rank > 0:
            return False  # isolated by its own connection: only a stall is worth reporting then
        claimed = store.exchange(f"{self.name}/turn-{turn}", None, b"%d" % self._rank)
        return claimed or (turn == 0 and not store.are_authentic and self._is_first_evaluator(now))

    def _is_complete(self, waited: float) -> bool:
        """Return whether all ranks are accounted for, or the time for that is up."""
        if self._complete_at is not None:
            return True
        awaited = self.missing - {rank for rank, one in self.observations.items() if one.state != SILENT}
        if not awaited:
            may_fail_yet = bool(self.failed) and not self.failed >= self.reported
            return not may_fail_yet or waited >= self._times.broken
        if waited >= self._times.longest:
            return True
        settled = waited >= self._times.grace + (SETTLE if self._observes else 0.0)
        # The facts or the stacks of these may still arrive.
        asked = {rank for rank, one in self.observations.items() if one.asked and not one.stack}
        return settled and awaited.isdisjoint(self.announced | asked)
