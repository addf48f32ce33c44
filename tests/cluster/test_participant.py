"""What a process brings, who speaks for its host, how often it looks at a board, and how a keeper is known to live."""

import secrets
import socket
import subprocess
import sys
import threading
import time
from functools import partial

import pytest

from doctor.cluster.gather.host_lease import HostLease
from doctor.cluster.gather.participant import Participant
from doctor.cluster.membership import heartbeat
from doctor.cluster.membership.heartbeat import Heartbeat, HeartbeatMonitor
from doctor.cluster.rendezvous.process_identity import ProcessIdentity
from doctor.cluster.transport import polling
from doctor.cluster.transport.codec import unpack_capture
from doctor.cluster.transport.polling import PollInterval
from doctor.collectors import keys_to_collect
from doctor.collectors.base import Machine
from doctor.collectors.host.host_identity import host_identity
from doctor.core.facts import SECTIONS, Reach, ReachFacts
from doctor.testing import healthy
from tests.lab.needs import ROOT, clean_environ
from tests.lab.speed import patience

NODE0, NODE1 = ("boot-0", None, "node0"), ("boot-1", None, "node1")


@pytest.fixture
def key():
    return secrets.token_hex(6)


def test_one_process_of_a_host_gets_the_lease(key):
    first, second = HostLease(key, NODE0, "the host"), HostLease(key, NODE0, "the host")
    assert (first.granted, second.granted) == (True, False)
    others = [
        HostLease(key, NODE1, "the host"),
        HostLease(f"{key} 1", NODE0, "the host"),
        HostLease(key, NODE0, "rank 0"),
    ]
    assert all(other.granted for other in others)


def test_the_lease_holder_counts_other_requests(key):
    first = HostLease(key, NODE0, "rank 3")
    assert first.rivals() == 0
    assert [HostLease(key, NODE0, "rank 3").granted for _ in range(2)] == [False, False]
    assert first.rivals() == 2
    HostLease(key, NODE0, "rank 3")
    assert first.rivals() == 3
    assert HostLease(key, NODE0, "rank 3").rivals() == 0


def test_a_claim_ends_with_the_process_that_has_it(key):
    hold = (
        "from doctor.cluster.gather.host_lease import HostLease\n"
        f"c = HostLease({key!r}, {NODE0!r}, 'it'); print(c.granted, flush=True); "
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", hold + "import time; time.sleep(60)"],
        env=clean_environ(ROOT),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout.readline() == "True\n"
    assert not HostLease(key, NODE0, "it").granted
    holder.kill()
    holder.communicate(timeout=patience(20))
    claim = HostLease(key, NODE0, "it")
    assert claim.granted
    claim.close()
    assert HostLease(key, NODE0, "it").granted


def test_where_claims_can_not_be_made_all_are_granted(key, monkeypatch):
    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr(socket.socket, "bind", refuse)
    claims = [HostLease(key, NODE0, "the host") for _ in range(2)]
    assert [(claim.granted, claim.rivals()) for claim in claims] == [(True, 0), (True, 0)]


def test_the_identity_is_that_of_the_kernel_and_of_the_machine(tmp_path):
    (tmp_path / "sys/kernel/random").mkdir(parents=True)
    (tmp_path / "sys/kernel/random/boot_id").write_text("b-1\n")
    for text, machine in (("m-1\n", "m-1"), ("uninitialized\n", None), ("", None)):
        (tmp_path / "machine-id").write_text(text)
        assert host_identity(Machine(proc=tmp_path, etc=tmp_path)) == ("b-1", machine, socket.gethostname())
    nowhere = tmp_path / "nowhere"
    assert host_identity(Machine(proc=nowhere, etc=nowhere)) == (None, None, socket.gethostname())


def test_only_the_leading_process_collects_host_facts():
    speaker, other = keys_to_collect(leads_host=True), keys_to_collect(leads_host=False)
    assert set(other) < set(speaker)
    assert {key for key in other if SECTIONS[key].level == "host"} == {"slurm"}
    assert {key for key in speaker if SECTIONS[key].level == "rank"} <= set(other)
    assert set(keys_to_collect(leads_host=False, own_gpus=True)) - set(other) == {"gpus"}


def party(key, number, collect=lambda keys: {}):
    return Participant(ProcessIdentity(number, 2, key), NODE0, HostLease(key, NODE0, "the host"), collect)


def test_a_card_is_there_once_the_facts_are(key):
    member, ready = healthy().members[1], threading.Event()
    speaker = party(key, 0)

    def collect(keys):
        ready.wait(patience(10))
        return {name: value for name, value in member.sections.items() if name in keys}

    process = party(key, 1, collect)
    process.set_reach(ReachFacts(attempts=(Reach("node0", "10.0.0.1", 1, "refused", "master"),)))
    assert process.member_facts() is None
    ready.set()
    assert process.member().rank == 1
    facts = process.member_facts()
    assert (facts.token, facts.number, facts.duplicates) == (process.join_request.token, 1, 0)
    [arrived] = unpack_capture(facts.capture, "facts").members
    assert arrived.host == NODE0
    assert arrived.sections["launch"] == member.sections["launch"]
    assert "host" not in arrived.sections
    assert speaker.member().rank == 0
    assert [attempt.outcome for attempt in arrived.sections["reach"].attempts] == ["refused"]


def test_facts_count_duplicates_every_time(key):
    """A process may bring it to a second gathering, when the keeper of the first is lost."""
    first, _twin = party(key, 1), party(key, 1)
    first.member()
    assert (first.member_facts().duplicates, first.member_facts().duplicates) == (1, 1)


def test_rests_grow_and_do_not_reach_beyond_the_end(monkeypatch):
    slept = []
    monkeypatch.setattr(polling, "sleep", slept.append)
    steps, soon = PollInterval(1000), time.monotonic() + 100
    for _ in range(10):
        steps.rest(soon)
    assert slept[:3] == [0.005, 0.01, 0.02]
    assert slept[-1] == pytest.approx(0.2)
    steps.rest(time.monotonic() - 1)
    assert slept[-1] == 0


def heartbeats(folder, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(heartbeat, "monotonic", lambda: now[0])
    beating = Heartbeat(partial(folder().set, "nonce/pulse"), 0, every=1.0)
    return now, beating, HeartbeatMonitor(partial(folder().get, "nonce/pulse"), every=1.0)


def test_a_coordinator_is_alive_while_its_heartbeat_continues(folder, monkeypatch):
    now, beating, monitor = heartbeats(folder, monkeypatch)
    for _ in range(20):
        beating.beat()
        assert monitor.look() == 0
        now[0] += 1.0
    for missed in range(1, 6):
        assert monitor.look() == missed
        now[0] += 0.5
        assert monitor.look() == missed, "not yet due"
        now[0] += 0.5


def test_a_process_that_was_suspended_itself_misses_one_heartbeat(folder, monkeypatch):
    now, beating, monitor = heartbeats(folder, monkeypatch)
    beating.beat()
    monitor.look()
    now[0] += 100.0
    assert monitor.look() == 1


def test_a_paused_heartbeat_does_not_time_out(folder, monkeypatch):
    now, beating, monitor = heartbeats(folder, monkeypatch)
    beating.pause()
    for _ in range(50):
        assert monitor.look() == 0
        now[0] += 1.0
