"""One question that all ranks answer and one of them judges.

Who comes says so at once, and again when its card is on the board. Those who do not come are looked at by the lowest
rank of their host that did. Once everybody is accounted for, or the time is up, the lowest rank that came judges; where
it gives no ruling in its time, the next one does. All take the ruling.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

from doctor.cluster.transport.codec import decode_all, decode_or_none, encode
from doctor.cluster.transport.failover import FailoverStore
from doctor.monitor.telemetry.local_processes import SILENT
from doctor.monitor.watchdog.decision import Decision, Trigger
from doctor.monitor.watchdog.local_peers.peer_observation import LocalPeerProbe
from doctor.monitor.watchdog.protocol import DecisionMessage, PeerObservation, RankPresence

JUDGING, JUDGES = 8.0, 3
"""Seconds that each of those who may judge has for it, and how many of them are waited for."""
SETTLE = 0.5
"""Seconds for what is seen of the missing ones to arrive."""
CANDIDATES = 16
"""Ranks below this one count who is there. All others do only where none of these judges: were everybody to read what
everybody says, a world of thousands would read millions of entries."""


class RoundPeers(NamedTuple):
    """Those who are asked, as one of them sees them."""

    rank: int
    world_size: int
    lines: FailoverStore
    bystander: LocalPeerProbe


class RoundTimeouts(NamedTuple):
    """Seconds since a hearing began. ``grace``: for ranks to say that they come; ``longest``: for their cards;
    ``broken``: that it takes after an exception even where all are there."""

    grace: float
    longest: float
    broken: float = 0.0


class CollectionRound:
    """As one rank takes part in it. ``looks``: those who do not come are looked at. ``left``: ranks that have ended and
    are not expected. ``defers``: whether this rank leaves the judging to one that will come later; it is then
    ``deferred``."""

    def __init__(
        self,
        name: str,
        occasion: Trigger,
        circle: RoundPeers,
        times: RoundTimeouts,
        judge: Callable[[CollectionRound], Decision],
        *,
        now: float,
        looks: bool = False,
        left: Collection[int] = (),
        defers: Callable[[CollectionRound], bool] | None = None,
    ) -> None:
        self.name = name
        self.came: set[int] = set()
        self.coming: set[int] = set()
        self.failed: set[int] = set()
        self.seen: dict[int, PeerObservation] = {}
        self.left = set(left)
        self.deferred = False
        self._defers = defers
        self._occasion = occasion
        self._circle = circle
        self._times = times
        self._judge = judge
        self._began = now
        self._looks = looks
        self._here_at_all = circle.lines.reader(f"{name}/here")
        self._here_on_host = circle.lines.reader(f"{name}/here-{circle.bystander.host}")
        self._sights = circle.lines.reader(f"{name}/seen")
        self._gathered_at: float | None = None
        self._tried = -1
        self._own: DecisionMessage | None = None

    @property
    def occasion(self) -> Trigger:
        """On which it is held: an exception outweighs standing still."""
        return "failure" if self.failed else self._occasion

    @property
    def missing(self) -> set[int]:
        """The ranks that are expected and did not come."""
        return set(range(self._circle.world_size)) - self.came - self.left

    def announce(self) -> None:
        """Say that this rank is about to come."""
        self._say(RankPresence(self._circle.rank))

    def come(self, *, failed: bool = False) -> None:
        """Say that this rank has left its card; ``failed``: that an exception brings it."""
        self._say(RankPresence(self._circle.rank, came=True, failed=failed))

    def _say(self, here: RankPresence) -> None:
        self._note(here)
        for box in ("here", f"here-{self._circle.bystander.host}") if self._looks else ("here",):
            self._circle.lines.append(f"{self.name}/{box}", encode(here))

    def _note(self, here: RankPresence) -> None:
        self.coming.add(here.rank)
        if here.came:
            self.came.add(here.rank)
        if here.failed:
            self.failed.add(here.rank)

    def is_over(self, now: float) -> bool:
        """Whether no ruling is to be expected any more."""
        return now - self._began > self._times.longest + SETTLE + JUDGES * JUDGING

    def step(self, now: float) -> DecisionMessage | None:
        """Do what is due; the ruling, once there is one."""
        said = self._own or decode_or_none(self._circle.lines.get(f"{self.name}/ruling"), DecisionMessage)
        if said is not None and self.is_supported:
            return said
        self._count(now)
        if said is not None and not self._is_first(now):
            return said
        if self._looks:
            self._look_around(now)
        return self._rule() if self._judges(now) else None

    @property
    def is_supported(self) -> bool:
        """Whether the ruling is certainly one of a rank of this job: this one's own, or lines are authentic."""
        return self._own is not None or self._circle.lines.are_authentic

    def _is_first(self, now: float) -> bool:
        """Whether this rank is the first of those that may judge, and nobody can have judged in its place yet. It goes
        by no other ruling then, where anybody may have written that."""
        in_time = now - self._began <= self._times.longest + JUDGING
        return (
            in_time
            and not self.deferred
            and self._circle.rank < CANDIDATES
            and self._circle.rank == min(self.came, default=-1)
        )

    def _counts(self, now: float) -> bool:
        return self._circle.rank < CANDIDATES or now - self._began > self._times.longest + JUDGING

    def _count(self, now: float) -> None:
        boxes = [self._here_on_host] if self._looks else []
        if self._counts(now):
            boxes.append(self._here_at_all)
            for seen in decode_all(self._sights.fresh(), PeerObservation):
                self.seen[seen.rank] = seen
        for box in boxes:
            for here in decode_all(box.fresh(), RankPresence):
                self._note(here)

    def _look_around(self, now: float) -> None:
        """Look at the missing neighbours, where no lower rank of this host is there to do so."""
        bystander = self._circle.bystander
        bystander.listen()
        if min(self.came & (bystander.neighbours | {self._circle.rank}), default=-1) != self._circle.rank:
            return
        for rank in sorted(bystander.neighbours - self.coming - self.left):
            before = self.seen.get(rank)
            seen = bystander.look(rank, before, patient=now - self._began < self._times.grace)
            if seen is not None and seen != before:
                self.seen[rank] = seen
                self._circle.lines.append(f"{self.name}/seen", encode(seen))

    def _judges(self, now: float) -> bool:
        """Whether this rank is to judge now. Each turn is tried once."""
        if not self._counts(now) or not self._is_gathered(now - self._began):
            return False
        if self._gathered_at is None:
            self._gathered_at = now
        self.deferred = self._defers is not None and self._defers(self)
        if self.deferred:
            return False
        turn, order = int((now - self._gathered_at) / JUDGING), sorted(self.came)
        if turn == self._tried or turn >= len(order) or order[turn] != self._circle.rank:
            return False
        self._tried = turn
        lines = self._circle.lines
        if not lines.alive and not self._looks and self._circle.rank > 0:
            return False  # alone by its own trouble: only what stands still is worth a word then
        claimed = lines.claim(f"{self.name}/turn-{turn}", b"%d" % self._circle.rank)
        return claimed or (turn == 0 and not lines.are_authentic and self._is_first(now))

    def _is_gathered(self, waited: float) -> bool:
        """Whether everybody is accounted for, or has had the time to be."""
        if self._gathered_at is not None:
            return True
        awaited = self.missing - {rank for rank, seen in self.seen.items() if seen.state != SILENT}
        if not awaited:
            may_fail_yet = bool(self.failed) and not self.failed >= self.came
            return not may_fail_yet or waited >= self._times.broken
        if waited >= self._times.longest:
            return True
        settled = waited >= self._times.grace + (SETTLE if self._looks else 0.0)
        return settled and not self._is_worth_waiting(awaited)

    def _is_worth_waiting(self, awaited: set[int]) -> bool:
        """Whether a card or the stacks of one of these are on their way."""
        asked = {rank for rank, seen in self.seen.items() if seen.asked and not seen.stack}
        return bool(awaited & (self.coming | asked))

    def _rule(self) -> DecisionMessage:
        occasion = self.occasion
        said = DecisionMessage(self._circle.rank, occasion, self._judge(self))
        self._own = said
        self._circle.lines.set(f"{self.name}/ruling", encode(said))
        return said
