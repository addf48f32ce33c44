"""torch's own debug server in a real job, and servers that are none."""

import http.server
import json
import os
import subprocess
import sys
import threading
import time

import pytest
from click.testing import CliRunner

from doctor.attach import debug_server
from doctor.attach.debug_server import (
    RankReport,
    ServerAddress,
    ask_debug_server,
    read_debug_server,
    server_address,
    with_reports,
)
from doctor.cli.attach import command
from doctor.core.errors import UnusableError
from doctor.core.facts import AttachedProcess, ProcessSample, StackThread
from tests.lab.cases import each_case
from tests.lab.ports import free_port
from tests.lab.speed import patience

JOB = """
import os, sys, time
import torch
import torch.distributed as dist
from torch.distributed.debug import start_debug_server

def train():
    for step in range(4):
        if os.environ["RANK"] == "1" and step == 2:
            evaluate()
        dist.all_reduce(torch.ones(4))

def evaluate():
    print("ready", flush=True)
    time.sleep(300)

if __name__ == "__main__":
    dist.init_process_group("gloo")
    start_debug_server(port=int(sys.argv[1]), start_method="spawn")
    train()
"""


@pytest.fixture
def job(tmp_path):
    """The address of the debug server of two ranks; rank 1 has left the loop."""
    for needed in ("torch.distributed.debug", "tabulate", "jinja2"):
        pytest.importorskip(needed)
    program = tmp_path / "train.py"
    program.write_text(JOB)
    master, port = free_port(), free_port()
    environ = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(master)}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(program), str(port)],
            env={**environ, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        for rank in range(2)
    ]
    try:
        assert ranks[1].stdout.readline() == "ready\n"
        yield ServerAddress("127.0.0.1", port)
    finally:
        for process in ranks:
            os.killpg(process.pid, 9)
            process.communicate()


@pytest.mark.real_time
def test_stacks_and_recorders_of_a_real_job(job):
    until = time.monotonic() + patience(30)
    reports = {}
    while len(reports) < 2 and time.monotonic() < until:
        try:
            reports = read_debug_server(job, patience(5))
        except OSError:  # its process is still starting
            time.sleep(0.3)
    functions = {rank: [frame.function for frame in report.threads[0].frames] for rank, report in reports.items()}
    assert functions[0][:3] == ["all_reduce", "wrapper", "train"]
    assert functions[1][:2] == ["evaluate", "train"]
    assert [reports[rank].recorder.groups[0].enqueued for rank in (0, 1)] == [3, 2]


@pytest.fixture
def serve():
    """Starts a server that answers every request with this status and body; its address."""
    servers = []

    def start(body, status=200):
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(status)
                self.send_header("Location", "http://127.0.0.1:1/")
                self.end_headers()
                with_body = body() if callable(body) else [body]
                try:
                    for part in with_body:
                        self.wfile.write(part)
                except OSError:
                    pass

            def log_message(self, *_):
                pass

        servers.append(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return ServerAddress(*servers[-1].server_address)

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def page(rank, text):
    return f"<h2>Rank {rank}: http://node:1/handler/x?</h2>\n\n<pre>{text}</pre>\n".encode()


def test_hostile_texts_are_bounded_and_masked(serve):
    secret = "hf_" + "Ab1" * 12
    frames = f'  File "/x/{secret}\x1b[2J.py", line 7 in f\x1b[31m{"y" * 5000}\n' * 3000
    address = serve(page(0, f"Thread 0x1 (most recent call first):\n{frames}") + b"<h2>Rank 1: <pre>" * 1000)
    reports = read_debug_server(address, patience(5))
    assert list(reports) == [0]
    text = repr(reports)
    assert secret not in text
    assert "\\x1b" not in text
    assert len(text) < 60_000


@each_case("body", ["[" * 100_000, "{" * 100_000, json.dumps({"entries": 7}), "7", "not JSON"])
def test_recorder_that_is_none(body):
    assert debug_server._recorder(body) is None


def test_redirections_and_errors_are_not_followed(serve):
    for status in (302, 404, 500):
        with pytest.raises(OSError, match=str(status)):
            read_debug_server(serve(page(0, ""), status), patience(5))


def test_endless_page_ends_at_the_deadline(serve):
    def endless():
        while True:
            time.sleep(0.01)
            yield b"x" * 1000

    begin = time.monotonic()
    with pytest.raises(OSError):
        read_debug_server(serve(endless), 0.5)
    assert time.monotonic() - begin < patience(5)


def test_large_page_is_ended(serve, monkeypatch):
    monkeypatch.setattr(debug_server, "LARGEST", 1 << 16)
    with pytest.raises(OSError, match="did not end"):
        read_debug_server(serve(b"x" * (1 << 20)), patience(5))


def test_nobody_listens():
    with pytest.raises(OSError):
        read_debug_server(ServerAddress("127.0.0.1", free_port()), 1.0)


@each_case(
    "text, address",
    [
        ("node1", ("node1", 25999)),
        ("node1:26000", ("node1", 26000)),
        ("http://node1:26000/", ("node1", 26000)),
        ("[::1]:5", ("::1", 5)),
    ],
)
def test_addresses(text, address):
    assert server_address(text) == address


@each_case(
    "text", ["", "https://node1", "file:///etc/passwd", "node1:99999", "node1:x", "http://u@node1", "node1/stacks"]
)
def test_what_is_no_address(text):
    with pytest.raises(UnusableError, match="HOST:PORT"):
        server_address(text)


def test_server_is_asked_only_by_its_address(serve):
    refused = AttachedProcess(1, 1.0, rank=0, refused="no")
    assert ask_debug_server([refused], "") == ((refused,), ())
    host, port = serve(page(0, 'Thread 0x1 (most recent call first):\n  File "/x/train.py", line 7 in train\n'))
    (found,), notes = ask_debug_server([refused], f"{host}:{port}", patience(5))
    assert ([frame.function for frame in found.samples[0].threads[0].frames], notes) == (["train"], ())
    _, (note,) = ask_debug_server([refused], "{}:{}".format(*serve(b"")), patience(5))
    assert "reports no rank" in note
    processes, (note,) = ask_debug_server([refused], f"127.0.0.1:{free_port()}", patience(5))
    assert processes == (refused,)
    assert "does not respond (Connection refused)" in note


def test_command_refuses_what_is_no_address():
    done = CliRunner().invoke(command, ["--debug-server", "https://node1"])
    assert isinstance(done.exception, UnusableError)


def test_reports_fill_what_could_not_be_read():
    thread, other = StackThread(name="a"), StackThread(name="b")
    refused = AttachedProcess(
        1, 1.0, rank=0, refused="no", remedy="so", samples=(ProcessSample(1.0), ProcessSample(2.0))
    )
    read = AttachedProcess(2, 1.0, rank=1, stack_source="py-spy", samples=(ProcessSample(1.0, threads=(other,)),))
    ended = AttachedProcess(3, 1.0, rank=2, ended="ended")
    agent = AttachedProcess(4, 1.0, role="agent")
    reports = {rank: RankReport((thread,)) for rank in range(3)}
    first, second, third, fourth = with_reports([refused, read, ended, agent], reports)
    assert [one.threads for one in first.samples] == [(), (thread,)]
    assert (first.stack_source, first.refused, first.remedy) == ("debug-server", "", "")
    assert (second.stack_source, second.samples) == ("py-spy", read.samples)
    assert (third, fourth) == (ended, agent)
