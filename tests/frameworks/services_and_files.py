"""Plants of ``planted.py``: ranks that wait for services, terminals, files and keys of a store."""

import asyncio
import contextlib
import datetime
import fcntl
import http.client
import importlib
import os
import signal
import socket
import sqlite3
import ssl
import subprocess
import sys
import termios
import time
import urllib.request

import torch
import torch.distributed as dist
from moments import LONG, every_step, once
from shared_helpers import HOLDER, SERVER, STATES, asks, full_server, started

FULL = """
import socket, time
with socket.create_server(("127.0.0.1", 0)) as server:
    print(server.getsockname()[1], flush=True)
    connection = server.accept()
    time.sleep(1000)
"""
"""A store that accepts an upload and does not read it."""
JUDGE = """
import http.server, sys
left = int(sys.argv[1])
class Judge(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        global left
        left -= 1
        self.send_response(429 if left >= 0 else 200)
        self.send_header("Retry-After", sys.argv[2])
        self.end_headers()
    def log_message(self, *_):
        pass
server = http.server.HTTPServer(("127.0.0.1", 0), Judge)
print(server.server_port, flush=True)
server.serve_forever()
"""
"""A server that judges answers and asks a client, for its first requests, to come back after some seconds."""
TRICKLE = """
import http.server, time
class Shards(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "1000000")
        self.end_headers()
        while True:
            self.wfile.write(b"x")
            self.wfile.flush()
            time.sleep(0.5)
    def log_message(self, *_):
        pass
server = http.server.HTTPServer(("127.0.0.1", 0), Shards)
print(server.server_port, flush=True)
server.serve_forever()
"""
"""A store that sends two bytes a second."""
SENDS_PINGS = """
import http.server, time
class Events(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        while True:
            self.wfile.write(b": ping\\n\\n")
            time.sleep(1)
    def log_message(self, *_):
        pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Events)
print(server.server_port, flush=True)
server.serve_forever()
"""
"""A server of generated texts that keeps the connection alive, and never sends a text."""


class ServicesAndFiles:
    """Methods of :class:`planted.Plant`, which get the model unless they are called elsewhere."""

    @once
    def terminal_input(self, model):
        """Ask the user at a terminal."""
        use_terminal()
        input("Overwrite the checkpoint? [y/N] ")

    @once
    def debugger(self, model):
        """Stop at a breakpoint."""
        use_terminal()
        breakpoint()

    @once
    def backoff(self, model, refused=1_000_000):
        """Send a metric to a tracking server that is not available, and wait longer after each attempt."""
        with served(refused) as address:
            for attempt in range(1000):
                try:
                    urllib.request.urlopen(address, b"loss=0.5", timeout=5).close()
                    return
                except urllib.error.HTTPError:
                    time.sleep(min(0.5 * 2**attempt, 30))

    @once
    def stdout_full(self, model):
        """Print to a collector of logs that has stopped to read."""
        self.kept.extend(os.pipe())
        os.dup2(self.kept[1], 1)
        for number in range(100_000):
            print(f"sample {number}: loss 0.5", flush=True)

    @once
    def sqlite(self, model):
        """Write to a database that another process keeps locked."""
        with (
            started(HOLDER, str(self.folder / "runs.db"), "1000"),
            sqlite3.connect(self.folder / "runs.db", 1000) as base,
        ):
            base.execute("CREATE TABLE losses (value REAL)")

    @once
    def baton(self, model):
        """Wait for the lock file of a build that was killed."""
        from torch.utils.file_baton import FileBaton

        (self.folder / "lock").touch()
        FileBaton(str(self.folder / "lock")).wait()

    @once
    def xoff(self, model):
        """Print to a terminal whose output was stopped, as by Ctrl-S."""
        self.kept.extend(os.openpty())
        termios.tcflow(self.kept[1], termios.TCOOFF)
        os.dup2(self.kept[1], 1)
        print("loss 0.5", flush=True)

    @once
    def store_key(self, model):
        """Wait for a key that no rank sets in the store (https://github.com/pytorch/pytorch/issues/67972)."""
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        store.wait(["evaluated"], datetime.timedelta(seconds=LONG))

    def begins(self):
        """Open a run on a tracking server that does not answer, before the process group is there.

        https://github.com/leggedrobotics/rsl_rl/issues/150
        """
        if self.name == "tracks_before_group" and self.here:
            server = started(SERVER, "0", "1000")
            self.note()
            urllib.request.urlopen(f"http://127.0.0.1:{server.first_line}", b"run=1").read()

    @once
    def marker(self, model):
        """Wait for a file that another host has written to its own disk (https://github.com/allenai/OLMo/pull/235)."""
        (self.folder / "node-0").mkdir()
        (self.folder / "node-0" / "index.done").touch()
        while not (self.folder / "node-1" / "index.done").exists():
            time.sleep(1)

    def prepares(self):
        """Join at a port that nobody listens at, or lack a module that the other hosts have.

        https://github.com/pytorch/pytorch/issues/76069, https://github.com/deepspeedai/DeepSpeed/issues/3489
        """
        if self.name == "wrong_port" and self.here:
            with socket.create_server(("127.0.0.1", 0)) as server:
                os.environ["MASTER_PORT"] = str(server.getsockname()[1])
            self.note()
        if self.name == "module_missing" and self.here:
            self.note()
            importlib.import_module("flash_attn_of_this_cluster")

    @once
    def upload_stalls(self, model):
        """Upload a checkpoint to a store that does not read it (https://github.com/huggingface/huggingface_hub/issues/1502)."""
        store = http.client.HTTPConnection("127.0.0.1", int(started(FULL).first_line))
        store.request("PUT", "/checkpoint-20.pt", bytes(256 << 20))
        store.getresponse()

    @once
    def grpc_wait(self, model):
        """Wait for a server of embeddings that is not there (https://github.com/sql-machine-learning/elasticdl/issues/1814)."""
        import grpc

        grpc.channel_ready_future(grpc.insecure_channel("127.0.0.1:1")).result()

    @every_step
    def wandb_stuck(self, model):
        """Finish a run of wandb whose service hangs (https://github.com/wandb/wandb/issues/4929)."""
        if self.strikes("wandb_stuck"):
            import psutil

            self.note()
            for child in psutil.Process().children():
                if "wandb" in child.name():
                    child.send_signal(signal.SIGSTOP)
            self.kept[0].finish()

    @once
    def waits_for_server(self, model):
        """Wait for the server of generated texts to join a group for weights, which it never does.

        https://github.com/huggingface/trl/issues/3736, https://github.com/huggingface/trl/issues/4538
        """
        dist.TCPStore("127.0.0.1", 0, 2, is_master=True, timeout=datetime.timedelta(seconds=1000))

    @once
    def judge_silent(self, model):
        """Have answers judged by a server that does not answer, without a limit of time.

        https://github.com/NorthlandPositronics/Cogtrix/issues/1122, https://github.com/radixark/miles/pull/3221
        """
        port = int(started(SERVER, "0", "1000").first_line)

        async def judged(answer):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(f"POST /judge HTTP/1.1\r\nContent-Length: 2\r\n\r\n{answer:2}".encode())
            return await reader.read()

        async def rewards():
            return await asyncio.gather(*map(judged, range(4)))

        asyncio.run(rewards())

    @once
    def rate_limited(self, model):
        """Wait as long as a server asks that limits requests (https://github.com/mims-harvard/ToolUniverse/pull/217)."""
        self.asks_judge(1, 3600)

    def asks_judge(self, refused, seconds):
        """Ask a server, which refuses so many requests for some seconds each."""
        judge = started(JUDGE, str(refused), str(seconds))
        while True:
            connection = http.client.HTTPConnection("127.0.0.1", int(judge.first_line), timeout=10)
            connection.request("POST", "/judge", b"{}")
            answer = connection.getresponse()
            if answer.status != 429:
                break
            time.sleep(float(answer.headers["Retry-After"]))
        judge.kill()

    @once
    def trickles(self, model):
        """Download from a store that sends few bytes, but in time (https://github.com/linkedpipes/etl/issues/507)."""
        store = started(TRICKLE)
        urllib.request.urlopen(f"http://127.0.0.1:{store.first_line}", timeout=10).read()

    @once
    def polls_failed(self, model):
        """Ask for the state of an evaluation until it is done, which has failed.

        https://github.com/symfony/ai/pull/2082
        """
        jobs = started(STATES)
        while asks(jobs, "/evaluations/7")["state"] != "succeeded":
            time.sleep(0.5)

    @once
    def pages_repeat(self, model):
        """List the files of a store, whose next page is the same one again and again.

        https://github.com/Azure/azure-sdk-for-python/issues/30337
        """
        store, files, token = started(STATES), [], "start"
        while token:
            page = asks(store, f"/files?after={token}")
            files += page["files"]
            token = page["next"]

    @once
    def handshake_silent(self, model):
        """Begin an encrypted connection with a store that does not answer (https://github.com/celery/py-amqp/pull/398)."""
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as plain:
            ssl.create_default_context().wrap_socket(plain, server_hostname="localhost")

    @once
    def pool_drained(self, model):
        """Ask twice through a pool of one connection, without reading the answer.

        https://github.com/urllib3/urllib3/pull/2557
        """
        import urllib3

        store = urllib3.HTTPConnectionPool("127.0.0.1", int(started(STATES).first_line), maxsize=1, block=True)
        answers = [store.request("GET", f"/shards/{number}", preload_content=False) for number in range(2)]
        print([answer.status for answer in answers])

    @once
    def pings_forever(self, model):
        """Read a stream of events in which there are only signs of life.

        https://github.com/anomalyco/opencode/issues/43519
        """
        import urllib.request

        server = started(SENDS_PINGS)
        with urllib.request.urlopen(f"http://127.0.0.1:{server.first_line}/generate", timeout=10) as events:
            print(next(line for line in events if line.startswith(b"data:")))

    @once
    def connects_blackhole(self, model):
        """Connect to a hub behind a firewall that drops packets, without a limit of time.

        https://github.com/facebookresearch/fairseq/pull/1869
        """
        self.kept = full_server()
        hub = http.client.HTTPConnection(*self.kept[0].getsockname())
        hub.request("HEAD", "/model.safetensors")
        print(hub.getresponse().status)

    @once
    def datagram_lost(self, model):
        """Ask a server of the time by a datagram, which is dropped, without a limit of time.

        https://github.com/esnet/iperf/pull/222
        """
        with (
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as clock,
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client,
        ):
            clock.bind(("127.0.0.1", 0))
            client.sendto(b"\x1b" + bytes(47), clock.getsockname())
            print(client.recvfrom(48))

    @once
    def socket(self, model):
        """Read from a server that does not answer."""
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
            client.recv(1)

    @once
    def checkpoint_stuck(self, model):
        """Write a checkpoint to a pipe that nobody reads."""
        ends = os.pipe()
        with os.fdopen(ends[1], "wb") as file:
            torch.save(torch.zeros(1 << 18), file)

    @once
    def flock(self, model):
        """Wait for a lock on a file that another process holds."""
        path = self.folder / "lock"
        holder = "import fcntl, sys, time; file = open(sys.argv[1], 'w'); fcntl.flock(file, fcntl.LOCK_EX); "
        holder += "print(flush=True); time.sleep(1000)"
        with subprocess.Popen(
            [sys.executable, "-S", "-c", holder, str(path)], stdout=subprocess.PIPE, start_new_session=True
        ) as other, path.open("a") as file:  # fmt: skip
            other.stdout.readline()
            fcntl.flock(file, fcntl.LOCK_EX)

    @once
    def fifo(self, model):
        """Open a named pipe that nobody writes to."""
        os.mkfifo(self.folder / "pipe")
        (self.folder / "pipe").read_bytes()


def use_terminal():
    """Read from a terminal at which nobody types, as of a job that was started from one."""
    _, terminal = os.openpty()
    os.dup2(terminal, 0)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - for the rest of the process


@contextlib.contextmanager
def served(refused):
    """The address of a tracking server in another process, which refuses so many requests."""
    process = started(SERVER, str(refused), "0")
    try:
        yield f"http://127.0.0.1:{process.first_line}"
    finally:
        process.kill()
        process.wait()
