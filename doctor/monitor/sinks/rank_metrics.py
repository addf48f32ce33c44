"""The newest numbers of each rank, as metrics need them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from doctor.core.facts import ProgressFacts, RunMemoryFacts, StepFacts, Window
from doctor.core.job import Job, SectionHolder


@dataclass(frozen=True)
class RankMetrics:
    """What is known of one rank. ``window``: its newest window of steps."""

    rank: int
    host: str
    progress: ProgressFacts | None
    window: Window | None
    memory: RunMemoryFacts | None

    @property
    def is_stalled(self) -> bool:
        """Whether it stands still, or nobody hears of it, before the run is over."""
        return self.progress is not None and self.progress.state not in ("running", "ended")

    @property
    def data_share(self) -> float | None:
        """Part of a step that goes to waiting for data, 0 to 1."""
        return self.window.data / self.window.total if self.window and self.window.total > 0 else None

    @property
    def busy(self) -> float | None:
        """Seconds a step that are its own: without backward, because a rank waits for the others in there."""
        return None if self.window is None else self.window.total - (self.window.backward or 0.0)

    @property
    def workers(self) -> int | None:
        """Bytes of its data workers together, without what they share with it where that is known."""
        if self.memory is None or self.memory.resident is None:
            return None
        sizes = (child.memory if child.private is None else child.private for child in self.memory.children)
        return sum(size or 0 for size in sizes)


def rank_metrics(bearer: SectionHolder, rank: int, host: str) -> RankMetrics:
    """Those of one rank."""
    steps = bearer.find(StepFacts)
    newest = steps.windows[-1] if steps and steps.windows else None
    return RankMetrics(rank, host, bearer.find(ProgressFacts), newest, bearer.find(RunMemoryFacts))


def all_rank_metrics(job: Job) -> Iterator[RankMetrics]:
    """Those of every rank that is here."""
    return (rank_metrics(rank, rank.number, rank.host.name) for rank in job.ranks)
