"""What a thread waits for: real locks, pipes, sockets and queues, held by real processes."""

import asyncio
import contextlib
import fcntl
import http.server
import multiprocessing
import os
import platform
import queue
import socket
import subprocess
import sys
import termios
import threading
import time

import pytest

from doctor.core.facts.telemetry import A_SLEEP, ENDLESS, FAR, IDLE, OWN_LOCK, PROCESS_EVENT, WHOSE_THREAD, WITH_TIMEOUT
from doctor.monitor.telemetry.rank_telemetry import RankTelemetry
from doctor.monitor.telemetry.stacks.blocking_call import blocking_call
from doctor.monitor.telemetry.stacks.live_stacks import thread_stack
from tests.lab.speed import patience

HOLDER = "import fcntl, sys, time; f = open(sys.argv[1], 'w'); fcntl.flock(f, 2); print(1, flush=True); time.sleep(99)"

pytestmark = pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="other system calls")


def waits(call):
    """What a thread that makes ``call`` waits for."""

    def quietly():
        with contextlib.suppress(OSError):  # its other end is closed at the end of the test
            call()

    thread = threading.Thread(target=quietly, daemon=True)
    thread.start()
    until, found = time.monotonic() + patience(10), ""
    while not found and time.monotonic() < until:
        found = blocking_call(thread.native_id, thread_stack(thread.ident))
    return found


def test_a_file_lock_and_its_holder(tmp_path):
    path = tmp_path / "a.lock"
    with (
        subprocess.Popen([sys.executable, "-c", HOLDER, path], stdout=subprocess.PIPE) as holder,
        path.open("w") as file,
    ):
        holder.stdout.readline()
        words = waits(lambda: fcntl.flock(file, fcntl.LOCK_EX))
        holder.kill()
    assert words.startswith(f"a lock on {path}, held by PID {holder.pid} (")


@pytest.mark.parametrize(
    ("file", "function", "words"),
    [
        ("_utilities.py", "_block", "a connection to a server (gRPC)"),
        ("_channel.py", "_blocking", "data from a server (gRPC)"),
    ],
)
def test_a_server_of_grpc(file, function, words):
    """Its threads in native code bring about what the thread waits for."""
    names = {"event": threading.Event()}
    exec(compile(f"def {function}(): event.wait()", f"/site-packages/grpc/{file}", "exec"), names)
    assert waits(names[function]) == words
    names["event"].set()


def test_a_terminal_that_takes_no_output():
    reader, terminal = os.openpty()
    termios.tcflow(terminal, termios.TCOOFF)
    words = waits(lambda: os.write(terminal, b"loss 0.5"))
    name = os.ttyname(terminal)
    termios.tcflow(terminal, termios.TCOON)
    os.close(reader)
    assert words == f"room in a terminal, whose output is stopped (Ctrl-S) or not read ({name})"


def test_a_pipe_and_its_other_end():
    with subprocess.Popen(["sleep", "99"], stdin=subprocess.PIPE) as reader:
        words = waits(lambda: os.write(reader.stdin.fileno(), bytes(1 << 20)))
        reader.kill()
    assert words == f"room in a pipe, which PID {reader.pid} (sleep) has open too"


def test_a_named_pipe_that_nobody_writes_to(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    words = waits(path.read_bytes)
    with path.open("wb"):
        pass
    assert words == "the other end of a named pipe"


async def waits_in_vain():
    """Wait for an event of asyncio that nobody sets."""
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(asyncio.Event().wait(), 5)


def test_an_event_loop_whose_tasks_wait():
    thread = threading.Thread(target=asyncio.run, args=(waits_in_vain(),), daemon=True)
    thread.start()
    until, found = time.monotonic() + 4, ""
    while "asyncio" not in found and time.monotonic() < until:
        found = blocking_call(thread.native_id, thread_stack(thread.ident))
    assert found == "one of several files or sockets (select, in an event loop of asyncio)"


def test_a_connection_to_a_socket_of_this_host(tmp_path):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "engine"))
        server.listen()
        assert waits(server.accept) == "a connection to a socket of this host"


def test_a_socket_and_its_peer():
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        assert waits(lambda: client.recv(1)) == f"data from 127.0.0.1:{server.getsockname()[1]}"
        timed = socket.create_connection(server.getsockname(), timeout=60)
        assert waits(lambda: timed.recv(1)) == f"data from 127.0.0.1:{server.getsockname()[1]}{WITH_TIMEOUT}"


def test_a_server_that_serves_without_end():
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        assert waits(server.serve_forever) == "a request to its own server (serve_forever)"
        server.shutdown()
        port = server.server_address[1]
        assert waits(server.handle_request) == f"a connection to its port {port}"
        socket.create_connection(server.server_address).close()


def test_a_queue_and_a_lock():
    lock = threading.Lock()
    lock.acquire()
    assert waits(queue.Queue().get) == "an item of a queue (queue.get)"
    assert waits(lock.acquire).startswith("a lock of its own process")
    lock.release()


def test_a_counter_of_events_that_the_kernel_keeps():
    counter = os.eventfd(0)
    assert waits(lambda: os.eventfd_read(counter)) == "data from anon_inode:[eventfd]"
    os.eventfd_write(counter, 1)


def test_the_end_of_a_process_until_a_timeout():
    with subprocess.Popen(["sleep", "99"]) as child:
        words = waits(lambda: child.wait(60))
        child.kill()
    assert words == "the end of a child process"


@pytest.mark.parametrize("make", ["Event", "Barrier"])
def test_what_another_process_brings_about_is_no_lock_of_this_one(make):
    processes = multiprocessing.get_context("fork")
    awaited = processes.Barrier(2) if make == "Barrier" else processes.Event()
    thread = threading.Thread(target=awaited.wait, daemon=True)
    thread.start()
    until, found = time.monotonic() + patience(10), ""
    while not found.startswith(PROCESS_EVENT) and time.monotonic() < until:
        found = blocking_call(thread.native_id, thread_stack(thread.ident))
    awaited.wait() if make == "Barrier" else awaited.set()
    assert found == f"{PROCESS_EVENT} (multiprocessing)"


def test_transfers_between_descriptors(tmp_path):
    empty, _, _, full = *os.pipe(), *os.pipe()
    assert waits(lambda: os.splice(empty, full, 100)) == "data from a pipe, or room in one (splice)"
    (tmp_path / "shard").write_bytes(bytes(8 << 20))
    sends, _ = pair = socket.socketpair()
    shard = os.open(tmp_path / "shard", os.O_RDONLY)
    assert waits(lambda: [os.sendfile(sends.fileno(), shard, None, 8 << 20) for _ in pair]).startswith(
        "room to send to"
    )


@pytest.mark.skipif(sys.version_info < (3, 11), reason="sleeps in select")
@pytest.mark.parametrize(("seconds", "words"), [(1000, A_SLEEP + FAR), (30, A_SLEEP)])
def test_a_sleep_and_whether_it_is_a_long_one(seconds, words):
    assert waits(lambda: time.sleep(seconds)) == words


WAITS_FOR_AN_EVENT = """
import os, queue, sys, threading, time
from doctor.monitor.telemetry.rank_telemetry import RankTelemetry
from doctor.monitor.telemetry.stacks.blocking_call import blocking_call
from doctor.monitor.telemetry.stacks.endless_waits import shown_by_threads
from doctor.monitor.telemetry.stacks.live_stacks import thread_stack
main = threading.main_thread()
def look():
    time.sleep(0.5)
    words = blocking_call(main.native_id, thread_stack(main.ident))
    print(words + shown_by_threads(main.ident, words), flush=True)
    os._exit(0)
"""
OTHER = "threading.Thread(target={}).start()\n"
EVENT = "an event or a condition (threading)"


@pytest.mark.parametrize(
    ("others", "own", "expected"),
    [
        ("", "threading.Event().wait()", ENDLESS),
        ("", "threading.Event().wait(60)", IDLE),
        (OTHER.format("lambda: os.read(os.pipe()[0], 1)"), "threading.Event().wait()", IDLE),
        (OTHER.format("lambda: time.sleep(60)"), "threading.Event().wait()", IDLE),
        (OTHER.format("lambda: [sum(range(9999)) for _ in range(99999)]"), "threading.Event().wait()", ""),
        ("threading.Timer(60, print).start()\n", "threading.Event().wait()", IDLE),
        (OTHER.format("queue.Queue().get"), "threading.Event().wait()", ENDLESS),
        (OTHER.format("lambda: os.write(os.pipe()[1], bytes(1 << 20))"), "threading.Event().wait()", ENDLESS),
    ],
    ids=[
        "alone",
        "until a timeout",
        "a reader",
        "a sleeper",
        "one that computes",
        "a timer",
        "a waiter",
        "a writer of a full pipe",
    ],
)
def test_an_event_that_another_thread_may_set(others, own, expected):
    program = f"{WAITS_FOR_AN_EVENT}{others}threading.Thread(target=look).start()\n{own}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=patience(30))
    assert done.stdout.strip() == EVENT + expected, done.stderr


@pytest.mark.parametrize(
    ("module", "expected"), [("time.sleep(60)", IDLE), ("[sum(range(9999)) for _ in range(99999)]", "")]
)
def test_an_import_of_what_another_thread_imports(module, expected, tmp_path):
    (tmp_path / "imported_twice.py").write_text(f"import time\n{module}\n")
    imports = OTHER.format("lambda: __import__('imported_twice')") + "time.sleep(0.2)\n"
    program = f"{WAITS_FOR_AN_EVENT}threading.Thread(target=look).start()\n{imports}import imported_twice"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), *sys.path))},
        capture_output=True,
        text=True,
        timeout=patience(30),
    )
    words = done.stdout.strip()
    assert words.startswith(OWN_LOCK), done.stderr
    assert words.endswith(IDLE) == bool(expected)


FULL_PIPE = "os.write(os.pipe()[1], bytes(1 << 20))"
POOL = "from concurrent.futures import ThreadPoolExecutor\npool = ThreadPoolExecutor(2)\n"
SLEEPS = OTHER.format("lambda: time.sleep(60)")


@pytest.mark.parametrize(
    ("others", "own", "expected"),
    [
        (SLEEPS + POOL, f"pool.submit(lambda: {FULL_PIPE}).result()", "a future (Future.result)"),
        (SLEEPS, f"t = threading.Thread(target=lambda: {FULL_PIPE}); t.start(); t.join()", "the end of a thread"),
    ],
    ids=["a future", "the end of a thread"],
)
def test_what_the_thread_waits_for_that_a_thread_waits_for(others, own, expected):
    program = f"{WAITS_FOR_AN_EVENT}{others}threading.Thread(target=look).start()\n{own}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=patience(30))
    words, _, awaited = done.stdout.strip().partition(WHOSE_THREAD)
    assert words.startswith(expected), done.stderr
    assert awaited.startswith("room in a pipe")


QUEUES = "import queue\nfirst, second = queue.Queue(), queue.Queue(1)\nsecond.put(0)\n"
FILLS = "def fills(items, wait):\n    wait()\n    items.put(1)\n"
STARTS = "threading.Thread(target=fills, args=({}), daemon=True).start()\n"


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        (STARTS.format(f"first, lambda: {FULL_PIPE}"), ["room in a pipe"]),
        (STARTS.format("first, lambda: second.put(1)"), ["room in a queue (queue.put)"]),
        (
            STARTS.format("first, queue.Queue().get") + STARTS.format("queue.Queue(), second.get"),
            ["an item of a queue (queue.get)"],
        ),
        (STARTS.format(f"first, lambda: {FULL_PIPE}") * 2, []),
        (STARTS.format("queue.Queue(), queue.Queue().get"), []),
    ],
    ids=["a pipe", "another queue", "beside other queues", "one of two threads", "of another queue"],
)
def test_what_the_thread_waits_for_that_fills_a_queue(others, expected):
    words = words_of(QUEUES + FILLS + others, "first.get()")
    first, *awaited = words.split(WHOSE_THREAD)
    assert first.removesuffix(ENDLESS).removesuffix(IDLE) == "an item of a queue (queue.get)"
    assert [one.partition(",")[0] for one in awaited] == expected


@pytest.mark.parametrize(
    "own",
    [
        "pool.submit(lambda: [1 for zero in iter(int, 1) if zero]).result()",
        f"pool.submit(lambda: {FULL_PIPE}).result(60)",
        f"pool.submit(lambda: {FULL_PIPE}); pool.submit(time.sleep, 60).result(60)",
    ],
    ids=["computes", "until a timeout", "another future"],
)
def test_a_thread_that_may_end_is_not_said_to_wait_in_vain(own):
    program = f"{WAITS_FOR_AN_EVENT}{POOL}threading.Thread(target=look).start()\n{own}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=patience(30))
    assert done.stdout.strip().removesuffix(IDLE) == "a future (Future.result)", done.stderr


ONE = "from concurrent.futures import ThreadPoolExecutor\npool, other = ThreadPoolExecutor(1), ThreadPoolExecutor(1)\n"
NESTED = "pool.submit(lambda: pool.submit(os.getpid).result()).result()"
CROSSED = "pool.submit(lambda: other.submit(lambda: pool.submit(os.getpid).result()).result()).result()"
FUTURE = "a future (Future.result)"
"""What waits while :data:`SLEEPS` might set it, so that only what the threads of the pools do is evidence."""


def words_of(others, own):
    program = f"{WAITS_FOR_AN_EVENT}{SLEEPS}{others}threading.Thread(target=look).start()\n{own}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=patience(30))
    assert done.stdout.strip(), done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("others", "own", "threads"),
    [
        (ONE, NESTED, 1),
        (ONE, CROSSED, 2),
        (ONE + "other.submit(os.getpid)\n", NESTED, 1),
        (ONE + "other.submit(time.sleep, 60)\n", NESTED, 1),
        (ONE, f"first = pool.submit(lambda: {NESTED})\nfuture = pool.submit(os.getpid)\nfuture.result()", 0),
        (POOL, f"[f.result() for f in [pool.submit(lambda: (time.sleep(0.2), {NESTED})) for _ in range(2)]]", 1),
        (
            "a = threading.Thread(target=lambda: (time.sleep(0.1), b.join()))\n",
            "b = threading.Thread(target=lambda: a.join()); a.start(); b.start(); a.join()",
            2,
        ),
    ],
    ids=["its own pool", "two pools", "an idle pool", "a busy pool", "queued", "two threads", "two that join"],
)
def test_a_future_that_is_queued_behind_those_who_wait_for_it(others, own, threads):
    words = words_of(others, own)
    assert words.endswith(ENDLESS)
    assert words.count(WHOSE_THREAD) == threads


@pytest.mark.parametrize(
    ("others", "own"),
    [
        (POOL, NESTED.replace("os.getpid", "time.sleep, 60")),  # the other thread of the pool works
        (ONE, NESTED.replace("result())", "result(60))")),
        (ONE + "other.submit(time.sleep, 60); other.submit(time.sleep, 60)\n", NESTED),
        (ONE, "pool.submit(threading.Event().wait); pool.submit(os.getpid).result()"),
        (ONE + "from concurrent.futures import Future\n", "pool.submit(lambda: Future().result()).result()"),
        (ONE + "from concurrent.futures import Future\n", f"pool.submit(lambda: {NESTED}); Future().result()"),
    ],
    ids=["a second thread", "until a timeout", "another queue", "an event", "set by hand", "beside a deadlock"],
)
def test_a_future_that_may_be_done(others, own):
    assert ENDLESS not in words_of(others, own)


@pytest.mark.parametrize(
    ("others", "own", "is_endless"),
    [
        ("", "get()", True),
        ("threading.Thread(target=threading.Event().wait).start()\n", "get()", True),
        ("threading.Thread(target=lambda: [0 for zero in iter(int, 1) if zero]).start()\n", "get()", False),
        ("", "get(timeout=60)", False),
    ],
    ids=["alone", "beside a thread that waits", "beside one that computes", "until a timeout"],
)
def test_a_queue_that_no_thread_fills(others, own, is_endless):
    program = f"import queue\n{WAITS_FOR_AN_EVENT}{others}threading.Thread(target=look).start()\nqueue.Queue().{own}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=patience(30))
    assert done.stdout.startswith("an item of a queue (queue.get)"), done.stderr
    assert done.stdout.strip().endswith(ENDLESS) == is_endless


def test_what_a_stalled_rank_waits_for_is_part_of_its_position():
    lock = threading.Lock()
    lock.acquire()
    thread = threading.Thread(target=lock.acquire)
    thread.start()
    telemetry = RankTelemetry(hang_after=0.05)
    telemetry.progress.follow(thread.ident, thread.native_id)
    time.sleep(0.2)
    progress = telemetry.position()["progress"]
    lock.release()
    thread.join()
    assert progress.state == "stalled"
    assert progress.blocked.startswith("a lock of its own process")
