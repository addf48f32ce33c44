"""Work on hosts of the lab takes what it says, where it says, and ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from tests.lab.hosts import LabHost
from tests.lab.load import busy_processor
from tests.lab.running import wait_for_stop

SHARE = """
import os, sys, time
os.sched_setaffinity(0, {int(sys.argv[1])})
began, used = time.monotonic(), time.process_time()
while time.monotonic() < began + 0.5:
    pass
print((time.process_time() - used) / (time.monotonic() - began))
"""


def share_of(host: LabHost, processor: int) -> float:
    """What a process of ``host`` gets of a processor."""
    return float(host.run([sys.executable, "-c", SHARE, str(processor)]).stdout)


def test_a_busy_processor_leaves_little_to_others(lab_hosts: Callable[..., tuple[LabHost, ...]]) -> None:
    [host] = lab_hosts(1)
    processor = max(os.sched_getaffinity(0))
    with busy_processor(host, processor, spinners=3):
        spinning = host.processes("while :; do")
        assert {tuple(process.cpu_affinity()) for process in spinning} == {(processor,)}
        assert share_of(host, processor) < 0.45
    assert host.processes("while :; do") == []


def test_a_processor_that_is_busy_from_a_moment_on(lab_hosts: Callable[..., tuple[LabHost, ...]]) -> None:
    [host] = lab_hosts(1)
    processor = max(os.sched_getaffinity(0))
    with busy_processor(host, processor, spinners=3, waiting=True) as begin:
        for process in host.processes("while :; do"):
            wait_for_stop(process)
        begin()
        assert share_of(host, processor) < 0.45
    assert host.processes("while :; do") == []
