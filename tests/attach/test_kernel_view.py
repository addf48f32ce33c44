"""The kernel's view of real processes, and of trees that no kernel writes."""

import os
import socket

from doctor.attach.kernel_view import SocketQueues, read_kernel_view
from doctor.core.facts import KernelView
from tests.attach.readable import FORBIDS_TRACING, SLEEPER, started, status_of, wait_until
from tests.lab.users import ALICE, BOB, as_user, require_root, run_as

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
