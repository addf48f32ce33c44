"""The kernel's view of real processes, and of trees that no kernel writes."""

import os
import shutil
import signal
import socket
import subprocess

import msgspec
import pytest

from doctor.analysis.process_movement import blocked_call
from doctor.collectors.host.kernel_view import SocketQueues, read_kernel_view
from doctor.core.facts import KernelView, ProcessSample
from tests.attach.readable import FORBIDS_TRACING, SLEEPER, started, status_of, wait_until
from tests.lab.users import ALICE, BOB, as_user, require_root, run_as

READER = """
import os, sys
print("ready", flush=True)
with open(sys.argv[1], "rb", buffering=0) as stream:
    stream.read(int(sys.argv[2]))
    stream.read(100)
"""
RECEIVER = """
import socket, sys, time
connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
print("ready", flush=True)
time.sleep(300)
"""


def test_sleeping_process():
    with started(SLEEPER) as target:
        wait_until(lambda: status_of(target.pid)["State"][0] == "S")
        view = read_kernel_view(target.pid, SocketQueues())
    assert view.state == "S"
    assert "sleep" in view.wchan
    assert view.syscall is not None
    assert 0 <= view.main_cpu <= view.cpu < 60
    assert view.switches > 0
    assert view.transferred > 0
    assert view.queued == 0


def test_busy_process_uses_cpu_and_is_in_no_system_call():
    with started("print('ready', flush=True)\nwhile True: pass") as target:
        before = read_kernel_view(target.pid, SocketQueues())
        wait_until(lambda: read_kernel_view(target.pid, SocketQueues()).cpu > before.cpu + 0.05)
        view = read_kernel_view(target.pid, SocketQueues())
    assert view.main_cpu == view.cpu
    assert (view.state, view.wchan, view.syscall) == ("R", "", None)


def test_bytes_that_the_process_has_not_read():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with started(RECEIVER, arguments=[str(port)]) as target:
            connection, _ = server.accept()
            connection.sendall(b"x" * 12345)
            wait_until(lambda: SocketQueues().of_process(target.pid) == 12345)
            connection.close()


def test_process_of_another_user_shows_less():
    with started(before=run_as(ALICE)) as target, as_user(BOB):
        view = read_kernel_view(target.pid, SocketQueues())
    assert view.state == "S"
    assert view.cpu is not None
    assert (view.syscall, view.transferred, view.queued) == (None, None, None)


def test_process_that_forbids_tracing_shows_less():
    with started(FORBIDS_TRACING + SLEEPER, before=run_as(ALICE)) as target, as_user(ALICE):
        view = read_kernel_view(target.pid, SocketQueues())
    assert (view.state, view.syscall, view.transferred, view.queued) == ("S", None, None, None)


def test_process_that_is_gone():
    with started() as target:
        pass
    wait_until(lambda: not os.path.exists(f"/proc/{target.pid}"))
    assert read_kernel_view(target.pid, SocketQueues()) == KernelView()


def test_name_of_a_process_does_not_shift_its_fields():
    require_root()
    program = f"open('/proc/self/comm', 'w').write(') Z 1 (')\n{SLEEPER}"
    with started(program) as target:
        assert read_kernel_view(target.pid, SocketQueues()).state in "RS"


def test_texts_of_another_kernel_are_left_out(tmp_path):
    main = tmp_path / "7" / "task" / "7"
    main.mkdir(parents=True)
    (tmp_path / "7" / "fd").mkdir()
    for folder in (main, main.parents[1]):
        (folder / "stat").write_text("7 (x) S " + "many " * 30)
    (main / "wchan").write_text("\x1b[2Jhidden")
    (main / "syscall").write_text("-1 0x7ffd 0x0")
    (main / "status").write_text("voluntary_ctxt_switches:\tmany\n")
    (tmp_path / "7" / "io").write_text("rchar: 1\nwchar: " + "9" * 50)
    assert read_kernel_view(7, SocketQueues(tmp_path), tmp_path) == KernelView(state="S", queued=0)


def test_file_that_a_system_call_waits_for(tmp_path):
    pipe = tmp_path / "part-7"
    os.mkfifo(pipe)
    with started(READER, arguments=[str(pipe), "3"]) as target, pipe.open("wb", buffering=0) as stream:
        stream.write(b"abc")
        wait_until(lambda: (view := read_kernel_view(target.pid, SocketQueues())).file and view.state == "S")
        view = read_kernel_view(target.pid, SocketQueues())
    assert view.file.path == str(pipe)
    assert view.file.filesystem
    assert view.file in view.files


def test_position_in_an_open_file_and_a_file_that_is_gone(tmp_path):
    part = tmp_path / "part-7"
    part.write_bytes(b"x" * 4096)
    program = "import sys\nstream = open(sys.argv[1], 'rb', buffering=0)\nstream.seek(1024)\n" + SLEEPER
    with started(program, arguments=[str(part)]) as target:
        [found] = [one for one in read_kernel_view(target.pid, SocketQueues()).files if one.path == str(part)]
        part.unlink()
        gone = [one.path for one in read_kernel_view(target.pid, SocketQueues()).files]
    assert found.position == 1024
    assert f"{part} (deleted)" in gone


def test_kernel_stack_is_read_as_root_alone():
    require_root()
    with started(before=run_as(ALICE)) as target:
        stack = read_kernel_view(target.pid, SocketQueues()).stack
        with as_user(ALICE):
            hidden = read_kernel_view(target.pid, SocketQueues()).stack
    assert any("sleep" in function for function in stack)
    assert hidden == ()


READS_WHEN_TOLD = """
import os, sys
with open(sys.argv[1], "rb", buffering=0) as stream:
    print("ready", flush=True)
    while not os.path.exists(sys.argv[2]):
        pass
    stream.read(10)
"""


def test_file_system_that_does_not_answer(tmp_path):
    """A mount of FUSE whose server is stopped: a read blocks in the kernel."""
    require_root()
    bindfs = shutil.which("bindfs")
    if bindfs is None or not os.path.exists("/dev/fuse"):
        pytest.skip("needs bindfs and /dev/fuse")
    source, mount, told = (tmp_path / name for name in ("source", "mount", "told"))
    source.mkdir()
    mount.mkdir()
    (source / "part-7").write_bytes(b"x" * 100_000)
    server = subprocess.Popen([bindfs, "-f", "-o", "direct_io", source, mount])
    try:
        wait_until(lambda: os.path.ismount(mount))
        with started(READS_WHEN_TOLD, arguments=[str(mount / "part-7"), str(told)]) as target:
            server.send_signal(signal.SIGSTOP)
            told.touch()
            wait_until(lambda: read_kernel_view(target.pid, SocketQueues()).file is not None)
            samples = [ProcessSample(at, read_kernel_view(target.pid, SocketQueues())) for at in (0.0, 1.0)]
            server.send_signal(signal.SIGCONT)
    finally:
        server.kill()
        subprocess.run(["umount", "-l", mount], check=False)
        server.wait()
    assert any("fuse" in function for function in samples[0].kernel.stack)
    function, _, file = blocked_call(msgspec.structs.replace(target, samples=tuple(samples))).partition(", ")
    assert function in samples[0].kernel.stack
    assert file.startswith(f"on {mount}/part-7 (fuse")
