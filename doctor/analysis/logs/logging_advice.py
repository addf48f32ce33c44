"""Settings that make the next run log more, by the installed releases."""

from __future__ import annotations

from doctor.core.facts import SoftwareFacts
from doctor.core.job import Job
from doctor.knowledge.releases import is_older

ENTRIES = 2000
"""The default size of the recorder from torch 2.11 on (FlightRecorder.hpp)."""
SINCE = "2.8"
"""The release of torch that reads TORCH_FR_BUFFER_SIZE; earlier ones read TORCH_NCCL_TRACE_BUFFER_SIZE."""


def recorder_assignments(job: Job | None) -> str:
    """The assignment that enables torch's flight recorder, as an argument of ``export``; both assignments if the
    release of torch is unknown."""
    return " ".join(_assignments(job))


def _assignments(job: Job | None) -> list[str]:
    new, old = f"TORCH_FR_BUFFER_SIZE={ENTRIES}", f"TORCH_NCCL_TRACE_BUFFER_SIZE={ENTRIES}"
    releases = (facts.version("torch") for facts, _ in job.each(SoftwareFacts)) if job else iter(())
    torch = next(filter(None, releases), None)
    if torch is None:
        return [new, old]
    return [old if is_older(torch, SINCE) else new]
