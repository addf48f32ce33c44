"""Tools are run on a job that hangs now, and what they print is diagnosed."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest

from tests.lab.sample import long_only

PROGRAM = Path(__file__).with_name("programs") / "asleep.py"
PY_SPY = Path(sysconfig.get_path("scripts")) / "py-spy"
PATIENCE = 120.0


def may_trace():
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    return PY_SPY.exists() and (os.geteuid() == 0 or not scope.exists() or scope.read_text().strip() == "0")


pytestmark = pytest.mark.skipif(not may_trace(), reason="needs py-spy and the right to trace")


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """PIDs of three ranks, of which rank 1 sleeps and the others wait for it."""
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("job")
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    ranks = [
        subprocess.Popen(
            [sys.executable, PROGRAM, folder / "store", str(rank)], env=environ, stdout=subprocess.PIPE, cwd=folder
        )
        for rank in range(3)
    ]
    try:
        assert ranks[1].stdout.readline() == b"asleep\n"
        yield [rank.pid for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def dumped(pid, *options):
    return subprocess.run(
        [PY_SPY, "dump", "--pid", str(pid), *options], check=True, capture_output=True, text=True
    ).stdout


def waits(pid):
    return "all_reduce (" in dumped(pid)


def diagnosed(*paths):
    command = [sys.executable, "-m", "doctor", "diagnose", "--format", "json", *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, {one["id"]: one for one in json.loads(done.stdout)["results"]}


def until_waiting(pids):
    """The ranks other than the sleeping one reach their second collective soon after it fell asleep."""
    deadline = time.monotonic() + PATIENCE
    while not (waits(pids[0]) and waits(pids[2])):
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.mark.parametrize("options", [(), ("--json",), ("--locals",)])
def test_py_spy_of_a_job_that_hangs(job, tmp_path, options):
    until_waiting(job)
    (tmp_path / "dump.txt").write_text("".join(dumped(pid, *options) for pid in job))
    code, results = diagnosed(tmp_path)
    assert code == 1
    (finding,) = results["RUN001"]["findings"]
    assert finding["ranks"] == [1]
    assert "asleep.py:12 (read_shard)" in finding["summary"]
    assert "guessed" in finding["summary"]
    assert finding["confidence"] < 0.7


def test_two_dumps_are_surer_than_one(job, tmp_path):
    until_waiting(job)
    for number in range(2):
        (tmp_path / f"dump_{number}.txt").write_text("".join(dumped(pid) for pid in job))
    _, results = diagnosed(tmp_path)
    (finding,) = results["RUN001"]["findings"]
    assert (finding["ranks"], finding["confidence"]) == ([1], 0.75)


@long_only("test_recorded.py reads what gdb wrote of such a job")
@pytest.mark.skipif(shutil.which("gdb") is None, reason="needs gdb")
def test_gdb_of_a_job_that_hangs(job, tmp_path):
    until_waiting(job)
    for rank, pid in enumerate(job):
        command = ["gdb", "-p", str(pid), "-batch", "-ex", "thread apply all bt"]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        (tmp_path / f"rank{rank}.txt").write_text(text)
    _, results = diagnosed(tmp_path)
    (finding,) = results["RUN001"]["findings"]
    assert finding["ranks"] == [1]
    assert "all_reduce" in finding["summary"]
