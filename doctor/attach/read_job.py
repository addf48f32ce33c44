"""The job that was read, for the command: its ranks, its outcome, where the ranks are, and files to keep."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping

import msgspec

from doctor.analysis.attach_outcome import have_ended, outcome_of_attach, rank_stacks
from doctor.analysis.attached_job import AttachedRank, StandingTimes, attached_job, attached_ranks
from doctor.collectors.launch.launcher import running_together
from doctor.core.job import Job
from doctor.core.report_document import RankStacks, RunOutcome

_OF_THE_JOB = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Variables that may belong to the job that is read: in a container or an allocation, this process inherits them. Its
store must never be used to gather."""


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


def own_environ() -> Mapping[str, str]:
    """The environment of this process without what the job that is read may have left in it."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in _OF_THE_JOB and not name.startswith("TORCHELASTIC_")
    }


def is_launched(environ: Mapping[str, str]) -> bool:
    """Whether a launcher started this process as one of several."""
    return bool(running_together(environ))
