"""Real processes, read by the real py-spy."""

import json
import os
import signal
import statistics
import subprocess
import sys
import time

import msgspec
import pytest

from doctor.attach import sampler
from doctor.attach.py_spy import DumpRequest, run_dump
from doctor.attach.sampler import SamplingOptions, sample
from tests.attach.readable import (
    FORBIDS_TRACING,
    QUICK,
    SLEEPER,
    functions_of,
    only_child,
    read_from,
    read_one,
    started,
    status_of,
    target_of,
    wait_until,
)
from tests.lab.cases import each_case
from tests.lab.speed import patience
from tests.lab.users import ALICE, BOB, require_root, run_as

THRICE = SamplingOptions(rounds=3, interval=0.15, seconds=patience(20))
STUCK = ["inner", "outer", "<module>"]
THREAD_START = ["run", "_bootstrap_inner", "_bootstrap"]


def test_standing_process_shows_the_same_stack_in_each_round():
    with started() as target:
        found = read_one(target, THRICE)
    assert [functions_of(found, number) for number in range(3)] == [STUCK] * 3
    assert (found.stack_source, found.refused, found.ended) == ("py-spy", "", "")
    assert [one.kernel.state for one in found.samples] == ["S"] * 3
    times = [one.at for one in found.samples]
    assert times == sorted(times)


def test_moving_process_shows_consistent_stacks():
    program = """
def top(): return middle_a() + middle_b()
def middle_a(): return leaf_a()
def middle_b(): return leaf_b()
def leaf_a(): return sum(range(50))
def leaf_b(): return sum(range(50))
print("ready", flush=True)
while True: top()
"""
    with started(program) as target:
        found = read_one(target, SamplingOptions(rounds=12, interval=0.02, seconds=patience(20)))
    assert len(found.samples) == 12
    for number, one in enumerate(found.samples):
        kinds = {name[-2:] for name in functions_of(found, number) if name[-2:] in ("_a", "_b")}
        assert len(kinds) <= 1
        assert one.kernel.state in "RS"
    assert found.samples[-1].kernel.cpu > found.samples[0].kernel.cpu


def test_moving_process_is_not_stopped_on_request():
    program = "def step(): return sum(range(50))\nprint('ready', flush=True)\nwhile True: step()"
    with started(program) as target:
        found = read_one(target, THRICE._replace(blocking=False))
    assert [one.paused for one in found.samples] == [0.0] * 3
    assert all(one.threads for one in found.samples)


def test_processes_of_a_round_are_read_concurrently():
    with started() as one, started() as other:
        found = sample([one, other], THRICE)
    assert [one.pid for one in found] == [one.pid, other.pid]
    assert all(functions_of(each) == STUCK for each in found)


def test_interpreter_lock_held_in_c_is_read():
    program = """
import ctypes

def holds():
    print("ready", flush=True)
    ctypes.PyDLL(None).sleep(300)

holds()
"""
    with started(program) as target:
        assert functions_of(read_one(target)) == ["holds", "<module>"]


def test_regular_expression_without_end_is_read():
    program = """
import re

def tokenize():
    print("ready", flush=True)
    re.match(r"(a+)+$", "a" * 60 + "b")

tokenize()
"""
    with started(program) as target:
        found = read_one(target, THRICE)
    assert functions_of(found, 2)[-2:] == ["tokenize", "<module>"]
    assert [one.paused for one in found.samples[1:]] == [0.0, 0.0], "its stack is the same as before"
    assert found.samples[-1].kernel.main_cpu > found.samples[0].kernel.main_cpu


def test_stopped_process_is_read_and_stays_stopped():
    with started() as target:
        os.kill(target.pid, signal.SIGSTOP)
        wait_until(lambda: status_of(target.pid)["State"][0] == "T")
        found = read_one(target, THRICE)
        assert status_of(target.pid)["State"][0] == "T"
        assert status_of(target.pid)["TracerPid"] == "0"
    assert [one.kernel.state for one in found.samples] == ["T"] * 3
    assert [one.paused for one in found.samples] == [0.0] * 3
    assert functions_of(found) == STUCK


TRACER = """
import ctypes, sys, time
assert ctypes.CDLL(None).ptrace({request}, int(sys.argv[1]), None, None) == 0
print("traces", flush=True)
time.sleep(300)
"""
ATTACH, SEIZE = 16, 0x4206


@each_case("request_, letter", [(ATTACH, "t"), (SEIZE, "S")], ids=["stopped by it", "running"])
def test_process_of_another_debugger_is_read_and_stays_with_it(request_, letter):
    with started() as target:
        command = [sys.executable, "-S", "-c", TRACER.format(request=request_), str(target.pid)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as tracer:
            try:
                assert tracer.stdout.readline() == b"traces\n"
                wait_until(lambda: status_of(target.pid)["State"][0] == letter)
                found = read_one(target)
                after = status_of(target.pid)
                assert (after["State"][0], after["TracerPid"]) == (letter, str(tracer.pid))
            finally:
                tracer.kill()
    assert found.samples[0].kernel.state == letter
    assert functions_of(found) == STUCK


def test_zombie_is_reported():
    program = """
import os, time
if not os.fork():
    os._exit(0)
print("ready", flush=True)
time.sleep(300)
"""
    with started(program) as parent:
        child = only_child(parent.pid)
        wait_until(lambda: status_of(child)["State"][0] == "Z")
        found = read_one(target_of(child))
    assert (found.ended, found.samples, found.refused) == ("zombie", (), "")


def test_ended_process_is_reported():
    with started() as target:
        pass
    assert read_one(target).ended == "ended"


def test_reused_pid_is_told_by_its_start_time():
    with started() as target:
        found = read_one(msgspec.structs.replace(target, started=target.started - 100))
    assert (found.ended, found.samples) == ("ended", ())


def test_process_that_ends_while_it_is_read():
    """Each lives a little longer than the one before: some end before, some within, some after a read."""
    program = "import sys, time\nprint('ready', flush=True)\ntime.sleep({})"
    for milliseconds in range(0, 60, 6):
        with started(program.format(milliseconds / 1000)) as target:
            found = read_one(target, QUICK._replace(rounds=3))
        assert found.ended or found.samples, found
        assert not found.refused or not found.ended, found


def test_process_in_a_container(tmp_path):
    """PID and mount namespaces of its own, in which alone its interpreter has this path."""
    require_root()
    at = tmp_path / "python"
    at.mkdir()
    unshare = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
    run = f'mount --bind "{sys.base_prefix}" "{at}" && shift && exec "{at}/bin/python3" "$@"'
    program = SLEEPER.replace(
        "import time", "import threading, time\nthreading.Thread(target=time.sleep, args=[300]).start()"
    )
    with started(program, before=[*unshare, "sh", "-c", run, "sh"]) as parent:
        found = read_one(target_of(only_child(parent.pid)))
        assert list(at.iterdir()) == []
    assert functions_of(found) == STUCK
    assert len(found.samples[0].threads) == 2


@pytest.mark.parametrize("before", [[], ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]])
def test_a_thread_that_trains_is_read_as_the_main_one(before):
    """As Ray Train has it: the main thread serves the actor."""
    program = """
import threading, time

def train():
    print("ready", flush=True)
    while True:
        sum(range(1000))

threading.Thread(target=train, name="TrainingThread(train)", daemon=True).start()
time.sleep(300)
"""
    if before:
        require_root()
    with started(program, before=before) as parent:
        found = read_one(target_of(only_child(parent.pid)) if before else parent, THRICE)
    assert [functions_of(found, number)[-4:] for number in range(3)] == [["train", *THREAD_START]] * 3
    assert [one.kernel.state for one in found.samples] == ["R"] * 3


def test_without_py_spy_only_the_kernel_is_asked(monkeypatch):
    monkeypatch.setattr(sampler, "find_py_spy", lambda: None)
    with started() as target:
        found = read_one(target, THRICE)
    assert [(one.kernel.state, one.threads) for one in found.samples] == [("S", ())] * 3
    assert "not installed" in found.refused
    assert found.remedy == "pip install py-spy"


def test_other_program_than_python():
    with subprocess.Popen(["sleep", "300"]) as process:
        try:
            wait_until(lambda: status_of(process.pid)["State"][0] == "S")
            found = read_one(target_of(process.pid))
        finally:
            process.kill()
    assert found.refused == "py-spy found no Python interpreter in this process."
    assert found.samples[0].kernel.state == "S"


def test_only_the_kernel_is_asked_for_launchers():
    with started() as target:
        found = read_one(msgspec.structs.replace(target, role="agent", rank=None))
    assert (found.refused, found.stack_source) == ("", "")
    assert [(one.kernel.state, one.threads) for one in found.samples] == [("S", ())]


def test_py_spy_that_the_user_may_not_run(monkeypatch, tmp_path):
    program = tmp_path / "py-spy"
    program.symlink_to(sampler.find_py_spy())
    tmp_path.chmod(0o700)
    monkeypatch.setattr(sampler, "find_py_spy", lambda: program)
    with started(before=run_as(ALICE)) as target:
        found = read_one(target)
    assert "could not be started: Permission denied" in found.refused
    assert found.remedy == "Install py-spy where this user can run it."


def test_process_that_forbids_tracing():
    with started(FORBIDS_TRACING + SLEEPER, before=run_as(ALICE)) as target:
        found = read_from(run_as(ALICE), target)
        as_root = read_one(target, QUICK._replace(as_owner=False))
    assert "PR_SET_DUMPABLE" in found.refused
    assert found.remedy == f"sudo doctor attach --pid {target.pid}"
    assert found.samples[0].kernel.cpu is not None
    assert found.samples[0].kernel.queued is None
    assert functions_of(as_root) == STUCK


def test_process_of_another_user():
    with started(before=run_as(ALICE)) as target:
        found = read_from(run_as(BOB), target)
    assert str(ALICE) in found.refused
    assert str(BOB) in found.refused
    assert found.remedy == f"sudo -u '#{ALICE}' doctor attach --pid {target.pid}"


def test_root_without_the_capability():
    require_root()
    with started() as target:
        found = read_from(["setpriv", "--bounding-set", "-sys_ptrace"], target)
    assert "CAP_SYS_PTRACE" in found.refused
    assert "--cap-add SYS_PTRACE" in found.remedy
    assert "kubectl debug" in found.remedy


def test_root_of_another_user_namespace():
    require_root()
    with started() as target:
        found = read_from(["unshare", "--user", "--map-root-user"], target)
    assert "user namespace" in found.refused
    assert "outside of containers" in found.remedy


def test_root_reads_processes_of_others_as_these():
    program = FORBIDS_TRACING + SLEEPER
    with started(before=run_as(ALICE)) as target, started(program, before=run_as(BOB)) as closed:
        found, refused = sample([target, closed], QUICK)
    assert functions_of(found) == STUCK
    assert "PR_SET_DUMPABLE" in refused.refused
    assert refused.remedy == f"sudo doctor attach --pid {closed.pid}"


def test_root_reads_processes_of_who_called_sudo(monkeypatch):
    with started(FORBIDS_TRACING + SLEEPER, before=run_as(ALICE)) as target:
        monkeypatch.setenv("SUDO_UID", str(ALICE))
        assert functions_of(read_one(target)) == STUCK
        monkeypatch.setenv("SUDO_UID", str(BOB))
        assert "PR_SET_DUMPABLE" in read_one(target).refused


def test_reading_ends_at_the_deadline(monkeypatch, tmp_path):
    hangs = tmp_path / "py-spy"
    hangs.write_text("#!/bin/sh\nexec sleep 300\n")
    hangs.chmod(0o755)
    monkeypatch.setattr(sampler, "find_py_spy", lambda: hangs)
    with started() as target:
        begin = time.monotonic()
        found = sample([target] * 9, SamplingOptions(rounds=3, interval=0.1, seconds=1.0))
        assert time.monotonic() - begin < 1.0 + patience(3)
    assert all("deadline" in each.refused for each in found)


def test_hostile_names_are_printable_and_masked():
    secret = "hf_" + "Ab1" * 12
    program = f"""
import threading, time
from types import FunctionType
code = compile("sleep(300)", "/tmp/\\x1b]0;title\\x07{secret}.py", "exec")
code = code.replace(co_name="\\x1b[31m {secret} " + "x" * 100_000)
threading.Thread(target=FunctionType(code, {{"sleep": time.sleep}}), name="\\x1b[2J {secret}").start()
def deep(left):
    if left:
        deep(left - 1)
    print("ready", flush=True)
    time.sleep(300)
deep(900)
"""
    with started(program) as target:
        found = read_one(target)
    text = msgspec.json.encode(found).decode()
    assert secret not in text
    assert "\\u001b" not in text
    assert len(text) < 100_000
    assert len(functions_of(found)) <= 70


def test_many_threads_are_bounded():
    program = """
import threading, time
for _ in range(300):
    threading.Thread(target=time.sleep, args=[300]).start()
print("ready", flush=True)
time.sleep(300)
"""
    with started(program) as target:
        found = read_one(target)
    assert len(found.samples[0].threads) == sampler.MOST_THREADS
    assert found.samples[0].threads[0].is_main


def test_rank_is_read_from_locals_only_on_request():
    program = """
import time

def worker(rank, world_size):
    print("ready", flush=True)
    time.sleep(300)

worker(3, 8)
"""
    with started(program) as target:
        unnumbered = msgspec.structs.replace(target, rank=None)
        found = read_one(unnumbered, QUICK._replace(locals=True))
        assert read_one(unnumbered).rank is None
        assert read_one(target, QUICK._replace(locals=True)).rank == 0
    assert (found.rank, found.world_size, found.guessed, found.rank_from) == (3, 8, True, "locals of its stack")


def test_local_variables_only_on_request_and_masked():
    program = """
import time

def step(batch, password):
    size = len(batch)
    title = "\\x1b[2J" + "x" * 5000
    print("ready", flush=True)
    time.sleep(300)

step([1, 2], "hunter2")
"""
    with started(program) as target:
        found = read_one(target, QUICK._replace(locals=True))
        plain = read_one(target)
    (main,) = found.samples[0].threads
    shown = {one.name: one.value for one in main.locals if one.frame == 0}
    assert main.frames[0].function == "step"
    assert (shown["size"], shown["password"]) == ("2", "<redacted>")
    assert shown["title"].isprintable()
    assert len(shown["title"]) <= 200
    assert plain.samples[0].threads[0].locals == ()


def test_native_functions_on_request():
    with started() as target:
        found = read_one(target, QUICK._replace(native=True))
        plain = read_one(target)
    (main,) = found.samples[0].threads
    assert any("sleep" in name for name in main.native), main.native
    assert plain.samples[0].threads[0].native == ()


WAITS = """
import ctypes, os, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)

def wait():
    while True:
        code = libc.epoll_wait(libc.epoll_create1(0), ctypes.create_string_buffer(64), 1, -1)
        os.write(1, b"interrupted %d" % ctypes.get_errno())

threading.Thread(target=wait, daemon=True).start()
time.sleep(0.2)
print("ready", flush=True)
{}
"""


def test_system_calls_of_a_standing_process_are_not_interrupted(tmp_path):
    """ptrace lets epoll_wait fail with EINTR, also if the process is continued at once."""
    notes = tmp_path / "errors"
    program = WAITS.replace("os.write(1,", f"os.write(os.open({str(notes)!r}, os.O_CREAT | os.O_WRONLY),")
    with started(program.format("time.sleep(300)")) as target:
        found = read_one(target, THRICE)
        assert [one.paused for one in found.samples] == [0.0] * 3
        assert not notes.exists()
        run_dump(sampler.find_py_spy(), DumpRequest(target.pid, target.started, seconds=patience(5)))
        wait_until(notes.exists)


RECORDER = """
import json, signal, sys, threading, time
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
for _ in range(60):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
gaps = []
def record():
    last = time.monotonic()
    while True:
        time.sleep(0.001)
        now = time.monotonic()
        gaps.append((time.time(), now - last))
        last = now
threading.Thread(target=record, daemon=True).start()
print("ready", flush=True)
while signal.sigtimedwait([signal.SIGUSR1], 0) is None:
    sum(range(1000))
open(sys.argv[1], "w").write(json.dumps(gaps))
"""
"""Has 62 threads: one is busy, and one notes for how long it did not run before each moment."""


@pytest.mark.real_time
def test_process_is_paused_for_less_than_50_ms(tmp_path):
    """The median of the longest gaps within each read: work of others on the machine delays a thread, too."""
    notes = tmp_path / "gaps.json"
    rounds = SamplingOptions(rounds=9, interval=0.15, seconds=patience(20))
    with started(RECORDER, arguments=[str(notes)]) as target:
        found = read_one(target, rounds)
        os.kill(target.pid, signal.SIGUSR1)
        wait_until(lambda: notes.exists() and notes.read_text().endswith("]"))
    gaps = json.loads(notes.read_text())
    longest = [max(gap for at, gap in gaps if one.at <= at <= one.at + 0.15) for one in found.samples]
    assert all(one.threads for one in found.samples)
    assert statistics.median(longest) < 0.05
    assert statistics.median(one.paused for one in found.samples) < 0.05
