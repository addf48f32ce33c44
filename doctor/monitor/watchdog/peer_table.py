"""The known state of every rank, and the job built from it."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence

import msgspec

from doctor.cluster.transport.codec import MalformedMessage, unpack_capture
from doctor.cluster.transport.failover import FailoverStore, StoreConnection
from doctor.collectors.host.local_processes import SILENT
from doctor.core.capture import DecodedSections
from doctor.core.clock import time
from doctor.core.facts import Failure, ProgressFacts
from doctor.core.job import Job, Member, build_job
from doctor.monitor.watchdog.local_state import LocalState
from doctor.monitor.watchdog.protocol import PeerObservation
from doctor.monitor.watchdog.rounds.collection_round import CollectionRound
from doctor.monitor.watchdog.run_records import RunRecords

ACTIVE_WITHIN = 60.0
"""Seconds after the last facts for which a rank is considered running: a few rounds."""
FINAL = ("ended", "failed")
"""States in which a process may be gone: the state it reported is final."""


def facts_key(rank: int) -> str:
    """Return the key of a rank's facts."""
    return f"facts/{rank}"


class PeerTable:
    """All ranks of the job, as far as they are known to this one.

    ``silent``: ranks that did not report in the last incident evaluated here, as observed, until they report again.
    """

    def __init__(
        self, rank: int, world_size: int, local_state: LocalState, store: FailoverStore, records: RunRecords
    ) -> None:
        self._rank = rank
        self._world_size = world_size
        self._local_state = local_state
        self._store = store
        self._records = records
        self._posted: dict[int, tuple[bytes, ...]] = {}
        self._decoded: dict[int, DecodedSections] = {}
        self._members: dict[int, Member] = {}
        self._reachable: set[int] = set()
        self.silent: dict[int, Member] = {}

    def read(self, connections: Sequence[StoreConnection]) -> bool:
        """Read the facts of the other ranks on these connections; return whether any are new."""
        names = {facts_key(rank): rank for rank in range(self._world_size) if rank != self._rank}
        found = {names[name]: posted for name, posted in self._store.get_many(names, connections).items()}
        self._reachable = {*found}
        fresh = {rank: posted for rank, posted in found.items() if posted != self._posted.get(rank)}
        for rank, posted in fresh.items():
            self._posted[rank] = posted
            self._update(rank, posted)
        return bool(fresh)

    def _update(self, rank: int, posted: Iterable[bytes]) -> None:
        """Take the newest facts of a rank; connections may hold different ones."""
        found: list[tuple[str, Member]] = []
        for one in {*posted}:
            try:
                decoded = self._decoded.setdefault(rank, DecodedSections())
                capture = unpack_capture(one, f"the facts of rank {rank}", decoded)
            except MalformedMessage:
                continue
            found += [(capture.created, member) for member in capture.members[:1]]
        for _, member in sorted(found, key=lambda one: one[0]):
            self._members[rank] = member._replace(rank=rank)
            self.silent.pop(rank, None)

    def is_recently_active(self, rank: int) -> bool:
        """Return whether a rank recently reported that it runs."""
        member = self._members.get(rank)
        progress = progress_of(member) if member is not None else ProgressFacts()
        return progress.state not in FINAL and time() - (progress.at or 0.0) < ACTIVE_WITHIN

    def job(self, ranks: Iterable[int] | None = None) -> Job:
        """Build the job of these ranks, by default of all known ones, from their own reports."""
        wanted = self._members.keys() if ranks is None else set(ranks)
        others = [member for rank, member in self._members.items() if rank in wanted and rank != self._rank]
        return build_job([self._local_state.member, *others], world_size=self._world_size)

    def job_of_round(self, collection: CollectionRound, run: str) -> Job:
        """Build the job of a collection round; missing ranks as last known and observed."""
        missing = {
            rank: member
            for rank in sorted(collection.missing | collection.ended)
            if (member := self._missing(rank, collection.observations.get(rank), run)) is not None
        }
        self._members |= missing
        self.silent = {rank: one for rank, one in missing.items() if progress_of(one).state not in FINAL}
        return self.job(collection.reported | missing.keys())

    def _missing(self, rank: int, observation: PeerObservation | None, run: str) -> Member | None:
        """Return a rank that did not report, unless it shares no connection and no directory."""
        recorded = self._records.read(rank, run)
        if recorded is None and observation is None and rank not in self._reachable:
            return None
        known = [member for member in (recorded, self._members.get(rank)) if member is not None]
        newest = max(known, key=lambda member: progress_of(member).at or 0.0, default=None)
        host = None
        if observation is not None:
            observer = self._local_state.member if observation.by == self._rank else self._members.get(observation.by)
            host = observer.host if observer else None
        member = newest or Member(rank, {}, host)
        return member._replace(
            sections={**member.sections, ProgressFacts.key: _with_observation(progress_of(member), observation)}
        )


def progress_of(member: Member) -> ProgressFacts:
    """Return the progress that a rank reported."""
    progress = member.sections.get(ProgressFacts.key)
    return progress if isinstance(progress, ProgressFacts) else ProgressFacts()


def _with_observation(progress: ProgressFacts, observation: PeerObservation | None) -> ProgressFacts:
    if observation is not None and observation.code and progress.state != "failed":
        failure = Failure("SystemExit", str(observation.code))
        return msgspec.structs.replace(progress, state="failed", failure=failure, seen_by=observation.by)
    if progress.state in FINAL:
        return progress
    if observation is None:
        return msgspec.structs.replace(progress, state=SILENT, stack=(), stack_from="")
    return msgspec.structs.replace(
        progress,
        state=observation.state,
        seen_by=observation.by,
        kernel_state=observation.letter,
        failure=_failure_by(observation.signal) or progress.failure,
        stack=observation.stack,
        stack_from="signal" if observation.stack else "",
    )


def _failure_by(number: int) -> Failure | None:
    if not number:
        return None
    name = signal.Signals(number).name if number in {*signal.Signals} else "signal"
    return Failure(name, f"ended by signal {number} ({name})")
