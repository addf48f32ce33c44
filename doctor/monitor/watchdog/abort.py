"""Aborts the process of a rank, if requested, instead of hanging until a timeout."""

from __future__ import annotations

import os
import signal

from doctor.core.clock import sleep

NOTIFY_SECONDS = 1.0
"""Seconds for the decision to reach ranks that depend on a store in this process."""
BY_ITSELF = 5.0
"""Seconds for the process to end by SIGTERM. A training thread blocked in a library never handles the signal."""


def abort_process() -> None:
    """Send SIGTERM to this process, then exit hard if that has no effect. Does not return."""
    sleep(NOTIFY_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)
    sleep(BY_ITSELF)
    os._exit(1)
