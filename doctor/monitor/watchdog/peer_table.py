"""What is known of every rank, and the job that is made of it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import msgspec

from doctor.cluster.transport.codec import MalformedMessage, unpack_capture
from doctor.cluster.transport.failover import FailoverStore, StoreConnection
from doctor.collectors.host.host_identity import Identity
from doctor.core.facts import ProgressFacts
from doctor.core.job import Job, Member, build_job
from doctor.monitor.telemetry.local_processes import SILENT
from doctor.monitor.watchdog.local_state import LocalState
from doctor.monitor.watchdog.protocol import PeerObservation
from doctor.monitor.watchdog.rounds.collection_round import CollectionRound
from doctor.monitor.watchdog.run_records import RunRecords

LIVELY = 60.0
"""Seconds for which a rank that was heard of is taken to run: a few rounds."""
FINAL = ("ended", "failed")
"""States after which a process may be gone: what it said of itself counts."""


def card_name(rank: int) -> str:
    """Where the card of a rank is on the board."""
    return f"card/{rank}"


class PeerTable:
    """All ranks of the job, as far as this one has heard of them. ``silent``: those that did not come to the last alarm
    that was judged here, as they were seen, until they are heard again."""

    def __init__(self, rank: int, world_size: int, own: LocalState, lines: FailoverStore, records: RunRecords) -> None:
        self._rank = rank
        self._world_size = world_size
        self._own = own
        self._lines = lines
        self._records = records
        self._cards: dict[int, tuple[bytes, ...]] = {}
        self._members: dict[int, Member] = {}
        self._within_reach: set[int] = set()
        self.silent: dict[int, Member] = {}

    def read(self, lines: Sequence[StoreConnection]) -> bool:
        """Read the cards of the others on these lines; whether any of them is new."""
        names = {card_name(rank): rank for rank in range(self._world_size) if rank != self._rank}
        found = {names[name]: cards for name, cards in self._lines.get_many(names, lines).items()}
        self._within_reach = {*found}
        fresh = {rank: cards for rank, cards in found.items() if cards != self._cards.get(rank)}
        for rank, cards in fresh.items():
            self._cards[rank] = cards
            self._take(rank, cards)
        return bool(fresh)

    def _take(self, rank: int, cards: Iterable[bytes]) -> None:
        """The newest of the cards of a rank, which may differ from line to line."""
        found: list[tuple[str, Member]] = []
        for card in {*cards}:
            try:
                capture = unpack_capture(card, f"the card of rank {rank}")
            except MalformedMessage:
                continue
            found += [(capture.created, member) for member in capture.members[:1]]
        for _, member in sorted(found, key=lambda one: one[0]):
            self._members[rank] = member._replace(rank=rank)
            self.silent.pop(rank, None)

    def is_lively(self, rank: int) -> bool:
        """Whether a rank has said not long ago that it runs."""
        member = self._members.get(rank)
        progress = progress_of(member) if member is not None else ProgressFacts()
        return progress.state not in FINAL and time.time() - (progress.at or 0.0) < LIVELY

    def job(self, ranks: Iterable[int] | None = None) -> Job:
        """The job of these ranks, by default of all that were heard of, as they said of themselves."""
        wanted = self._members.keys() if ranks is None else set(ranks)
        others = [member for rank, member in self._members.items() if rank in wanted and rank != self._rank]
        return self._build([self._own.member, *others])

    def job_at(self, hearing: CollectionRound, run: str) -> Job:
        """The job at a hearing: those who came, and those who did not as they were last known and are seen now, which
        stays what is known of them until they are heard again."""
        missing = {
            rank: member
            for rank in sorted(hearing.missing | hearing.left)
            if (member := self._missing(rank, hearing.seen.get(rank), run)) is not None
        }
        self._members |= missing
        self.silent = {rank: one for rank, one in missing.items() if progress_of(one).state not in FINAL}
        return self.job(hearing.came | missing.keys())

    def _missing(self, rank: int, seen: PeerObservation | None, run: str) -> Member | None:
        """A rank that did not come. One that does not share a line or the directory with this rank is left out: nobody
        can tell whether it is silent."""
        recorded = self._records.read(rank, run)
        if recorded is None and seen is None and rank not in self._within_reach:
            return None
        known = [member for member in (recorded, self._members.get(rank)) if member is not None]
        newest = max(known, key=lambda member: progress_of(member).at or 0.0, default=None)
        member = newest or Member(rank, {}, self._host_of(seen.by) if seen else None)
        return member._replace(sections={**member.sections, ProgressFacts.key: _as_seen(progress_of(member), seen)})

    def _host_of(self, rank: int) -> Identity | None:
        member = self._own.member if rank == self._rank else self._members.get(rank)
        return member.host if member else None

    def _build(self, members: Iterable[Member]) -> Job:
        return build_job(members, world_size=self._world_size)


def progress_of(member: Member) -> ProgressFacts:
    """Where a rank says it is."""
    progress = member.sections.get(ProgressFacts.key)
    return progress if isinstance(progress, ProgressFacts) else ProgressFacts()


def _as_seen(progress: ProgressFacts, seen: PeerObservation | None) -> ProgressFacts:
    """Where a rank was when it was last heard of, and what became of it."""
    if progress.state in FINAL:
        return progress
    if seen is None:
        return msgspec.structs.replace(progress, state=SILENT, stack=(), stack_from="")
    return msgspec.structs.replace(
        progress,
        state=seen.state,
        seen_by=seen.by,
        kernel_state=seen.letter,
        stack=seen.stack,
        stack_from="signal" if seen.stack else "",
    )
