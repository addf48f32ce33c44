"""Whoever can write to the board of a run, as a process of its own: what it can't make the ranks do."""

import os
import subprocess
import time
from pathlib import Path

import pytest

from doctor.cluster.membership.protocol import LeaderAnnouncement
from doctor.cluster.transport.codec import decode_or_none, encode
from doctor.cluster.transport.file_store import FileStoreBackend
from doctor.cluster.transport.signing import Secret
from doctor.cluster.transport.store import KeyValueStore
from doctor.cluster.transport.tcp_store import TCPStoreBackend, join_store
from doctor.collectors.base import Machine
from doctor.collectors.host.host_identity import host_identity
from doctor.collectors.host.local_processes import process_start_time
from doctor.monitor.watchdog.decision import Decision
from doctor.monitor.watchdog.local_peers.peer_observation import host_key
from doctor.monitor.watchdog.protocol import DecisionMessage, PeerProcess, RankResumed
from doctor.monitor.watchdog.store_discovery import KEY, derived_run_id
from tests.lab.speed import slowness
from tests.watchdog.ranks import LIMIT, fork

SECRET = Secret(b"s" * 16, "test")
OTHER = 7
"""A rank that the job does not have."""


@pytest.fixture(params=["store", "folder"])
def carried(request, scene):
    """The job starts over one carrier, and a stranger is on it: a function that starts both."""

    def start(script, stranger, world=2, **options):
        if request.param == "folder":
            scene.start(script, world, store="none", **options)
            port, bell = None, f"bell-{derived_run_id(None, 0, os.environ)}"
        else:
            port, bell = scene._agent(), "bell-0"
            for number in range(world):
                scene.pids[number] = fork(
                    lambda number=number: scene._be(
                        script, number, world, "agent", port, scene.directory, dict(options)
                    )
                )
        scene._others.append(fork(lambda: stranger(Stranger(scene.directory, port, bell))))

    return start


class Stranger:
    """It is on the board, and knows the place where the ranks meet."""

    def __init__(self, directory: Path, port, bell):
        carrier = FileStoreBackend(directory, KEY) if port is None else None
        if carrier is None:
            carrier = TCPStoreBackend(join_store("127.0.0.1", port, 20.0), KEY, "hostile", survives_coordinator=True)
        self.board = KeyValueStore(carrier)
        self.bell = bell
        self.place = self.until(lambda: (lead := self.lead()) and lead.nonce)

    def lead(self):
        data = self.board.get(f"{self.bell}/lead")
        # Signatures keep nobody from reading: what is signed stands after the signature.
        return next((lead for at in (0, 44) if (lead := decode_or_none((data or b"")[at:], LeaderAnnouncement))), None)

    def until(self, holds):
        end = time.monotonic() + LIMIT
        while not (found := holds()):
            assert time.monotonic() < end
            time.sleep(0.02)
        return found

    def append(self, box, message):
        self.board.append(f"{self.place}/{box}", encode(message))

    def get(self, name):
        return self.board.get(f"{self.place}/{name}")

    def set(self, name, data):
        self.board.set(f"{self.place}/{name}", data)


def stands_still(rank):
    """All ranks train for a while, then stand still until they are judged, and a while longer."""
    rank.watchdog.start()
    rank.train(2.0)
    rank.stand_still(8.0)
    rank.source.state = "ended"
    rank.watchdog.stop(5)


@pytest.fixture
def bystander():
    """A process of this user that has nothing to do with the run."""
    with subprocess.Popen(["sleep", "300"]) as process:
        yield process
        process.kill()


def test_no_other_process_gets_a_signal(scene, carried, bystander):
    """Rank 1 does not answer, and is asked for its stacks; the process that the stranger names is not."""
    pid = bystander.pid

    def script(rank):
        rank.watchdog.start()
        rank.train(3.0)
        seconds = round(10 * slowness())  # longer than a round waits for rank 1
        rank.stand_still(0.8 * seconds) if rank.number == 0 else rank.hold_the_lock(seconds)
        rank.source.state = "ended"
        rank.watchdog.stop(5)

    def stranger(one):
        box = f"host-{host_key(host_identity(Machine()))}"
        for number in (9, 15, 1, 34, 64):
            for started in (None, process_start_time(pid)):
                for thread in (pid, pid + 1):
                    one.append(box, PeerProcess(OTHER + number, pid, started, thread, number))

    carried(script, stranger)
    judged = scene.until_judged("stall")
    scene.wait()
    assert judged["members"]["1"]["stack_from"] == "signal", "a rank is asked"
    assert bystander.poll() is None, "it lives"


@pytest.mark.parametrize("with_key", [False, True], ids=["without a key", "with a key"])
def test_a_rank_that_makes_progress_is_not_ended(scene, carried, tmp_path, with_key):
    """on_hang='abort', and a forged decision. Both sides go on until the ranks have said what they do with it;
    with a key they say nothing, however often it is repeated."""
    often, enough = tmp_path / "often", tmp_path / "enough"
    until = time.monotonic() + LIMIT

    def script(rank):
        rank.watchdog.start()
        while not enough.exists() and time.monotonic() < until:
            rank.train(0.1)
        rank.source.state = "ended"
        rank.watchdog.stop(5)

    def stranger(one):
        said = encode(DecisionMessage(0, "stall", Decision(True, "end yourselves", ("RUN001",), (0, 1))))
        newest, repeated = 1, 0
        while not enough.exists() and time.monotonic() < until:
            # Rank 0 replaces the forged decision; rank 1 adopts whichever it reads, so each incident is a chance.
            for number in range(max(1, newest - 1), newest + 3):
                one.set(f"alarm-{number}/ruling", said)
                one.set(f"alarm-{number}/raised", b"1")
            newest += one.get(f"alarm-{newest}/turn-0") is not None
            repeated += 1
            if repeated == 40:
                often.touch()
            time.sleep(0.1)

    options = {"secret": SECRET} if with_key else {}
    carried(script, stranger, on_hang="abort", faulty=False, hang_after=LIMIT, **options)
    try:
        scene.until(lambda: often.exists() and (with_key or _told(scene, "makes progress, so it does not abort")))
    finally:
        enough.touch()
    scene.wait()
    assert scene.codes == {0: 0, 1: 0}
    assert not _told(scene, "aborting")
    assert with_key == (not _told(scene, "makes progress, so it does not abort"))


def _told(scene, words):
    return any(words in line.get("told", "") for line in scene.said())


@pytest.mark.parametrize("with_key", [False, True], ids=["without a key", "with a key"])
def test_a_forged_decision_hides_nothing(scene, carried, with_key):
    """Rank 0 judges all the same; and what it found is not taken back while it stands still."""

    def stranger(one):
        for _ in range(60):
            for number in range(1, 4):
                one.set(f"alarm-{number}/ruling", encode(DecisionMessage(0, "stall", Decision())))
                one.set(f"alarm-{number}/turn-0", b"0")
                for rank in (0, 1):
                    one.append(f"alarm-{number}/goes-on", RankResumed(rank, 1.0))
            time.sleep(0.1)

    carried(stands_still, stranger, **({"secret": SECRET} if with_key else {}))
    judged = scene.until_judged("stall")
    assert judged["rank"] == 0
    scene.wait()
    assert "training resumed" not in [line.get("told") for line in scene.said()]


def test_ranks_with_and_without_a_key(scene, carried):
    """Each watches itself, and says why it does not hear the other."""

    def script(rank):
        if rank.number == 0:
            rank.watchdog._secret = SECRET
        rank.watchdog.start()
        rank.write(met=rank.watchdog.check_start(2.0) is not None)
        rank.stand_still(6.0)
        rank.source.state = "ended"
        rank.watchdog.stop(5)

    carried(script, lambda one: None)
    scene.wait()
    assert scene.codes == {0: 0, 1: 0}
    told = [line["told"] for line in scene.said(0) if "told" in line]
    assert sum("DOCTOR_SECRET_FILE" in line for line in told) == 1, told
