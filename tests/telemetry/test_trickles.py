"""Connections on which little arrives, much, or nothing: a real server."""

import contextlib
import socket
import threading
import time

import pytest

from doctor.core.facts.telemetry import TRICKLES
from doctor.monitor.telemetry.stacks import trickles
from doctor.monitor.telemetry.stacks.trickles import Trickle


@contextlib.contextmanager
def receiver(data, pause):
    """A thread that receives what a server sends, with a pause after each part."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname(), timeout=30)
        connection, _ = server.accept()
        stop = threading.Event()

        def sends():
            while not stop.wait(pause):
                connection.sendall(data)

        def receives():
            while client.recv(1 << 20):
                pass

        threads = [threading.Thread(target=one, daemon=True) for one in (sends, receives)]
        for one in threads:
            one.start()
        yield threads[1]
        stop.set()
        threads[0].join()
        connection.close()
        threads[1].join()
        client.close()


def words_of(data, pause, seconds=1.5):
    trickle, found = Trickle(), ""
    with receiver(data, pause) as thread:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            trickle.look(thread.native_id)
            found = trickle.words(thread.native_id) or found
            time.sleep(0.05)
    return found


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(trickles, "LEAST_SECONDS", 0.8)


def test_a_server_that_sends_few_bytes():
    assert words_of(b"xy", 0.2).startswith(TRICKLES)


@pytest.mark.parametrize(("data", "pause"), [(bytes(20_000), 0.1), (b"", 0.2)], ids=["a download", "silence"])
def test_a_server_that_sends_much_or_nothing(data, pause):
    assert words_of(data, pause) == ""
