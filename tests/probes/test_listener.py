"""The responder: what it answers, to whom, and that nothing which comes in harms it."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress

import pytest

from doctor.probes.responder import server
from doctor.probes.responder.listener import Responder
from doctor.probes.responder.responder_protocol import ProtocolViolation, ResponderProtocol
from doctor.probes.responder.wire_format import (
    GREETING_BYTES,
    LARGEST,
    LENGTH,
    MAGIC,
    MOST_BYTES,
    TIMES,
    WELCOME_BYTES,
    greeting,
    new_word,
    welcome,
)
from tests.lab.ports import free_port


@pytest.fixture
def responder() -> Iterator[Responder]:
    one = Responder(lambda: 1000.5)
    yield one
    one.close()


def connected(responder: Responder, host: str = "127.0.0.1") -> socket.socket:
    connection = socket.create_connection((host, responder.port), timeout=5)
    connection.settimeout(5)
    return connection


def read(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size and (piece := connection.recv(size - len(data))):
        data += piece
    return data


def is_cut(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def answers(responder: Responder, host: str = "127.0.0.1") -> bool:
    with connected(responder, host) as connection:
        connection.sendall(greeting(responder.word))
        if read(connection, WELCOME_BYTES) != welcome(responder.word):
            return False
        connection.sendall(LENGTH.pack(0))
        return TIMES.unpack(read(connection, TIMES.size)) == (1000.5, 1000.5)


def test_answers_who_knows_the_word(responder: Responder) -> None:
    assert answers(responder)
    with connected(responder) as connection:
        connection.sendall(greeting(responder.word) + LENGTH.pack(LARGEST) + bytes(LARGEST) + LENGTH.pack(3) + b"abc")
        assert read(connection, WELCOME_BYTES + 2 * TIMES.size)[:WELCOME_BYTES] == welcome(responder.word)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6")
def test_answers_over_ipv6(responder: Responder) -> None:
    try:
        assert answers(responder, "::1")
    except OSError:
        pytest.skip("no IPv6 loopback")


def test_two_words_are_two() -> None:
    assert len({new_word() for _ in range(1000)}) == 1000
    assert len(greeting("")) == GREETING_BYTES
    assert greeting("a") != greeting("b")
    assert welcome("a") not in greeting("a")


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n" * 3, greeting("guess"), bytes(64), MAGIC + bytes(16)])
def test_hangs_up_on_strangers(responder: Responder, said: bytes) -> None:
    with connected(responder) as connection:
        connection.sendall(said)
        assert is_cut(connection)
    assert answers(responder)


def test_hangs_up_on_too_much(responder: Responder) -> None:
    for rest in (
        LENGTH.pack(LARGEST + 1),
        LENGTH.pack(LARGEST) + bytes(LARGEST) + LENGTH.pack(LARGEST) + bytes(LARGEST),
    ):
        with connected(responder) as connection, suppress(ConnectionError):
            connection.sendall(greeting(responder.word) + rest)
            read(connection, WELCOME_BYTES + TIMES.size)
            assert is_cut(connection)
    assert answers(responder)


def test_garbage_does_no_harm(responder: Responder) -> None:
    chance = random.Random(7)
    for _ in range(300):
        with connected(responder) as connection, suppress(OSError):
            beginning = chance.choice([b"", greeting(responder.word), greeting(responder.word)[: chance.randrange(24)]])
            connection.sendall(beginning + chance.randbytes(chance.randrange(200)))
            if chance.random() < 0.3:
                connection.shutdown(socket.SHUT_WR)
    assert answers(responder)
    assert responder._server._thread.is_alive()


def test_drops_who_says_nothing(responder: Responder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "STRANGER_SECONDS", 0.3)
    with connected(responder) as connection:
        assert is_cut(connection)
    assert answers(responder)


def test_drops_who_grows_silent_or_old(responder: Responder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "IDLE_SECONDS", 0.3)
    with connected(responder) as connection:
        connection.sendall(greeting(responder.word))
        assert len(read(connection, WELCOME_BYTES)) == WELCOME_BYTES
        assert is_cut(connection)
    monkeypatch.setattr(server, "IDLE_SECONDS", 60)
    monkeypatch.setattr(server, "LIFE_SECONDS", 0.5)
    with connected(responder) as connection:
        connection.sendall(greeting(responder.word))
        assert len(read(connection, WELCOME_BYTES)) == WELCOME_BYTES
        assert is_cut(connection)


def test_more_connections_than_are_taken_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MOST_CONNECTIONS", 3)
    with closing(Responder(lambda: 1000.5)) as responder:
        idle = [connected(responder) for _ in range(3)]
        late: list[bool] = []
        thread = threading.Thread(target=lambda: late.append(answers(responder)))
        thread.start()
        thread.join(0.5)
        assert not late
        for one in idle:
            one.close()
        thread.join(5)
        assert late == [True]


def test_a_held_port_takes_connections_and_nothing_else(responder: Responder) -> None:
    port = free_port()
    assert responder.hold(port)
    assert not responder.hold(port)
    with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
        connection.settimeout(0.3)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        connection.sendall(greeting(responder.word))
        connection.settimeout(5)
        assert is_cut(connection)
    assert answers(responder)


def test_a_port_that_cannot_be_held(responder: Responder) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        assert not responder.hold(other.getsockname()[1])
    assert not responder.hold(70000)
    assert not responder.hold(-1)


def test_closing_gives_the_ports_back_at_once() -> None:
    for _ in range(20):
        responder = Responder()
        port = free_port()
        assert responder.hold(port)
        clients = [socket.create_connection(("127.0.0.1", port), timeout=5) for _ in range(3)]
        greeted = connected(responder)
        greeted.sendall(greeting(responder.word))
        read(greeted, WELCOME_BYTES)
        responder.close()
        for again in (port, responder.port):
            socket.create_server(("", again)).close()
        responder.close()
        assert not responder.hold(port)
        assert not responder._server._thread.is_alive()
        for one in (*clients, greeted):
            one.close()


def test_a_conversation_does_not_depend_on_how_the_bytes_come() -> None:
    said = greeting("w") + LENGTH.pack(0) + LENGTH.pack(1000) + bytes(1000) + LENGTH.pack(0) + LENGTH.pack(1) + b"x"
    whole = ResponderProtocol("w", lambda: 2.0).receive(said)
    assert len(whole) == WELCOME_BYTES + 4 * TIMES.size
    chance = random.Random(3)
    for _ in range(200):
        talk, answer, rest = ResponderProtocol("w", lambda: 2.0), b"", said
        while rest:
            cut = chance.randint(1, chance.choice([1, 7, 400]))
            answer += talk.receive(rest[:cut])
            rest = rest[cut:]
        assert answer == whole


def test_a_conversation_ends_only_in_one_way() -> None:
    chance = random.Random(5)
    for _ in range(500):
        talk = ResponderProtocol("w", time.time)
        with suppress(ProtocolViolation):
            if chance.random() < 0.7:
                talk.receive(greeting("w"))
            for _ in range(20):
                talk.receive(chance.randbytes(chance.randrange(1, 3000)))
    talk = ResponderProtocol("w", time.time)
    talk.receive(greeting("w"))
    many = LENGTH.pack(0) * (MOST_BYTES // LENGTH.size + 1)
    with pytest.raises(ProtocolViolation):
        talk.receive(many)
