"""Cases of checks: jobs built by hand, in passing and failing variants."""

from __future__ import annotations

from doctor.testing.cases import Fails, JobBuilder, Passes, healthy, logged
from doctor.testing.loader_cases import in_a_loop, with_loader, with_sampler
from doctor.testing.stalled_run import package_frame, stalled, user_frame
from doctor.testing.training_run import running

__all__ = [
    "Fails",
    "JobBuilder",
    "Passes",
    "healthy",
    "in_a_loop",
    "lines",
    "logged",
    "package_frame",
    "running",
    "stalled",
    "user_frame",
    "with_loader",
    "with_sampler",
]


def lines(*text: str) -> str:
    """The text of a case of a launch file, line by line."""
    return "\n".join(text) + "\n"
