"""A thread that has no processor, for real, and what a transfer makes of that."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from doctor.analysis.fabric.transfer_matrix import MOST_WAITED, ONE_STREAM, unhindered
from doctor.core.facts import Transfer
from doctor.probes.runtime import cpu_starvation
from doctor.probes.runtime.cpu_starvation import RunQueueDelay
from tests.lab.speed import patience

LAST = max(os.sched_getaffinity(0))
SPINNERS = 6
SECONDS = 1.0

CROWD = f"""
import os, subprocess, sys, time
from doctor.probes.runtime.cpu_starvation import RunQueueDelay
os.sched_setaffinity(0, {{{LAST}}})
spinners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range({SPINNERS})]
try:
    time.sleep(1)
    waiting, end = RunQueueDelay(), time.monotonic() + {SECONDS}
    while time.monotonic() < end:
        pass
    print(waiting.share())
finally:
    for one in spinners:
        one.kill()
"""


def test_one_of_seven_on_a_processor_waits_most_of_the_time() -> None:
    said = subprocess.run(
        [sys.executable, "-c", CROWD], capture_output=True, text=True, timeout=patience(60), check=True
    )
    assert 0.5 < float(said.stdout) <= 1.0


def test_who_sleeps_does_not_wait() -> None:
    waiting = RunQueueDelay()
    time.sleep(0.3)
    assert waiting.share() < 0.5  # the rest is what the hypervisor of a busy machine takes


def test_a_kernel_that_does_not_tell(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    for name in ("OWN", "MACHINE"):
        monkeypatch.setattr(cpu_starvation, name, cpu_starvation.OWN.parent / "nothing-of-that-name")
    assert RunQueueDelay().share() == 0.0


@pytest.mark.parametrize(
    ("bandwidth", "waited", "expected"),
    [
        (1e6, 0.0, 1e6),
        (1e8, 0.5, 2e8),
        (1e8, 0.99, 1e8 / (1 - MOST_WAITED)),  # what is left is too little to tell from
        (8e8, 0.6, ONE_STREAM),
        (5e9, 0.6, 5e9),  # nothing is made less
        (0.0, 0.8, 0.0),
    ],
)
def test_waiting_is_no_part_of_a_transfer(bandwidth: float, waited: float, expected: float) -> None:
    assert unhindered(Transfer("node1", "done", bandwidth, waited=waited)) == pytest.approx(expected)
