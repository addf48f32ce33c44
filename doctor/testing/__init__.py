"""Cases of checks: jobs built by hand, in passing and failing variants."""

from __future__ import annotations

from doctor.testing.cases import Fails as Fails
from doctor.testing.cases import JobBuilder as JobBuilder
from doctor.testing.cases import Passes as Passes
from doctor.testing.cases import healthy as healthy
from doctor.testing.cases import logged as logged
from doctor.testing.loader_cases import in_a_loop as in_a_loop
from doctor.testing.loader_cases import with_loader as with_loader
from doctor.testing.loader_cases import with_sampler as with_sampler
from doctor.testing.stalled_run import package_frame as package_frame
from doctor.testing.stalled_run import stalled as stalled
from doctor.testing.stalled_run import user_frame as user_frame
from doctor.testing.training_run import running as running


def lines(*text: str) -> str:
    """The text of a case of a launch file, line by line."""
    return "\n".join(text) + "\n"
