"""A required store with a fallback: for a coordinator whose ranks reach the store, or only the shared folder."""

import shutil

import pytest

from doctor.cluster.transport.failover import FailoverStore, StoreConnection
from doctor.cluster.transport.store import KeyValueStore, StoreLost
from tests.cluster.boards import folder_boards
from tests.cluster.test_board import blocked


@pytest.fixture
def lost():
    return []


@pytest.fixture
def sides(tmp_path):
    return folder_boards(tmp_path / "first"), folder_boards(tmp_path / "second")


def with_fallback(first, second, lost):
    return FailoverStore((StoreConnection.over(second.backend, second.patience, lost.append),), first)


@pytest.fixture
def both(sides, lost):
    first, second = sides
    return with_fallback(first(), second(), lost)


def destroy(directory):
    shutil.rmtree(directory, ignore_errors=True)
    directory.write_bytes(b"")  # nothing can be made below a file


def test_both_stores_get_values_and_entries(both, sides):
    both.set("call", b"1")
    both.append("hello", b"own")
    assert [side().get("call") for side in sides] == [b"1", b"1"]
    assert [side().mailbox("hello").fresh() for side in sides] == [[b"own"], [b"own"]]


def test_values_of_the_required_store_alone_count(both, sides):
    sides[1]().set("call", b"other")
    assert both.get("call") is None
    assert not both.exchange("call", b"other", b"1")
    assert both.exchange("call", None, b"1")
    assert [side().get("call") for side in sides] == [b"1", b"1"]


def test_mailboxes_of_both_stores_are_read(both, sides):
    box = both.mailbox("nonce/facts")
    for number, side in enumerate(sides):
        side().append("nonce/facts", b"%d" % number)
    assert sorted(box.fresh()) == [b"0", b"1"]
    assert box.fresh() == []
    sides[1]().append("nonce/facts", b"late")
    assert box.fresh() == [b"late"]


def test_both_are_cleared(both, sides):
    both.set("ended/verdict", b"")
    both.clear("ended")
    assert [side().get("ended/verdict") for side in sides] == [None, None]


@pytest.mark.parametrize("work", ["set", "fresh", "clear"])
def test_the_fallback_may_be_lost(both, sides, lost, tmp_path, work):
    box = both.mailbox("nonce/facts")
    sides[0]().append("nonce/facts", b"1")
    destroy(tmp_path / "second")
    both.set("call", b"1")
    assert both.get("call") == b"1"
    assert box.fresh() == [b"1"]
    {"set": lambda: both.set("x", b""), "fresh": box.fresh, "clear": lambda: both.clear("x")}[work]()
    both.close()
    assert len(lost) == 1


@pytest.mark.parametrize("work", ["set", "get", "fresh"])
def test_the_loss_of_the_required_store_is_raised(both, lost, tmp_path, work):
    destroy(tmp_path / "first")
    with pytest.raises(StoreLost):
        {"set": lambda: both.set("x", b""), "get": lambda: both.get("x"), "fresh": both.mailbox("x").fresh}[work]()
    assert lost == []


def test_a_blocked_fallback_costs_its_patience_once(sides, lost, tmp_path):
    first, second = sides
    second().append("nonce/facts", b"2")
    with blocked(tmp_path / "second"):
        both = with_fallback(first(), KeyValueStore(second().backend, patience=0.2), lost)
        first().append("nonce/facts", b"1")
        assert both.mailbox("nonce/facts").fresh() == [b"1"]
    assert len(lost) == 1
