"""How fast the machine is that runs the tests, measured once a session: deadlines grow with it.

No test asserts how long something took. A deadline ends a test that hangs, and what a test gives the product as a
timeout may not race with other work on the machine: both are multiplied by what is measured here.
"""

from __future__ import annotations

import functools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

VARIABLE = "RANKDOCTOR_TESTS_SLOWNESS"
"""Carries the measurement from the process that started the session to its workers."""
REFERENCE = 0.12
"""Seconds that :func:`_work` takes on an idle core of the machine on which the deadlines of the tests were chosen
(Xeon, 2.1 GHz, Python 3.11)."""
ROUNDS = 3
MOST = 10.0
"""A machine that is slower still fails a test that hangs within the hour."""
SPARE = 2.0
"""Other work may start after the measurement, the session's own workers among it."""

NEVER = 86_400.0
"""Seconds for what nobody may wait out: a test that does hangs, and ends by its limit."""


@functools.cache
def slowness() -> float:
    """How many times longer than the reference a known piece of work takes here; 1 to ``MOST``."""
    known = os.environ.get(VARIABLE)
    if known is not None:
        return float(known)
    return min(MOST, max(1.0, statistics.median(_work() for _ in range(ROUNDS)) / REFERENCE))


def patience(seconds: float) -> float:
    """The deadline of a test that needs less than ``seconds`` on an idle machine."""
    return seconds * slowness() * SPARE


def times_of_reference(work: Callable[[], object]) -> float:
    """How many times the processor time of a reference ``work`` takes, measured beside it; the best of three."""
    return min(_processor_seconds(work) / max(_processor_seconds(_reference), 1e-6) for _ in range(3))


def exceeds_reference(work: Callable[[], object], most: float) -> bool:
    """Whether ``work`` takes more than ``most`` times the processor time of the reference.

    Only work that seems too slow beside the cached reference is measured again with :func:`times_of_reference`.
    """
    return _processor_seconds(work) > most * _reference_seconds() and times_of_reference(work) > most


@functools.cache
def _reference_seconds() -> float:
    """Of the best of three, so that a busy machine does not make the limit generous."""
    return min(_processor_seconds(_reference) for _ in range(3))


def _processor_seconds(work: Callable[[], object]) -> float:
    began = time.thread_time()
    work()
    return time.thread_time() - began


def _reference() -> None:
    """About 5 ms on the machine of :data:`REFERENCE`."""
    sum(number * number for number in range(80_000))


def _work() -> float:
    """Seconds of wall-clock time for what most tests wait for: a process that starts, imports and computes."""
    began = time.monotonic()
    code = "import asyncio, decimal\nsum(number * number for number in range(2_000_000))"
    subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True)
    return time.monotonic() - began
