"""What plants of several kinds use."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import torch

SERVER = """
import http.server, sys, time
left, seconds = int(sys.argv[1]), float(sys.argv[2])
class Tracking(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        global left
        left -= 1
        time.sleep(seconds)
        self.send_response(503 if left >= 0 else 200)
        self.end_headers()
    def log_message(self, *_):
        pass
server = http.server.HTTPServer(("127.0.0.1", 0), Tracking)
print(server.server_port, flush=True)
server.serve_forever()
"""
"""A tracking server that is not available for the first requests, and takes some seconds for each."""
HOLDER = """
import sqlite3, sys, time
base = sqlite3.connect(sys.argv[1])
base.execute("BEGIN EXCLUSIVE")
print(flush=True)
time.sleep(float(sys.argv[2]))
"""
"""A process that keeps a database locked for some seconds."""
STATES = """
import http.server, json
class Jobs(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        page = {"state": "failed", "files": [f"shard-{number}.tar" for number in range(8)], "next": "c2hhcmQtNw"}
        self.wfile.write(json.dumps(page).encode())
    def log_message(self, *_):
        pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Jobs)
print(server.server_port, flush=True)
server.serve_forever()
"""
"""A server of jobs and of lists of files: each job has failed, and each page names the same next one."""


def started(program, *arguments, says=True):
    """A process that runs a program; with ``says`` its first line has been read."""
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", program, *arguments], stdout=subprocess.PIPE, start_new_session=True
    )
    if says:
        process.first_line = process.stdout.readline().decode().strip()
    return process


def compute(seconds):
    """Compute with tensors for some seconds of this thread."""
    until, matrix = time.thread_time() + seconds, torch.ones(64, 64)
    while time.thread_time() < until:
        matrix = matrix @ matrix / 64


class Side:
    """An actor of Ray that answers, waits for another one, or is killed."""

    def answers(self):
        """An answer."""
        return 1

    def meets(self, other):
        """Wait for the answer of another actor, which has begun to wait too."""
        import ray

        time.sleep(1)
        return ray.get(other.answers.remote())

    def dies(self):
        """Be killed, as by the kernel."""
        os.kill(os.getpid(), signal.SIGKILL)


class Scorer:
    """Scores answers in an event loop, as an actor of Ray."""

    async def answer(self):
        """An answer."""
        return 1.0

    async def score(self, itself):
        """Wait for an answer of this actor, which blocks its event loop."""
        import ray

        return ray.get(itself.answer.remote())

    async def scores_later(self, seconds):
        """Score after some seconds, while the event loop goes on."""
        import asyncio

        await asyncio.sleep(seconds)
        return 1.0


def asks(server, path):
    """What a server answers, as JSON."""
    with urllib.request.urlopen(f"http://127.0.0.1:{server.first_line}{path}", timeout=10) as answer:
        return json.load(answer)


def scores_shortly(number):
    """A score."""
    time.sleep(0.02)
    return number / 8


def full_server():
    """A server that accepts no more connections: it does not answer to the next one."""
    server = socket.create_server(("127.0.0.1", 0), backlog=0)
    waiting = [socket.socket() for _ in range(3)]
    for one in waiting:
        one.setblocking(False)
        one.connect_ex(server.getsockname())
    return [server, *waiting]
