"""State shared by the parts of a watchdog: the local rank, its peers and connections."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from doctor.cluster.membership.leadership import acknowledge
from doctor.cluster.transport.codec import encode
from doctor.cluster.transport.failover import FailoverStore
from doctor.cluster.transport.signing import RejectedMessages
from doctor.core.facts import ProgressFacts
from doctor.core.files.own_folder import OwnFile
from doctor.core.text import ranks_in_words
from doctor.monitor.watchdog.admission import RunNamespace
from doctor.monitor.watchdog.decision import Decision, EvaluateJob, OnRecovery, RankSource, WriteLine
from doctor.monitor.watchdog.local_peers.peer_observation import LocalPeerProbe
from doctor.monitor.watchdog.local_peers.stack_dump import STACK_DUMPER
from doctor.monitor.watchdog.local_state import LocalState
from doctor.monitor.watchdog.peer_table import PeerTable, facts_key, progress_of
from doctor.monitor.watchdog.protocol import RankPresence
from doctor.monitor.watchdog.rounds.collection_round import CANDIDATES, CollectionRound
from doctor.monitor.watchdog.run_records import RunRecords

FINAL_DECISION, ACKNOWLEDGED = "end/ruling", "end/heard"
"""Keys of the final decision and of its acknowledgments."""


class WatchdogContext(msgspec.Struct):
    """The shared state of one rank.

    ``namespace``: of this run in the store; before ``is_joined`` this rank is alone. ``stacks``: its stack file;
    ``wake``: starts the next tick at once, from any thread; ``rejected``: messages that were not authentic.
    """

    rank: int
    world_size: int
    namespace: RunNamespace
    source: RankSource
    local_state: LocalState
    store: FailoverStore
    peer_table: PeerTable
    records: RunRecords
    local_peers: LocalPeerProbe
    stacks: OwnFile
    evaluate: EvaluateJob
    on_recovery: OnRecovery
    write_line: WriteLine
    wake: Callable[[], object]
    rejected: RejectedMessages = msgspec.field(default_factory=RejectedMessages)
    is_joined: bool = False
    _reported_rejected: bool = False
    empty_store: FailoverStore = msgspec.field(default_factory=lambda: FailoverStore(()))

    @property
    def has_joined_peers(self) -> bool:
        """Whether other ranks may read what this one posts."""
        return self.is_joined and self.world_size > 1

    @property
    def peer_store(self) -> FailoverStore:
        """The store of the run; empty until this rank has joined."""
        return self.store if self.is_joined else self.empty_store

    def join(self, namespace: RunNamespace) -> None:
        """Join the ranks of this run in ``namespace``."""
        self.namespace, self.is_joined = namespace, True
        self.store.namespace = namespace.name
        self.store.read_all()
        self.local_peers.announce(self.store)

    def report_rejected(self) -> None:
        """Report once that unauthentic messages were rejected, which may be why ranks are missing."""
        if self.rejected.warning and not self._reported_rejected:
            self._reported_rejected = True
            self.write_line(f"rank {self.rank}: {self.rejected.warning}")

    def write_record(self) -> bool:
        """Write the record of this rank and of silent peers; return whether it was written."""
        return self.records.write([self.local_state.member, *self.peer_table.silent.values()], self.namespace.run)

    def take_position(self) -> None:
        """Take the position of this rank; write its record, then its dumps, then post its facts.

        The record comes first because the process may end at any moment.
        """
        self.local_state.set_position(self.source.position())
        dumps = self.source.dumps()
        path = self.records.write_dumps(dumps) if self.write_record() else None
        if path is not None:
            self.local_state.keep_dump(path)
            self.write_record()
        self.post_card()

    def post_card(self) -> None:
        """Post the facts of this rank on every connection."""
        if self.has_joined_peers:
            self.store.set(facts_key(self.rank), self.local_state.packed())

    def refresh_card(self) -> None:
        """Post the facts of this rank on the preferred connection."""
        if self.has_joined_peers:
            self.store.set_on_best(facts_key(self.rank), self.local_state.packed())

    def evaluate_incident(self, collection: CollectionRound) -> Decision:
        """Evaluate the ranks that reported in an incident, and those that are missing."""
        self.peer_table.read(self.peer_store.alive)
        job = self.peer_table.job_of_round(collection, self.namespace.run)
        if self.peer_table.silent:
            self.write_record()
        unreachable = collection.missing - {rank.number for rank in job.ranks}
        if unreachable:
            self.report_rejected()
            self.write_line(f"cannot reach {_in_words(unreachable)}: no TCPStore or directory is shared with this rank")
        return self.evaluate(job, collection.trigger)

    def evaluate_start(self, collection: CollectionRound) -> Decision:
        """Evaluate the ranks that reported before the first batch."""
        self.peer_table.read(self.peer_store.alive)
        if collection.missing:
            self.report_rejected()
            self.write_line(
                f"{_in_words(collection.missing)} did not report before the first batch; checked without it"
            )
        return self.evaluate(self.peer_table.job(collection.reported), "before")

    def evaluate_end(self, collection: CollectionRound) -> Decision:
        """Evaluate how all known ranks ended."""
        self.peer_table.read(self.peer_store.alive)
        return self.evaluate(self.peer_table.job(), "end")

    def is_left_to_lower_rank(self, collection: CollectionRound) -> bool:
        """Return whether a lower rank than all that reported runs, and will evaluate the end."""
        lower = sorted(rank for rank in collection.missing if rank < min(collection.reported))[:CANDIDATES]
        local_peers = self.local_peers
        local_peers.read_announcements()
        if lower:
            self.peer_table.read(self.peer_store.alive)
        return any(
            local_peers.is_running(rank) if rank in local_peers.ranks else self.peer_table.is_recently_active(rank)
            for rank in lower
        )

    def leave(self) -> None:
        """Acknowledge the final decision and stop using the store."""
        run, presence = self.store.namespace, encode(RankPresence(self.rank))
        connections = self.peer_store.alive
        removed = [acknowledge(one, run, FINAL_DECISION, ACKNOWLEDGED, presence) for one in connections]
        if any(removed):
            self.records.remove_empty_folder()
        self.store.close()

    def clear(self) -> None:
        """Clear the store, now that the run is over for all ranks."""
        self.store.clear_run(facts_key(rank) for rank in range(self.world_size))
        self.store.close()
        self.records.remove_empty_folder()

    def close(self) -> None:
        """Release all resources."""
        STACK_DUMPER.discard(self.stacks)
        self.store.close()
        self.records.close()

    def update_local_state(self) -> None:
        """Update the state of this rank by its current facts."""
        self.local_state.update(self.source.current_facts())

    def update_for_look(self) -> None:
        """Update what a look compares, or everything while this rank keeps the position of a stall."""
        if self.local_state.has_position:
            self.update_local_state()
        else:
            self.local_state.update_some(self.source.look_facts())

    @property
    def has_failed(self) -> bool:
        """Whether an exception has ended this rank."""
        return self.progress.state == "failed"

    @property
    def progress(self) -> ProgressFacts:
        """The progress of this rank at the last update."""
        return progress_of(self.local_state.member)


def _in_words(ranks: Iterable[int]) -> str:
    return ranks_in_words(tuple(sorted(ranks)))
