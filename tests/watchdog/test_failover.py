"""Lines that are lost, and found again."""

import os
import threading
import time

import pytest

from doctor.cluster.membership.leadership import acknowledge
from doctor.cluster.transport import failover as lined
from doctor.cluster.transport.failover import FailoverStore, StoreConnection
from doctor.cluster.transport.file_store import FileStoreBackend
from doctor.core.files.open_folder import MARK, OpenFolder
from tests.cluster.boards import store_boards
from tests.lab.speed import NEVER, patience

SOON = patience(10)
"""Seconds for what threads of a busy machine do late."""


class Faulty(FileStoreBackend):
    """A folder whose server stands still, or refuses, as the test says."""

    def __init__(self, directory):
        super().__init__(directory, "faulty")
        self.flows = threading.Event()
        self.flows.set()
        self.refuses = False

    def get(self, name):
        self.flows.wait(NEVER)
        if self.refuses:
            raise RuntimeError("Connection reset by peer\nframe #0: in C++")
        return super().get(name)


@pytest.fixture
def faulty(tmp_path):
    return Faulty(tmp_path)


@pytest.fixture
def both(tmp_path, faulty, monkeypatch):
    monkeypatch.setattr(lined, "PATIENCE", 0.3)
    monkeypatch.setattr(lined, "AGAIN", 0.5)
    return opened(
        FailoverStore(
            [StoreConnection("a", lambda: faulty), StoreConnection("b", lambda: FileStoreBackend(tmp_path, "second"))]
        )
    )


def beat(lines, seconds=0.0, pause=0.0):
    until = time.monotonic() + seconds
    while True:
        lines.step(time.monotonic(), pause)
        if time.monotonic() >= until:
            return lines
        time.sleep(0.01)


def opened(lines, seconds=SOON):
    """All of them are alive, which takes threads that a busy machine runs late."""
    lines.namespace = "place"
    until = time.monotonic() + seconds
    while len(lines.alive) < len(lines.all) and time.monotonic() < until:
        beat(lines, 0.01)
    return lines


def until(holds, seconds=SOON):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end


def on(directory, name, entry="place/word"):
    path = directory / f".rankdoctor-{name}" / entry
    return path.read_bytes() if path.exists() else None


def test_messages_go_to_all_connections_and_refreshed_cards_to_the_best(both, tmp_path):
    both.set("word", b"1")
    assert [on(tmp_path, name) for name in ("faulty", "second")] == [b"1", b"1"]
    both.set_on_best("word", b"2")
    assert [on(tmp_path, name) for name in ("faulty", "second")] == [b"2", b"1"]
    assert both.get("word") == b"2"
    assert both.get_many(["word", "none"], both.alive) == {"word": (b"2", b"1")}


@pytest.mark.parametrize("trouble", ["silence", "refusal"])
def test_a_line_that_is_lost_costs_its_patience_once(both, faulty, trouble, monkeypatch):
    both.set("word", b"1")
    if trouble == "silence":
        faulty.flows.clear()
    faulty.refuses = True
    assert beat(both).get("word") == b"1"
    assert len(both.alive) == 1
    monkeypatch.setattr(lined, "PATIENCE", NEVER)
    for _ in range(20):
        assert both.get("word") == b"1"


def test_a_lost_connection_is_reopened(both, faulty, tmp_path):
    reader = both.mailbox("box")
    both.append("box", b"1")
    assert sorted(beat(both).mailbox("box").fresh()) == [b"1", b"1"]
    assert sorted(reader.fresh()) == [b"1", b"1"]
    faulty.refuses = True
    both.get("word")
    both.append("box", b"2")
    assert beat(both).reading == both.all[1:]
    assert reader.fresh() == [b"2"]
    faulty.refuses = False
    assert len(opened(both).alive) == 2
    assert reader.fresh() == [], "what was said in between is on the other"
    both.append("box", b"3")
    assert reader.fresh() == [b"3", b"3"]


def test_a_line_is_not_tried_for_ever(faulty, monkeypatch):
    monkeypatch.setattr(lined, "AGAIN", 0.0)
    opened = []

    def opens():
        opened.append(1)
        raise OSError("nobody listens")

    lines = FailoverStore([StoreConnection("a", opens)])
    until(lambda: len(beat(lines, 0.01) and opened) >= lined.TRIES)
    beat(lines, 0.3)
    assert len(opened) == lined.TRIES


def test_a_line_that_takes_long_to_open_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(lined, "CONNECTING", 1.0)
    opens = threading.Event()
    slow = StoreConnection("a", lambda: (opens.wait(NEVER), FileStoreBackend(tmp_path, "slow"))[1])
    lines = beat(FailoverStore([slow, StoreConnection("b", lambda: FileStoreBackend(tmp_path, "second"))]), 0.1)
    assert lines.reading == ()
    until(lambda: beat(lines, 0.01).reading == lines.all[1:])
    opens.set()
    until(lambda: beat(lines, 0.01).reading == lines.all)
    assert beat(beat(lines, pause=5.0), 0.1, pause=5.0).reading == lines.all[:1], "the others now and then"


def test_only_one_claims(tmp_path):
    first, second = (lambda: FileStoreBackend(tmp_path, "first")), (lambda: FileStoreBackend(tmp_path, "second"))
    both, other = (
        opened(FailoverStore([StoreConnection("a", first), StoreConnection("b", second)])),
        opened(FailoverStore([StoreConnection("b", second)])),
    )
    assert other.exchange("turn", None, b"1")
    assert not both.exchange("turn", None, b"2"), "on one of its lines another one was quicker"
    assert both.exchange("turn-1", None, b"2")
    assert not other.exchange("turn-1", None, b"1")


def test_what_is_left_is_removed_or_emptied(tmp_path):
    store = store_boards("left")()
    lines = opened(
        FailoverStore(
            [
                StoreConnection("bell", lambda: store.backend),
                StoreConnection("bell", lambda: FileStoreBackend(tmp_path, "third")),
            ]
        )
    )
    lines.set("facts/1", b"1")
    lines.append("box", b"1")
    lines.all[1].set("bell/lead", b"1")
    lines.clear_run(["facts/1", "facts/2"])
    assert [line.get("place/facts/1") for line in lines.all] == [b"", None]
    assert lines.all[0].get("place/facts/2") is None
    assert os.listdir(tmp_path / ".rankdoctor-third") == [MARK]


def test_without_lines_all_is_one_s_own():
    lines = beat(FailoverStore(()))
    lines.set("word", b"1")
    lines.append("box", b"1")
    assert (lines.get("word"), lines.mailbox("box").fresh(), lines.get_many(["word"], ())) == (None, [], {})
    assert lines.exchange("turn", None, b"1")


@pytest.fixture
def leaving(tmp_path):
    """The connections of a rank that ends while the final decision is posted."""
    lines = opened(FailoverStore([StoreConnection("a", lambda: FileStoreBackend(tmp_path, "runs"))]))
    lines.set("end/ruling", b"ruling")
    return lines


def entries(folder):
    return [path.name for path in folder.rglob("*") if path.is_file() and path.name != MARK]


def test_an_acknowledgment_stays_as_long_as_the_decision(tmp_path, leaving):
    assert not acknowledge(leaving.all[0], "place", "end/ruling", "end/heard", b"0")
    assert len(entries(tmp_path)) == 2


def test_nothing_is_acknowledged_on_a_board_that_was_cleared(tmp_path, leaving):
    leaving.clear_run(())
    assert not acknowledge(leaving.all[0], "place", "end/ruling", "end/heard", b"0")
    assert entries(tmp_path) == []


def test_an_acknowledgment_is_removed_with_the_board(tmp_path, leaving, monkeypatch):
    """The rank that ruled clears the board just before this one writes."""
    [line] = leaving.all
    append = line.append
    monkeypatch.setattr(line, "append", lambda *entry: (leaving.clear_run(()), append(*entry)))
    assert acknowledge(leaving.all[0], "place", "end/ruling", "end/heard", b"0")
    assert entries(tmp_path) == []


def test_a_folder_is_removed_in_which_a_file_was_made_meanwhile(tmp_path, leaving, monkeypatch):
    """A rank acknowledges after the others' acknowledgments were removed, and before the decision is."""
    remove, late = OpenFolder.remove, [b"0"]

    def removed(folder, name):
        if name == "ruling" and late:
            FileStoreBackend(tmp_path, "runs").append("place/end/heard", late.pop())
        remove(folder, name)

    monkeypatch.setattr(OpenFolder, "remove", removed)
    leaving.clear_run(())
    assert late == []
    assert not [*tmp_path.glob(".rankdoctor-runs/place")]
