"""Compares two runs by summary figures instead of their thousands of samples."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping

import msgspec

from doctor.core.facts import (
    LoaderFacts,
    ModelFacts,
    ProgressFacts,
    ReplicaFacts,
    RunMemoryFacts,
    Section,
    StepFacts,
    TrainingFacts,
)

TOLERANCE = 0.15
"""Relative tolerance for a measured figure between two healthy runs of one script on one machine."""
MEASURED = frozenset({"seconds a step", "seconds of data a step", "peak allocated", "peak reserved", "resident"})

Figures = Mapping[str, object]


def figures_of(section: Section) -> Figures | None:
    """The figures of a section of a monitored run by which two runs are compared; ``None`` for other sections."""
    figures = _figures(section)
    return None if figures is None else {name: value for name, value in figures.items() if value is not None}


def is_alike(name: str, before: object, after: object) -> bool:
    """Whether two values of a figure are equal, or within the tolerance."""
    if name in MEASURED and isinstance(before, (int, float)) and isinstance(after, (int, float)):
        return math.isclose(before, after, rel_tol=TOLERANCE)
    return before == after


def _figures(section: Section) -> Figures | None:
    match section:
        case StepFacts():
            # The first window contains one-time costs: compilation, cold caches, worker start-up.
            windows = section.windows[1:] or section.windows
            if not windows:
                return {}
            return {
                "seconds a step": round(statistics.median(one.total for one in windows), 6),
                "seconds of data a step": round(statistics.median(one.data for one in windows), 6),
            }
        case RunMemoryFacts():
            return {
                "peak allocated": section.peak_allocated,
                "peak reserved": section.peak_reserved,
                "resident": section.resident,
                "allocations retried": section.retries,
                "allocations failed": section.failures,
                "total": section.total,
            }
        case ProgressFacts():
            failure = section.failure
            has_stopped = section.state in ("stalled", "silent", "stopped")
            return {
                "state": section.state,
                "failure": f"{failure.kind}: {failure.message[:200]}" if failure else None,
                "stopped at": f"{section.stage} {section.point}" if has_stopped else None,
            }
        case LoaderFacts():
            return {
                f"{one.stage}[{one.index}].{name}": value
                for one in section.loaders
                for name, value in msgspec.to_builtins(msgspec.structs.replace(one, epochs=(), sampler=None)).items()
                if name not in ("stage", "index", "epochs")
            }
        case TrainingFacts():
            own = ("data_parallel_rank", "data_parallel_root", "device_id", "hidden", "checkpoints")
            return {name: value for name, value in msgspec.to_builtins(section).items() if name not in own}
        case ModelFacts():
            return {"name": section.name, "parameters": section.parameters, "trainable": section.trainable}
        case ReplicaFacts():
            first = section.non_finite[:1]
            return {"not finite": f"{first[0].what} at step {first[0].step}" if first else None}
    return None


OF_THE_MOMENT = frozenset({"flight-recorder", "host-use"})
"""Sections of a run that always differ between runs."""
