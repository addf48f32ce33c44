"""The table of processes, of real ones and of trees that no kernel would show."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from doctor.attach import processes
from doctor.attach.processes import is_running, process_table
from doctor.collectors.host.local_processes import process_start_time
from tests.attach.sleepers import running
from tests.lab.speed import patience
from tests.lab.users import ALICE, BOB, as_user, require_root, run_as

UNDUMPABLE = "import ctypes\nctypes.CDLL(None).prctl(4, 0, 0, 0, 0)"


def test_a_process_is_read_with_its_start_variables_and_arguments():
    with running(environ={"RANK": "3"}) as process:
        seen = process_table().processes[process.pid]
        assert seen.started == process_start_time(process.pid)
    assert (seen.parent, seen.user, seen.inner_pid) == (os.getpid(), os.geteuid(), process.pid)
    assert seen.environ["RANK"] == "3"
    assert seen.arguments[1:3] == ("-S", "-c")
    assert Path(seen.executable).name.startswith("python")
    assert seen.network.startswith("net:")


def test_children_are_in_the_order_of_their_start():
    with running() as first, running() as second:
        table = process_table()
        children = [child.pid for child in table.children(os.getpid()) if child.pid in (first.pid, second.pid)]
        parents = [parent.pid for parent in table.ancestors(table.processes[second.pid])]
    assert children == [first.pid, second.pid]
    assert parents[0] == os.getpid()


def test_any_bytes_in_arguments_and_variables(tmp_path):
    program = tmp_path / "a) R 1 (b\n\x1b]0;x"
    program.symlink_to(sys.executable)
    environ = {b"RANK": b"1\xff\xfe", b"\x1b[2J": b"x", b"PATH": os.environb[b"PATH"]}
    with subprocess.Popen(
        [str(program), "-S", "-c", "input()", b"\xff\x1b[31m"], env=environ, stdin=subprocess.PIPE
    ) as one:
        time.sleep(0.1)
        seen = process_table().processes[one.pid]
        one.kill()
    assert seen.name == program.name[:15]
    assert seen.parent == os.getpid()
    assert seen.environ["RANK"] == "1\ufffd\ufffd"
    assert seen.arguments[-1] == "\ufffd\x1b[31m"


def test_a_long_environment_and_a_long_command_line_are_cut():
    big = {f"BIG{number}": "x" * 100_000 for number in range(3)}
    command = [sys.executable, "-S", "-c", "print(flush=True); input()", *("y" * 60_000 for _ in range(2))]
    with running(environ={"RANK": "0", **big}, command=command) as process:
        seen = process_table().processes[process.pid]
    assert seen.environ["RANK"] == "0"
    assert sum(len(name) + len(value) + 2 for name, value in seen.environ.items()) <= processes.ENVIRON_BYTES
    assert all(len(value) in (0, 1, 100_000) or name == "PATH" for name, value in seen.environ.items())
    assert sum(map(len, seen.arguments)) <= processes.ARGUMENT_BYTES


def test_a_zombie_has_no_variables():
    process = subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    seen = process_table().processes[process.pid]
    process.wait()
    assert seen.is_zombie
    assert (seen.arguments, seen.environ) == (None, None)


def test_a_process_that_ends_within_the_pass_is_left_out_or_a_zombie(monkeypatch):
    with running() as process:
        read = processes._environ

        def read_and_kill(folder):
            if folder.name == str(process.pid):
                os.kill(process.pid, signal.SIGKILL)
                process.wait()
            return read(folder)

        monkeypatch.setattr(processes, "_environ", read_and_kill)
        table = process_table()
    assert process.pid not in table.processes


def test_another_process_with_the_same_pid_is_not_it():
    with running() as process:
        seen = process_table().processes[process.pid]
        assert is_running(seen)
        assert not is_running(msgspec.structs.replace(seen, started=seen.started - 1))
    assert not is_running(seen)


def test_a_parent_with_a_reused_pid_is_not_followed():
    with running() as process:
        table = process_table()
        own = msgspec.structs.replace(table.processes[os.getpid()], started=table.processes[process.pid].started + 5)
        reused = msgspec.structs.replace(table, processes={**table.processes, own.pid: own})
    assert list(reused.ancestors(reused.processes[process.pid])) == []


@pytest.mark.parametrize(("code", "user"), [(UNDUMPABLE, ALICE), ("", BOB)])
def test_an_environment_that_may_not_be_read(code, user):
    require_root()
    command = [*run_as(ALICE), sys.executable, "-S", "-c", f"{code}\nprint(flush=True)\ninput()", "of alice"]
    with running(command=command, environ={"RANK": "1"}) as process:
        with as_user(user):
            seen = process_table().processes[process.pid]
        as_root = process_table().processes[process.pid]
    assert (seen.environ, seen.executable) == (None, "")
    assert seen.arguments[-1] == "of alice"
    assert seen.user == ALICE
    assert as_root.environ["RANK"] == "1"


def test_another_pid_namespace_shows_both_numbers():
    require_root()
    inner = f"{sys.executable} -S -c 'print(flush=True); input()' inside"
    with running(command=["unshare", "--pid", "--fork", "bash", "-c", f"{inner}; true"]) as process:
        table = process_table()
        [seen] = [child for child in table.descendants(process.pid) if (child.arguments or ("",))[-1] == "inside"]
    assert seen.inner_pid == 2
    assert seen.pid != 2


def _plant(root, pid, *, stat=None, status=None, cmdline=b"python\0", environ=b"RANK=0\0"):
    folder = root / str(pid)
    folder.mkdir(parents=True)
    rest = b"0 0 0 0 -1 " + b"0 " * 13 + b"100 0 0"
    (folder / "stat").write_bytes(b"%d (python) S 1 " % pid + rest if stat is None else stat)
    (folder / "status").write_bytes(b"Name:\tpython\nUid:\t7\t7\t7\t7\nNSpid:\t9\n" if status is None else status)
    for name, content in (("cmdline", cmdline), ("environ", environ)):
        if content is not None:
            (folder / name).write_bytes(content)
    return folder


def test_the_first_of_two_equal_variables_counts(tmp_path):
    _plant(tmp_path, 5, environ=b"RANK=1\0=x\0nothing\0RANK=2\0EMPTY=\0")
    assert process_table(tmp_path).processes[5].environ == {"RANK": "1", "EMPTY": ""}


@pytest.mark.parametrize("stat", [b"", b"5", b"5 (a) S", b"5 (x) S 1" + b"\xff" * 9000, b"(" * 4000])
def test_a_stat_that_no_kernel_writes_is_no_process(tmp_path, stat):
    _plant(tmp_path, 5, stat=stat)
    _plant(tmp_path, 6)
    assert list(process_table(tmp_path).processes) == [6]


def test_a_read_that_blocks_is_abandoned(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "READ_SECONDS", 0.05)
    os.mkfifo(_plant(tmp_path, 5, environ=None) / "environ")
    _plant(tmp_path, 6)
    began = time.monotonic()
    table = process_table(tmp_path)
    assert time.monotonic() - began < patience(5)
    assert table.processes[5].environ is None
    assert table.processes[6].environ == {"RANK": "0"}
    with contextlib.suppress(OSError):
        os.close(os.open(tmp_path / "5" / "environ", os.O_WRONLY | os.O_NONBLOCK))


def test_more_processes_than_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "MOST_PROCESSES", 2)
    for pid in (5, 6, 7):
        _plant(tmp_path, pid)
    table = process_table(tmp_path)
    assert list(table.processes) == [5, 6]
    assert not table.complete
    assert process_table(tmp_path / "absent").processes == {}


def test_processes_of_others_do_not_displace_those_of_this_user(tmp_path, monkeypatch):
    require_root()
    for pid in (5, 6, 7):
        folder = _plant(tmp_path, pid, status=b"Uid:\t%d\t%d\t0\t0\n" % ((7, 7) if pid < 7 else (0, 0)))
        os.chown(folder, 7 if pid < 7 else 0, 0)
    monkeypatch.setattr(processes, "TABLE_BYTES", 8)
    table = process_table(tmp_path)
    assert {pid: seen.environ for pid, seen in table.processes.items()} == {5: None, 6: None, 7: {"RANK": "0"}}
    assert not table.complete
    monkeypatch.setattr(processes, "MOST_PROCESSES", 1)
    assert list(process_table(tmp_path).processes) == [7]


def test_after_the_deadline_variables_are_not_read(tmp_path):
    _plant(tmp_path, 5)
    table = process_table(tmp_path, seconds=0)
    assert table.processes[5].environ is None
    assert not table.complete
