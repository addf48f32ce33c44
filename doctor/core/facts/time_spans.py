"""Where the time of a rank went, from its first training batch on: every second is in one part of one span."""

from __future__ import annotations

import msgspec

TIME_PARTS = (
    "data",
    "epoch-start",
    "step",
    "forward",
    "backward",
    "optimizer",
    "batch-end",
    "between",
    "checkpoint",
    "evaluation",
    "unmeasured",
)
"""Parts of a span. ``data``: waiting for the next training batch. ``epoch-start``: from the start of an epoch to its
first batch. ``step``: of a training step, outside of the points that follow. ``between``: outside of steps (hooks at
the end of an epoch, after the last one). ``evaluation``: any stage but training. ``unmeasured``: events were lost."""
_STEP_POINTS = frozenset(TIME_PARTS) - {"between", "evaluation", "unmeasured"}


class TimeSpan(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """The time that belongs to ``batches`` training batches from batch ``first`` on.

    ``seconds``: by part, in the order of :data:`TIME_PARTS`. What follows the work of a batch (its checkpoint, an
    evaluation, the wait for the next batch) belongs to the next batch, because that is where other ranks wait for it.
    ``device``: seconds between the device events of its batches, ``None`` without a CUDA device.
    """

    first: int
    batches: int
    seconds: tuple[float, ...] = ()
    device: float | None = None

    def part(self, name: str) -> float:
        """Return the seconds in one part."""
        place = TIME_PARTS.index(name)
        return self.seconds[place] if place < len(self.seconds) else 0.0


def time_part(stage: str, point: str) -> str:
    """Return the part that a rank is in at ``point`` of ``stage``, as in :class:`doctor.core.facts.ProgressFacts`."""
    if point == "checkpoint":
        return "checkpoint"
    if stage not in ("train", "setup", "teardown"):
        return "evaluation"
    return point if stage == "train" and point in _STEP_POINTS else "between"
