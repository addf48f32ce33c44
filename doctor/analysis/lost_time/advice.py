"""What a loss was, in words, and what would help against it."""

from __future__ import annotations

import msgspec

from doctor.analysis.stats.rank_roles import uses_lightning
from doctor.core.job import Job
from doctor.core.report_document import LossCause
from doctor.core.text import ranks_in_words


class LossWords(msgspec.Struct, frozen=True):
    """``summary``: a clause; ``help``: a sentence; ``check``: whose page says more, or empty."""

    summary: str
    help: str
    check: str = ""


_PHASES = {
    "data": "its wait for data",
    "epoch-start": "the start of an epoch",
    "forward": "its forward pass",
    "step": "its step",
    "optimizer": "its optimizer",
    "batch-end": "its loop on the host (hooks, logging)",
    "between": "its work between steps (hooks, the end of an epoch)",
}


def loss_words(job: Job, cause: LossCause, ranks: tuple[int, ...], because: str) -> LossWords:
    """Return the words of a loss. ``because``: the part of the time in which the ranks made others wait."""
    who, plural = ranks_in_words(ranks), len(ranks) > 1
    if cause == "stragglers":
        return _straggling(job, who, because)
    if cause == "data":
        return LossWords(
            f"{who} waited for data",
            "Use more `num_workers` with `persistent_workers=True` and a larger `prefetch_factor`; decode and pack the "
            "data beforehand, and keep it on local storage.",
            "RUN005",
        )
    if cause == "checkpoints":
        return LossWords(
            f"{who} wrote {'checkpoints' if plural else 'checkpoints, or had others wait for them'}",
            "Write them less often, to faster storage, or asynchronously with "
            "`torch.distributed.checkpoint.async_save`.",
        )
    if cause == "evaluation":
        return LossWords(
            f"the others waited while {who} evaluated",
            "Evaluate on all ranks, each on its part of the data, and reduce the results; or less often.",
        )
    if cause == "communication":
        return LossWords(
            "all ranks spent this in collectives of the backward pass, judged by how much longer it takes than the "
            "forward pass",
            _less_communication(job),
            "RUN013",
        )
    return LossWords(
        f"{who} made no progress, or had ended while other ranks still ran",
        "See the findings about hangs and ended ranks; let all ranks get equally many batches, and end together.",
    )


def _straggling(job: Job, who: str, because: str) -> LossWords:
    summary = f"the others waited for {who}: {_PHASES.get(because, because)} took longer than theirs"
    if because in ("data", "epoch-start"):
        return LossWords(
            summary,
            f"Compare how fast {who} reads its files with the others, and its `num_workers` with the CPUs that it can "
            "use.",
            "RUN003",
        )
    if because in ("forward", "step"):
        return LossWords(
            summary,
            "Look for other processes and thermal or power limits on its device and host, and for larger batches than "
            "those of the others.",
            "RUN003",
        )
    hooks = "callbacks, loggers, `rank_zero_only`" if uses_lightning(job) else "logging, evaluation, files"
    return LossWords(summary, f"Look for work that only {who} does: {hooks}.", "RUN003")


def _less_communication(job: Job) -> str:
    if uses_lightning(job):
        return "Use `Trainer(accumulate_grad_batches=2)` or more, or larger batches."
    return "Accumulate gradients over several batches under `model.no_sync()`, or use larger batches."
