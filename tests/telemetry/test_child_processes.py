"""The children of a rank: real data workers, stopped and killed, other ranks, and recorded trees of /proc."""

import os
import signal
import subprocess
import sys
import time

import pytest

from doctor.core.facts import ChildProcess
from doctor.monitor.telemetry.child_processes import ChildStillness, child_processes
from tests.lab.speed import patience

MIB = 1 << 20
PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid, flush=True)
time.sleep(60)
"""


@pytest.fixture
def start():
    """Starts Python programs, and ends them."""
    started = []

    def start(program, **variables):
        command = [sys.executable, "-c", program]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **variables}))
        return started[-1]

    yield start
    for child in started:
        child.kill()
        child.wait()
        child.stdout.close()


def _eventually(question, seconds=10):
    deadline = time.monotonic() + patience(seconds)
    while not question() and time.monotonic() < deadline:
        time.sleep(0.02)
    return question()


def _state(pid):
    return next((child.state for child in child_processes() if child.pid == pid), None)


def test_real_data_workers():
    data = pytest.importorskip("torch.utils.data")
    kept = bytearray(b"x") * (64 * MIB)  # what the workers share with this process
    loader = data.DataLoader(range(64), batch_size=4, num_workers=2)
    batches = iter(loader)
    next(batches)
    pids = [worker.pid for worker in batches._workers]
    found = {child.pid: child for child in child_processes()}
    assert set(pids) <= set(found)
    for pid in pids:
        assert found[pid].state in "RSD"
        assert found[pid].name
        assert 0 < found[pid].private < found[pid].memory - len(kept) / 2, "forked: most is its parent's too"
    os.kill(pids[0], signal.SIGSTOP)
    assert _eventually(lambda: _state(pids[0]) == "T")
    os.kill(pids[0], signal.SIGCONT)
    list(batches)
    del batches
    assert _eventually(lambda: not {child.pid for child in child_processes()} & set(pids))


def test_a_child_that_was_killed_and_not_waited_for(start):
    child = start("import time; time.sleep(60)")
    child.kill()
    assert _eventually(lambda: _state(child.pid) == "Z")
    dead = next(one for one in child_processes() if one.pid == child.pid)
    assert not dead.memory
    child.wait()
    assert _state(child.pid) is None


def test_grandchildren_and_children_of_another_process(start):
    parent = start(PARENT)
    grandchild = int(parent.stdout.readline())
    try:
        assert {parent.pid, grandchild} <= {child.pid for child in child_processes()}
        assert [child.pid for child in child_processes(parent.pid)] == [grandchild]
    finally:
        os.kill(grandchild, signal.SIGKILL)


def test_other_ranks_that_this_one_started_are_no_children_of_it(start):
    other = start(PARENT, LOCAL_RANK="1")
    below = int(other.stdout.readline())
    own = start("import time; time.sleep(60)", LOCAL_RANK=os.environ.get("LOCAL_RANK", "0"))
    try:
        found = {child.pid for child in child_processes()}
        assert own.pid in found
        assert not {other.pid, below} & found
    finally:
        os.kill(below, signal.SIGKILL)


def test_a_process_that_is_gone_has_no_children(start):
    child = start("pass")
    child.wait()
    assert child_processes(child.pid) == ()


def test_for_how_long_children_have_not_run(start):
    sleeps = start("import time; time.sleep(60)")
    naps = start("import time\nwhile True: time.sleep(0.01)")
    thread = start(
        "import threading, time\ndef nap():\n    while True: time.sleep(0.01)\nthreading.Thread(target=nap).start()"
    )
    stillness = ChildStillness()

    def still(child):
        return next((one.still for one in stillness.look() if one.pid == child.pid), None)

    assert still(sleeps) == 0.0, "nothing is known of the time before the first look"
    assert _eventually(lambda: (still(sleeps) or 0.0) > 0.5)
    for child in (naps, thread):
        time.sleep(0.1)
        assert still(child) < 0.5
    polls = start("import time\nwhile True: time.sleep(0.5)")
    works = start("while True: sum(range(1000))")
    assert _eventually(lambda: (still(polls) or 0.0) > 1.5), "it only looks again"
    assert still(works) < 0.5


def _process(proc, pid, children="", name="python", state="S", environ="RANK=3"):
    folder = proc / str(pid)
    (folder / "task" / str(pid)).mkdir(parents=True)
    (folder / "task" / str(pid) / "children").write_text(children)
    (folder / "stat").write_text(f"{pid} ({name}) {state} 1 1 1 0 -1\n")
    (folder / "statm").write_text("1000 10 5 1 0 500 0\n")
    (folder / "environ").write_text(environ.replace(" ", "\0"))
    return folder


def test_the_kernels_own_list_of_children(tmp_path):
    page = os.sysconf("SC_PAGE_SIZE")
    rank = _process(tmp_path, 100, "101 103 ")
    (rank / "task" / "110").mkdir()
    (rank / "task" / "110" / "children").write_text("102 999")
    worker = _process(tmp_path, 101, name="a (b) c) R", state="D")
    (worker / "smaps_rollup").write_text("0-1 ---p [rollup]\nRss: 40 kB\nPrivate_Clean: 3 kB\nPrivate_Dirty: 5 kB\n")
    _process(tmp_path, 102, "104", environ="RANK=3 LOCAL_RANK=0")
    _process(tmp_path, 103, "105", environ="RANK=4")
    _process(tmp_path, 104, environ="")
    _process(tmp_path, 105, environ="RANK=4")
    assert child_processes(100, proc=tmp_path) == (
        ChildProcess(101, "D", "a (b) c) R", 10 * page, 8 * 1024),
        ChildProcess(102, "S", "python", 10 * page),
        ChildProcess(104, "S", "python", 10 * page),
    )


def test_a_circle_of_parents_ends(tmp_path):
    _process(tmp_path, 100, "101")
    _process(tmp_path, 101, "100 101")
    assert [child.pid for child in child_processes(100, proc=tmp_path)] == [100, 101]


@pytest.mark.parametrize("garbage", ["", "\x00\xff", "1 (", ") ) )", "-1", "Private_Dirty:\n\nPrivate_Clean: x kB"])
def test_garbage_in_proc_is_no_child(tmp_path, garbage):
    _process(tmp_path, 100, "101 abc 102 103")
    _process(tmp_path, 103)
    for path in [*_process(tmp_path, 101).glob("*[!k]"), tmp_path / "103" / "smaps_rollup"]:
        path.write_text(garbage)
    (child,) = child_processes(100, proc=tmp_path)
    assert (child.pid, child.private) == (103, None)


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ("voluntary_ctxt_switches:\t7\nnonvoluntary_ctxt_switches:\t2\n", 0.0),
        ("voluntary_ctxt_switches:\t7\n", None),
        ("voluntary_ctxt_switches:\tmany\nnonvoluntary_ctxt_switches:\t2\n", None),
        ("", None),
    ],
)
def test_what_the_kernel_does_not_count_is_not_known_to_be_still(tmp_path, status, expected):
    _process(tmp_path, os.getpid(), children="101", environ="")
    (_process(tmp_path, 101, environ="") / "task" / "101" / "status").write_text(status)
    (child,) = ChildStillness(proc=tmp_path).look()
    assert child.still == expected
