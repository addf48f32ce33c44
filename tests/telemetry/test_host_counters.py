"""What a host went through: real traffic, a real quota, and recorded counters."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from doctor.monitor.telemetry.host_counters import HostCounters
from tests.collectors.recorded import machine_at, plant
from tests.lab.speed import patience

ROOT = Path(__file__).parents[2]

DEVICES = """Inter-|   Receive                            |  Transmit
 face |bytes packets errs drop fifo frame compressed multicast|bytes packets errs drop fifo colls carrier compressed
  eth0: 1597   56570 {:2d} {:2d} 0 0 0 0 348 37709 {:2d} {:2d} 0 0 0 0
    lo:40276 1214349  0  7 0 0 0 0 402 12143  0  0 0 0 0 0
"""
SEGMENTS = "Tcp: RtoAlgorithm OutSegs RetransSegs\nTcp: 1 {} {}\n"


@pytest.fixture
def tree(tmp_path):
    machine = plant("cgroup-v2-pod", tmp_path)
    (tmp_path / "proc" / "net").mkdir()
    return machine


def _write(tree, periods, throttled, sent, again, *errors):
    (tree.sys / "fs/cgroup/cpu.stat").write_text(f"usage_usec 1\nnr_periods {periods}\nnr_throttled {throttled}\n")
    (tree.proc / "net" / "snmp").write_text(SEGMENTS.format(sent, again))
    (tree.proc / "net" / "dev").write_text(DEVICES.format(*errors))


def test_only_what_happened_since(tree):
    _write(tree, 100, 40, 10_000, 30, 1, 2, 3, 4)
    use = HostCounters(tree)
    quiet = use.facts()
    assert (quiet.cpu_periods, quiet.cpu_throttled_periods, quiet.segments, quiet.retransmitted) == (0, 0, 0, 0)
    assert quiet.interface_errors == ()
    _write(tree, 150, 47, 12_000, 130, 11, 2, 3, 9)
    busy = use.facts()
    assert (busy.cpu_periods, busy.cpu_throttled_periods, busy.segments, busy.retransmitted) == (50, 7, 2000, 100)
    assert busy.interface_errors == (("eth0", 15),), "errors and drops of both ways; lo had none since"
    assert busy.receive_drops == ()
    _write(tree, 150, 47, 12_000, 130, 11, 9, 3, 9)
    assert use.facts().receive_drops == (("eth0", 7),)
    assert 0 <= quiet.seconds <= busy.seconds < 60


def test_counters_that_began_anew_say_nothing(tree):
    _write(tree, 100, 40, 10_000, 30, 9, 9, 9, 9)
    use = HostCounters(tree)
    _write(tree, 1, 0, 20, 0, 0, 0, 0, 1)
    facts = use.facts()
    assert (facts.cpu_periods, facts.cpu_throttled_periods, facts.segments) == (None, None, None)
    assert facts.interface_errors == ()


@pytest.mark.parametrize("garbage", ["", "eth0: 1 2\n", "\x00\xff", "Tcp: \nTcp: \n", "eth0:" + " x" * 16])
def test_a_host_that_shows_nothing(tmp_path, garbage):
    machine = machine_at(tmp_path)
    (tmp_path / "proc" / "net").mkdir()
    for name in ("dev", "snmp"):
        (tmp_path / "proc" / "net" / name).write_text(garbage)
    facts = HostCounters(machine).facts()
    assert (facts.cpu_periods, facts.segments, facts.retransmitted, facts.interface_errors) == (None, None, None, ())


def test_real_traffic_is_counted():
    use = HostCounters()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sender:
        receiver, _ = server.accept()
        with receiver:
            for _ in range(100):
                sender.sendall(b"x")
                receiver.recv(1)
    facts = use.facts()
    assert facts.segments >= 100
    assert 0 <= facts.retransmitted <= facts.segments


BUSY = """
import os, sys, time
with open(f"{sys.argv[1]}/cgroup.procs", "w") as file:
    file.write(str(os.getpid()))
from doctor.monitor.telemetry.host_counters import HostCounters
use = HostCounters()
end = time.monotonic() + float(sys.argv[2])
while (facts := use.facts()).cpu_throttled_periods < 3 and time.monotonic() < end:
    sum(range(100_000))
print(facts.cpu_throttled_periods, facts.cpu_periods)
"""


def test_a_real_quota_that_throttles():
    group = Path(f"/sys/fs/cgroup/cpu/rankdoctor-use-{os.getpid()}")
    try:
        group.mkdir()
    except OSError:
        pytest.skip("needs root and control groups of version 1")
    try:
        (group / "cpu.cfs_quota_us").write_text("20000")
        command = [sys.executable, "-c", BUSY, str(group), str(patience(20.0))]
        answer = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True).stdout
    finally:
        group.rmdir()
    throttled, periods = map(int, answer.split())
    assert 3 <= throttled <= periods
