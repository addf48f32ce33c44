"""What the parts of a sentinel share: this rank, what it knows, and its ways to the others."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from doctor.analysis.launch_origin import ranks_in_words
from doctor.cluster.transport.codec import encode
from doctor.cluster.transport.failover import FailoverStore
from doctor.cluster.transport.signing import RejectedMessages
from doctor.core.facts import ProgressFacts
from doctor.core.files.own_folder import OwnFile
from doctor.monitor.watchdog.admission import RunNamespace
from doctor.monitor.watchdog.decision import Decision, EvaluateJob, OnRecovery, RankSource, WriteLine
from doctor.monitor.watchdog.local_peers.peer_observation import LocalPeerProbe
from doctor.monitor.watchdog.local_peers.stack_dump import STACK_DUMPER
from doctor.monitor.watchdog.local_state import LocalState
from doctor.monitor.watchdog.peer_table import PeerTable, card_name, progress_of
from doctor.monitor.watchdog.protocol import RankPresence
from doctor.monitor.watchdog.rounds.collection_round import CANDIDATES, CollectionRound, RoundPeers
from doctor.monitor.watchdog.run_records import RunRecords

RULING, HEARD = "end/ruling", "end/heard"
"""Where the ruling on the end is set, and the box in which each rank acknowledges it."""


@dataclass
class WatchdogContext:
    """Of one rank. ``place``: where the ranks of this run meet; before it is found, this rank is alone. ``stacks``: the
    file that its stacks go to when it is asked for them; ``rejected``: messages that were not authentic."""

    rank: int
    world_size: int
    place: RunNamespace
    patient: RankSource
    own: LocalState
    lines: FailoverStore
    ward: PeerTable
    records: RunRecords
    bystander: LocalPeerProbe
    stacks: OwnFile
    judge: EvaluateJob
    goes_on: OnRecovery
    tell: WriteLine
    rejected: RejectedMessages = field(default_factory=RejectedMessages)
    is_placed: bool = False
    _told_rejected: bool = False
    no_lines: FailoverStore = field(default_factory=lambda: FailoverStore(()))

    @property
    def circle(self) -> RoundPeers:
        """Those who are asked."""
        lines = self.lines if self.is_placed else self.no_lines
        return RoundPeers(self.rank, self.world_size, lines, self.bystander)

    def settle(self, place: RunNamespace) -> None:
        """Be where the others are."""
        self.place, self.is_placed = place, True
        self.lines.namespace = place.name
        self.lines.read_all()
        self.bystander.greet(self.lines)

    def tell_rejected(self) -> None:
        """Say, once, that messages were not authentic: ranks are missing, and that may be why."""
        if self.rejected.warning and not self._told_rejected:
            self._told_rejected = True
            self.tell(f"rank {self.rank}: {self.rejected.warning}")

    def record(self) -> bool:
        """Write the record: this rank, and those that did not answer when it judged. Whether it was written."""
        return self.records.write([self.own.member, *self.ward.silent.values()], self.place.run)

    def take_position(self) -> None:
        """Look where this rank stands, and leave that: in its record first, since its process may end any moment; then
        the whole dump of its flight recorder, where files can be had; and for everybody to see."""
        self.own.stand(self.patient.position())
        dumps = self.patient.dumps()
        path = self.records.write_dumps(dumps) if self.record() else None
        if path is not None:
            self.own.keep_dump(path)
            self.record()
        self.leave_card()

    def leave_card(self) -> None:
        """Let everybody see what this rank knows of itself."""
        if self.is_placed:
            self.lines.set(card_name(self.rank), self.own.packed())

    def renew_card(self) -> None:
        """The same in the course of things."""
        if self.is_placed:
            self.lines.set_on_best(card_name(self.rank), self.own.packed())

    def rule_at(self, hearing: CollectionRound) -> Decision:
        """Judge those who came to an alarm, and those who are missing."""
        self.ward.read(self.circle.lines.alive)
        job = self.ward.job_at(hearing, self.place.run)
        if self.ward.silent:
            self.record()
        unheard = hearing.missing - {rank.number for rank in job.ranks}
        if unheard:
            self.tell_rejected()
            self.tell(f"{_in_words(unheard)} can't be heard: no store and no directory is shared with this rank")
        return self.judge(job, hearing.occasion)

    def rule_before(self, hearing: CollectionRound) -> Decision:
        """Judge those who came before the first batch."""
        self.ward.read(self.circle.lines.alive)
        if hearing.missing:
            self.tell_rejected()
            self.tell(f"judged without {_in_words(hearing.missing)}, who did not come before the first batch")
        return self.judge(self.ward.job(hearing.came), "before")

    def rule_at_end(self, hearing: CollectionRound) -> Decision:
        """Judge how all of them ended, as far as they are known."""
        self.ward.read(self.circle.lines.alive)
        return self.judge(self.ward.job(), "end")

    def is_followed(self, hearing: CollectionRound) -> bool:
        """Whether a rank that did not come to the end yet, lower than all who did, is known to run: it will judge."""
        lower = sorted(rank for rank in hearing.missing if rank < min(hearing.came))[:CANDIDATES]
        bystander = self.bystander
        bystander.listen()
        if lower:
            self.ward.read(self.circle.lines.alive)
        return any(bystander.lives(one) if one in bystander.neighbours else self.ward.is_lively(one) for one in lower)

    def leave(self) -> None:
        """Acknowledge the ruling on the end, and use the board no more."""
        if self.circle.lines.acknowledge(RULING, HEARD, encode(RankPresence(self.rank))):
            self.records.tidy()
        self.lines.close()

    def clear(self) -> None:
        """Leave nothing on the board, now that the run is over for all."""
        self.lines.clear(card_name(rank) for rank in range(self.world_size))
        self.lines.close()
        self.records.tidy()

    def close(self) -> None:
        """Give back what is held."""
        STACK_DUMPER.write_nowhere(self.stacks)
        self.lines.close()
        self.records.close()

    def looks_failed(self) -> bool:
        """Whether an exception has ended this rank, by what it says now."""
        self.own.renew(self.patient.card())
        return self.has_failed

    def passed_now(self) -> int:
        """The points that this rank has passed by now."""
        self.own.renew(self.patient.card())
        return self.progress.passed

    @property
    def has_failed(self) -> bool:
        """Whether an exception has ended this rank."""
        return self.progress.state == "failed"

    @property
    def progress(self) -> ProgressFacts:
        """Where this rank was when it was last asked."""
        return progress_of(self.own.member)


def _in_words(ranks: Iterable[int]) -> str:
    return ranks_in_words(tuple(sorted(ranks)))
