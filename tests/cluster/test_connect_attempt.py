"""The way to the master, step by step, with real sockets."""

import contextlib
import json
import socket
import threading
import time

import pytest

from doctor.cluster.rendezvous.connect_attempt import attempt_connect, names_this_host, try_connect
from doctor.cluster.rendezvous.store_access import failure_sentence
from tests.collectors.namespaces import run_in_namespaces
from tests.lab.needs import require_tools
from tests.lab.speed import NEVER, slowness

SOON = 0.25 * slowness()


@contextlib.contextmanager
def listener(address="127.0.0.1", port=0):
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.closing(socket.socket(family)) as opened:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind((address, port))
        opened.listen(16)
        yield opened


@contextlib.contextmanager
def bound():
    """A port on which nobody listens, and nobody else can."""
    with contextlib.closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken


@contextlib.contextmanager
def full():
    """A listener whose backlog is full: the kernel does not answer further connections (tcp_abort_on_overflow)."""
    with contextlib.ExitStack() as stack:
        opened = stack.enter_context(contextlib.closing(socket.socket()))
        opened.bind(("127.0.0.1", 0))
        opened.listen(0)
        for _ in range(2):
            waiting = stack.enter_context(contextlib.closing(socket.socket()))
            waiting.setblocking(False)
            waiting.connect_ex(opened.getsockname())
        yield opened


def port_of(opened):
    return opened.getsockname()[1]


def connect_soon(names, port, seconds=SOON):
    return attempt_connect(names, port, until=time.monotonic() + seconds)


def outcomes(found):
    return [(attempt.address, attempt.outcome) for attempt in found.attempts]


def test_open():
    with listener() as opened:
        found = connect_soon(["127.0.0.1"], port_of(opened))
    assert found.open_at == "127.0.0.1"
    assert (found.rounds, found.lookup_error) == (1, None)
    assert (found.attempts[0].interface, found.attempts[0].source_address) == ("lo", "127.0.0.1")


def test_refused():
    with bound() as taken:
        found = connect_soon(["127.0.0.1"], port_of(taken))
    assert outcomes(found) == [("127.0.0.1", "refused")]
    assert found.open_at is None
    assert found.rounds > 1


def test_silent():
    with full() as opened:
        assert try_connect("127.0.0.1", port_of(opened), SOON) == "silent"
        assert outcomes(connect_soon(["127.0.0.1"], port_of(opened))) == [("127.0.0.1", "silent")]


@pytest.mark.parametrize("name", ["..", "x" * 64 + ".invalid", "", " "])
def test_names_that_are_none(name):
    found = connect_soon([name], 1)
    assert found.resolved == ()
    assert found.lookup_error
    assert outcomes(found) == [(name, "unresolved")]
    assert not names_this_host([name])


def test_a_name_that_does_not_help_does_not_hide_one_that_does():
    with listener() as opened:
        found = connect_soon(["..", "127.0.0.1"], port_of(opened))
    assert found.open_at == "127.0.0.1"


def test_every_address_is_tried_until_one_answers():
    with listener("::1") as opened:
        found = connect_soon(["127.0.0.1", "::1"], port_of(opened))
    assert outcomes(found) == [("127.0.0.1", "refused"), ("::1", "open")]


def test_rank_0_may_start_later():
    with bound() as taken:
        port = port_of(taken)
    answered = threading.Event()

    def start_late():
        time.sleep(0.2)
        with listener(port=port):
            answered.wait(NEVER)

    late = threading.Thread(target=start_late)
    late.start()
    found = attempt_connect(["127.0.0.1"], port, until=time.monotonic() + NEVER)
    answered.set()
    late.join()
    assert found.open_at == "127.0.0.1"
    assert found.rounds > 1
    assert found.seconds > 0.1


def test_names_this_host():
    assert names_this_host(["127.0.0.1"])
    assert names_this_host(["203.0.113.9", "::1"])
    assert not names_this_host(["203.0.113.9"])


_KNOCK = """
import json, time
from doctor.cluster.rendezvous.connect_attempt import attempt_connect
rows = {}
for name in NAMES:
    found = attempt_connect([name], 4000, until=time.monotonic() + 0.25)
    last = found.attempts[-1]
    rows[name] = [last.outcome, last.interface, found.lookup_error]
print(json.dumps(rows))
"""

_NETWORK = """
ip link set lo up
ip link add far type veth peer name other; ip link set other up
ip address add 10.9.0.1/24 dev far; ip link set far up
ip neighbour add 10.9.0.2 lladdr 02:00:00:00:00:02 dev far
ip route add unreachable 198.51.100.1; ip route add prohibit 198.51.100.2; ip route add blackhole 198.51.100.3
nft add table inet t; nft add chain inet t i '{ type filter hook input priority 0; }'
nft add rule inet t i ip daddr 10.9.0.1 tcp dport 4000 drop
echo 'nameserver 127.0.0.1' > resolv.conf; mount --bind resolv.conf /etc/resolv.conf
"""


def test_networks_that_lead_nowhere(tmp_path):
    require_tools("nft")
    expected = {
        "10.9.0.2": "silent",  # a host that swallows everything
        "10.9.0.3": "silent",  # nobody has the address; after some seconds more it would be unroutable
        "198.51.100.1": "unroutable",
        "198.51.100.2": "unroutable",
        "198.51.100.3": "unroutable",
        "10.9.0.1": "silent",  # a firewall on the port
        "nowhere.invalid": "unresolved",
    }
    program = f"NAMES = {list(expected)}\n{_KNOCK}"
    rows = json.loads(run_in_namespaces(f"cd {tmp_path}; {_NETWORK}", program))
    assert {name: row[0] for name, row in rows.items()} == expected
    assert rows["10.9.0.2"][1] == "far"
    assert rows["nowhere.invalid"][2]


def test_what_a_rank_says_of_a_master_that_refuses():
    with bound() as taken:
        found, port = connect_soon(["127.0.0.1"], port_of(taken)), port_of(taken)
    words, check = failure_sentence(found, spans_hosts=False)
    assert f"127.0.0.1 by lo from 127.0.0.1; port {port}: refused, {found.rounds} tries in " in words
    assert "\n" not in words
    assert check == "NET006"


def test_what_a_rank_says_of_a_master_that_is_this_host_by_mistake():
    with bound() as taken:
        found = connect_soon(["127.0.0.1"], port_of(taken))
    words, check = failure_sentence(found, spans_hosts=True)
    assert f"which is {socket.gethostname()} itself" in words
    assert check == "NET005"


def test_what_a_rank_says_of_a_silent_master():
    with full() as opened:
        words, check = failure_sentence(connect_soon(["127.0.0.1"], port_of(opened)), spans_hosts=False)
    assert "no answer, 1 try in " in words
    assert check == "NET006"


def test_what_a_rank_says_of_a_name_that_does_not_resolve():
    words, check = failure_sentence(connect_soon([".."], 1), spans_hosts=True)
    assert words.startswith(".. does not resolve on this host (")
    assert check == "NET004"
