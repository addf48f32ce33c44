"""Two boards as one: what the keeper reads and writes while some ranks reach the store and others only the folder."""

import shutil

import pytest

from doctor.cluster.transport.mirrored_store import mirror
from tests.cluster.boards import folder_boards
from tests.cluster.test_board import blocked


@pytest.fixture
def told():
    return []


@pytest.fixture
def sides(tmp_path):
    return folder_boards(tmp_path / "first"), folder_boards(tmp_path / "second")


@pytest.fixture
def both(sides, told):
    first, second = sides
    return mirror(first(), second(), told.append)


def test_both_stores_get_the_coordinators_values(both, sides):
    both.set("call", b"1")
    assert [side().get("call") for side in sides] == [b"1", b"1"]
    assert both.get("call") == b"1"


def test_the_coordinator_reads_both_stores(both, sides):
    box = both.mailbox("nonce/card")
    for number, side in enumerate(sides):
        side().mailbox("nonce/card").append(b"%d" % number)
    both.mailbox("nonce/card").append(b"own")
    assert sorted(box.fresh()) == [b"0", b"1", b"own"]
    assert box.fresh() == []
    sides[1]().mailbox("nonce/card").append(b"late")
    assert box.fresh() == [b"late"]


def test_both_are_cleared(both, sides):
    both.set("ended/verdict", b"")
    both.clear("ended")
    assert [side().get("ended/verdict") for side in sides] == [None, None]


@pytest.mark.parametrize("work", ["set", "fresh", "clear", "close"])
def test_the_second_store_may_be_lost(both, sides, told, tmp_path, work):
    box = both.mailbox("nonce/card")
    sides[0]().mailbox("nonce/card").append(b"1")
    shutil.rmtree(tmp_path / "second", ignore_errors=True)
    (tmp_path / "second").write_bytes(b"")  # nothing can be made below a file
    both.set("call", b"1")
    assert both.get("call") == b"1"
    assert box.fresh() == [b"1"]
    {"set": lambda: both.set("x", b""), "fresh": box.fresh, "clear": lambda: both.clear("x"), "close": both.close}[
        work
    ]()
    assert told == ["the shared folder is lost: ranks that do not reach the store are not heard any more"]


def test_a_blocked_second_store_times_out_before_the_first(sides, told, tmp_path):
    first, second = sides
    hasty = type(first())(first().backend, patience=0.6)
    second().mailbox("nonce/card").append(b"2")
    with blocked(tmp_path / "second"):
        both = mirror(hasty, second(), told.append)
        first().mailbox("nonce/card").append(b"1")
        assert both.mailbox("nonce/card").fresh() == [b"1"]
    assert len(told) == 1
