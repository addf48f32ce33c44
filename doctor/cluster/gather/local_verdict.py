"""Verdict of a process on itself, used when the coordinator's verdict is not authenticated."""

from __future__ import annotations

from collections.abc import Callable

from doctor.core.background import BackgroundCall
from doctor.core.job import Job

EXIT_CODES_BY_SEVERITY = (0, 3, 2, 1)
"""Exit codes from best to worst: no finding, inconclusive, unusable, finding.

A finding of this process outweighs the rest, because not every job is stopped by 2 or 3.
"""
PATIENCE = 15.0
"""Seconds to evaluate one process, which takes one: checks are loaded while it waits for the others."""


def worse_exit_code(one: int, other: int) -> int:
    """Return the worse of two exit codes."""
    return max(one, other, key=EXIT_CODES_BY_SEVERITY.index)


class LocalVerdict:
    """Evaluates this process alone, in the background.

    ``judge`` returns the exit code of a job; ``local_job`` returns the job of this process, and may block.
    """

    def __init__(self, judge: Callable[[Job], int], local_job: Callable[[], Job]) -> None:
        self._judge = judge
        self._local_job = local_job
        self._call: BackgroundCall[int] | None = None

    def begin(self) -> None:
        """Start the evaluation unless it has started."""
        if self._call is None:
            self._call = BackgroundCall(lambda: self._judge(self._local_job()))

    def wait(self) -> int | None:
        """Return the exit code; ``None`` if the evaluation failed or timed out."""
        self.begin()
        assert self._call is not None
        try:
            code = self._call.result(PATIENCE)
        except (Exception, SystemExit):  # noqa: BLE001 - plugins may raise anything: then nothing is known
            return None
        return code if code in EXIT_CODES_BY_SEVERITY else None
