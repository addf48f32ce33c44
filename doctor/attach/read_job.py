"""The job that was read, for the command: its ranks, its outcome, where the ranks are, and files to keep."""

from __future__ import annotations

from collections.abc import Callable, Collection

import msgspec

from doctor.analysis.attach_outcome import have_ended, outcome_of_attach, rank_stacks
from doctor.analysis.attached_job import AttachedRank, StandingTimes, attached_job, attached_ranks
from doctor.core.job import Job
from doctor.core.report_document import RankStacks, RunOutcome


class ReadJob(msgspec.Struct, frozen=True):
    """The gathered facts of attaching processes (``members``), and the job of the ranks that they read."""

    members: Job
    ranks: Job

    @property
    def outcome_of(self) -> Callable[[Job, Collection[tuple[str, int]], float], RunOutcome]:
        """What tells whether the job makes progress (``doctor.session.OutcomeOf``)."""
        return outcome_of_attach(self.members)

    @property
    def has_ended(self) -> bool:
        """Whether no process of the job is left."""
        return have_ended(attached_ranks(self.members))

    @property
    def stacks(self) -> RankStacks:
        """Where the ranks are."""
        return rank_stacks(self.members, self.ranks)

    def files(self) -> dict[str, bytes]:
        """``rank-3.json`` with the samples of each rank and its data workers, by name."""
        return {f"rank-{rank.number}.json": _stacks_of(rank) for rank in attached_ranks(self.members)}


class JobReader:
    """Derives the job of the ranks from what was gathered, over repeated attaching to one job."""

    def __init__(self) -> None:
        self._times = StandingTimes()

    def read(self, members: Job) -> ReadJob:
        """Return the job that the ``members`` read; it may have no ranks."""
        return ReadJob(members, attached_job(members, self._times))


def _stacks_of(rank: AttachedRank) -> bytes:
    document = {"rank": rank.number, "process": rank.process, "workers": rank.workers}
    return msgspec.json.format(msgspec.json.encode(document), indent=2)
