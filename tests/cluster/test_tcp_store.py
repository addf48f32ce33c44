"""The board in torch's store: hosting it, joining it, and what else may listen on its port."""

import contextlib
import http.server
import os
import random
import secrets
import threading
import time

import pytest

from doctor.cluster.gather.plan import StoreEndpoint
from doctor.cluster.rendezvous.process_identity import ProcessIdentity
from doctor.cluster.rendezvous.store_access import PortInUse, RendezvousFailed, open_store
from doctor.cluster.transport.store import StoreLost
from doctor.cluster.transport.tcp_store import host_store, join_store, listen
from tests.cluster.boards import STORE_SECONDS, store_boards, without_rights
from tests.cluster.test_board import soon
from tests.cluster.test_connect_attempt import full, port_of
from tests.lab.ports import free_port
from tests.lab.speed import NEVER

pytest.importorskip("torch", reason="the store is torch's")

IDENTITIES = [ProcessIdentity(number, 2, "key", spans_hosts=False) for number in range(2)]


def at(port, hosted):
    return StoreEndpoint(("127.0.0.1",), port, hosted, "MASTER_ADDR and MASTER_PORT")


def open_soon(endpoint, identity, seconds=STORE_SECONDS):
    return open_store(endpoint, identity, time.monotonic() + seconds)


def test_one_hosts_and_the_other_joins():
    port = free_port()
    hosting = open_soon(at(port, "here"), IDENTITIES[0])
    joining = open_soon(at(port, "there"), IDENTITIES[1])
    hosting.store.set("call", b"1")
    assert soon(lambda: joining.store.get("call") == b"1")
    assert [attempt.outcome for attempt in joining.reach.attempts] == ["open"]
    assert not hosting.store.survives_coordinator
    assert not joining.store.survives_coordinator
    assert not hosting.via_duplicate_host


def test_a_client_that_starts_early_waits_for_the_host():
    """The port is listened on before torch is imported: nobody is refused meanwhile."""
    with contextlib.closing(listen(0)) as listener:
        port, joined = port_of(listener), []
        early = threading.Thread(target=lambda: joined.append(open_soon(at(port, "there"), IDENTITIES[1])))
        early.start()
        time.sleep(0.3)
        assert early.is_alive()
        store = host_store(listener, STORE_SECONDS)
        early.join(STORE_SECONDS)
    store.set("rankdoctor/key/call", b"1")
    assert soon(lambda: joined[0].store.get("call") == b"1")


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_the_host_is_there_for_both_kinds_of_addresses(address):
    listener = listen(0)
    port = port_of(listener)
    store = host_store(listener, STORE_SECONDS)
    assert join_store(address, port, STORE_SECONDS).check(["no"]) is False
    del store


def test_the_port_is_given_back():
    """The job needs it a moment later, though its connections are not forgotten yet."""
    port = free_port()
    for _ in range(3):
        hosting, joining = (open_soon(at(port, hosted), IDENTITIES[0]).store for hosted in ("here", "there"))
        joining.set("call", b"1")
        hosting.close()
        assert soon(lambda board=joining: is_lost(board))


def is_lost(board):
    try:
        board.get("call")
    except StoreLost:
        return True
    return False


def test_two_that_are_to_host_meet_at_the_first():
    port = free_port()
    first = open_soon(at(port, "here"), IDENTITIES[0])
    first.store.set("call", b"1")
    second = open_soon(at(port, "here"), IDENTITIES[0])
    assert second.via_duplicate_host
    assert second.store.get("call") == b"1"


def test_a_store_of_another_job_on_the_port(monkeypatch):
    monkeypatch.setattr("doctor.cluster.rendezvous.store_access.ELSEWHERE", 0.5)
    port = free_port()
    other = open_soon(at(port, "here"), ProcessIdentity(0, 2, "another run"))
    other.store.set("call", b"1")
    with pytest.raises(PortInUse, match=rf"^cannot listen on port {port} on this host: Address already in use$"):
        open_soon(at(port, "here"), IDENTITIES[0], seconds=NEVER)


class _Page(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_):
        """Say nothing."""


@contextlib.contextmanager
def web_server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Page) as server:
        server.daemon_threads = True
        serving = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        serving.start()
        yield server.server_address[1]
        server.shutdown()


def test_a_web_server_on_the_port_of_the_host(monkeypatch):
    monkeypatch.setattr("doctor.cluster.rendezvous.store_access.BEHIND", 1.0)
    refusal = r"^cannot listen on port \d+ on this host: Address already in use$"
    with web_server() as port, pytest.raises(PortInUse, match=refusal):
        open_soon(at(port, "here"), IDENTITIES[0], seconds=NEVER)


def test_a_web_server_where_the_store_should_be():
    with web_server() as port, pytest.raises(RendezvousFailed, match=rf"^what listens on 127.0.0.1:{port} ") as refused:
        open_soon(at(port, "there"), IDENTITIES[1], seconds=1.0)
    assert refused.value.check == "ENV008"
    assert "\n" not in refused.value.why
    assert [attempt.outcome for attempt in refused.value.reach.attempts] == ["open"]


def test_somebody_who_listens_and_says_nothing():
    with (
        contextlib.closing(listen(0)) as silent,
        pytest.raises(RendezvousFailed, match=r"does not respond|not a PyTorch TCPStore"),
    ):
        open_soon(at(port_of(silent), "there"), IDENTITIES[1], seconds=1.0)


@pytest.mark.parametrize("hosted", ["there", "agent"])
def test_connection_refused(hosted):
    with pytest.raises(RendezvousFailed, match="nothing listens there") as refused:
        open_soon(at(free_port(), hosted), IDENTITIES[1], seconds=0.5)
    assert refused.value.check == "NET006"
    assert refused.value.reach.attempts[0].outcome == "refused"


def test_a_listener_that_is_overrun():
    with full() as busy, pytest.raises(RendezvousFailed, match="a firewall drops the packets") as refused:
        open_soon(at(port_of(busy), "there"), IDENTITIES[1], seconds=0.5)
    assert refused.value.reach.attempts[0].outcome == "silent"


def test_a_port_that_only_root_may_have():
    with without_rights(), pytest.raises(PortInUse, match=r"^cannot listen on port 1 on this host: Permission denied$"):
        open_soon(at(1, "here"), IDENTITIES[0])


def test_where_torch_is_missing(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torch.distributed", None)
    with (
        contextlib.closing(listen(0)) as there,
        pytest.raises(RendezvousFailed, match="cannot import torch") as lost,
    ):
        open_soon(at(port_of(there), "there"), IDENTITIES[1])
    assert "--share DIR" in lost.value.why


def test_a_damaged_index_blocks_no_reader():
    """Reading a key that is not there would wait for it."""
    key, chance = secrets.token_hex(4), random.Random(5)
    boards = store_boards(key)
    board, reader = boards(), boards().mailbox("nonce/facts")
    board.set("nonce/facts", chance.randbytes(160))
    assert reader.fresh() == []
    board.append("nonce/facts", b"whole")
    assert soon(lambda: reader.fresh() == [b"whole"])
    board.set("nonce/facts", chance.randbytes(7))
    assert reader.fresh() == []


def test_the_surroundings_of_the_command_are_left_alone():
    """What torch's own messages are told to be is no setting of the job's."""
    assert os.environ.get("TORCH_CPP_LOG_LEVEL") in (None, "FATAL")
