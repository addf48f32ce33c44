"""The newest metrics of each rank."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from doctor.core.facts import ProgressFacts, RunMemoryFacts, StepFacts, Window
from doctor.core.job import Job, SectionHolder


class RankMetrics(msgspec.Struct, frozen=True):
    """The metrics of one rank. ``window``: its newest window of steps."""

    rank: int
    host: str
    progress: ProgressFacts | None
    window: Window | None
    memory: RunMemoryFacts | None

    @property
    def is_stalled(self) -> bool:
        """Whether the rank is stalled or unreachable before the end of the run."""
        return self.progress is not None and self.progress.state not in ("running", "ended")

    @property
    def data_share(self) -> float | None:
        """Share of a step spent waiting for data, 0 to 1."""
        return self.window.data / self.window.total if self.window and self.window.total > 0 else None

    @property
    def busy(self) -> float | None:
        """Seconds of a step without the backward pass, in which a rank waits for the others."""
        return None if self.window is None else self.window.total - (self.window.backward or 0.0)

    @property
    def workers(self) -> int | None:
        """Bytes of its data loader workers in total, without memory shared with the rank, if known."""
        if self.memory is None or self.memory.resident is None:
            return None
        sizes = (child.memory if child.private is None else child.private for child in self.memory.children)
        return sum(size or 0 for size in sizes)


def rank_metrics(holder: SectionHolder, rank: int, host: str) -> RankMetrics:
    """Return the metrics of one rank."""
    steps = holder.find(StepFacts)
    newest = steps.windows[-1] if steps and steps.windows else None
    return RankMetrics(rank, host, holder.find(ProgressFacts), newest, holder.find(RunMemoryFacts))


def all_rank_metrics(job: Job) -> Iterator[RankMetrics]:
    """Yield the metrics of every rank in the job."""
    return (rank_metrics(rank, rank.number, rank.host.name) for rank in job.ranks)
