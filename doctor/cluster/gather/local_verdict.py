"""What a process finds by itself, where nobody can tell who wrote a verdict."""

from __future__ import annotations

import threading
from collections.abc import Callable

from doctor.core.job import Job

EXIT_CODES_BY_SEVERITY = (0, 3, 2, 1)
"""Exit codes, the worse the later: nothing was found, it is not known, it can't be used, something was found. What this
process has found outweighs all, as neither 2 nor 3 stops a job everywhere."""
PATIENCE = 15.0
"""Seconds for judging one process, which takes one: its checks are being read while it waits for the others."""


def worse_exit_code(one: int, other: int) -> int:
    """The worse of two exit codes."""
    return max(one, other, key=EXIT_CODES_BY_SEVERITY.index)


class LocalVerdict:
    """Judges this process alone, in the background. ``judge``: the exit code of a job; ``alone``: the job of this
    process, which may have to be waited for."""

    def __init__(self, judge: Callable[[Job], int], local_job: Callable[[], Job]) -> None:
        self._judge = judge
        self._local_job = local_job
        self._code: int | None = None
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Begin, unless that was done."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="doctor-own-verdict", daemon=True)
            self._thread.start()

    def wait(self) -> int | None:
        """The exit code; ``None`` where judging broke or took too long."""
        self.begin()
        if self._thread is not None:
            self._thread.join(PATIENCE)
        return self._code

    def _work(self) -> None:
        try:
            code = self._judge(self._local_job())
        except Exception:  # noqa: BLE001 - plugins may raise anything: then nothing is known
            return
        self._code = code if code in EXIT_CODES_BY_SEVERITY else None
