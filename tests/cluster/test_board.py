"""The board: one contract for whatever carries it."""

import threading
import time
from contextlib import contextmanager
from unittest import mock

import pytest

from doctor.cluster.transport.store import DeadlineWorker, KeyValueStore, StoreLost
from doctor.core.files.open_folder import OpenFolder
from tests.cluster.boards import folder_boards, store_boards
from tests.lab.speed import NEVER, patience

MANY = 8


def test_other_clients_get_the_value_that_was_set(boards):
    one, other = boards(), boards()
    assert other.get("nonce/verdict") is None
    for data in (b"verdict", b"", b"\0\xff\n" * 5, b"last"):
        one.set("nonce/verdict", data)
        assert one.get("nonce/verdict") == data
        assert soon(lambda expected=data: other.get("nonce/verdict") == expected)


def test_a_great_deal_can_be_set(boards):
    data = bytes(range(256)) * (4 << 12)
    board, other = boards(), boards()
    board.set("call", data)
    assert soon(lambda: other.get("call") == data)


def soon(holds):
    """Whether it holds before long: a store does not wait until what is set is there for all."""
    until = time.monotonic() + patience(5)
    while not (held := holds()) and time.monotonic() < until:
        time.sleep(0.005)
    return held


def test_exchange(boards):
    one, other = boards(), boards()
    assert not one.exchange("call", b"somebody's", b"mine")
    assert one.exchange("call", None, b"mine")
    assert soon(lambda: other.get("call") == b"mine")
    assert not other.exchange("call", None, b"theirs")
    assert not other.exchange("call", b"another's", b"theirs")
    assert other.exchange("call", b"mine", b"theirs")
    assert not one.exchange("call", b"mine", b"again")
    assert soon(lambda: one.get("call") == b"theirs")


def test_names_are_exchanged_each_by_itself(boards):
    one, other = boards(), boards()
    for name in ("call", "nonce/turn", "nonce/turns"):
        assert one.exchange(name, None, b"mine")
        assert not other.exchange(name, None, b"theirs")
        assert soon(lambda name=name: other.get(name) == b"mine")
        assert other.exchange(name, b"mine", b"theirs")


@pytest.mark.parametrize("old", [None, b"the last one"])
def test_one_of_many_concurrent_exchanges_succeeds(boards, old):
    first = boards()
    if old is not None:
        first.set("call", old)
        assert soon(lambda: boards().get("call") == old)
    start, won = threading.Barrier(MANY), []

    def exchange(number):
        board = boards()
        look = board.backend.get

        def look_with_all_others(name):
            found = look(name)
            start.wait(10)  # nobody has written yet
            return found

        board.backend.get = look_with_all_others
        if board.exchange("call", old, b"%d" % number):
            won.append(b"%d" % number)

    together(exchange)
    assert len(won) == 1
    assert soon(lambda: first.get("call") == won[0])


def together(work):
    threads = [threading.Thread(target=work, args=(number,)) for number in range(MANY)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)


def test_every_mailbox_reader_gets_every_entry_once(boards):
    writer, early, late = boards(), boards().mailbox("nonce/facts"), boards().mailbox("nonce/facts")
    assert early.fresh() == []
    for data in (b"one", b"two", b""):
        writer.append("nonce/facts", data)
    assert sorted(wait_for(early, 3)) == [b"", b"one", b"two"]
    writer.append("nonce/facts", b"one")
    assert wait_for(early, 1) == [b"one"]
    assert early.fresh() == []
    assert sorted(wait_for(late, 4)) == [b"", b"one", b"one", b"two"]


def wait_for(box, count):
    seen = []
    assert soon(lambda: len(seen) >= count or bool(seen.extend(box.fresh())) or len(seen) >= count)
    return seen


def test_mailboxes_and_values_do_not_mix(boards):
    board = boards()
    board.append("nonce/facts", b"facts")
    board.set("nonce/verdict", b"verdict")
    assert board.mailbox("nonce/hello").fresh() == []
    assert board.mailbox("other/facts").fresh() == []
    assert wait_for(board.mailbox("nonce/facts"), 1) == [b"facts"]


def test_nothing_is_lost_while_many_write_and_one_reads(boards):
    each, reader, seen = 10, boards().mailbox("nonce/facts"), []

    def write(number):
        board = boards()
        for count in range(each):
            board.append("nonce/facts", b"%d %d" % (number, count))

    writing = threading.Thread(target=together, args=(write,))
    writing.start()
    while writing.is_alive():
        seen += reader.fresh()
        time.sleep(0.002)
    seen += wait_for(reader, MANY * each - len(seen))
    assert sorted(seen) == sorted(b"%d %d" % (number, count) for number in range(MANY) for count in range(each))


def test_clear_leaves_others_alone(boards):
    board = boards()
    board.set("ended/verdict", b"1")
    board.set("running/verdict", b"2")
    board.set("call", b"3")
    board.clear("ended")
    assert board.get("running/verdict") == b"2"
    assert board.get("call") == b"3"


def test_a_closed_store_can_be_closed_again(boards):
    board = boards()
    board.set("call", b"1")
    board.close()
    board.close()
    other = boards()
    assert soon(lambda: other.get("call") == b"1")


def test_a_closed_store_says_so():
    board = store_boards("closed")()
    board.close()
    with pytest.raises(StoreLost, match=r"^the store at .* is no longer reachable: it was closed$"):
        board.get("call")


def test_blocking_calls_have_a_timeout(tmp_path):
    board = KeyValueStore(folder_boards(tmp_path)().backend, patience=0.2)
    folder_boards(tmp_path)().set("call", b"1")
    with blocked(tmp_path):
        with pytest.raises(StoreLost, match=rf"^the folder {tmp_path} does not respond$"):
            board.get("call")
        board.patience = NEVER
        for _ in range(50):  # it is not waited for again
            with pytest.raises(StoreLost):
                board.set("verdict", b"")
        board.close()


@contextmanager
def blocked(folder):
    """Whoever reads a file below ``folder`` waits, as on a mount whose server is gone."""
    gone, read = threading.Event(), OpenFolder.read

    def wait(self, name, *arguments, **more):
        return gone.wait(20) if folder in self.path.parents else read(self, name, *arguments, **more)

    with mock.patch.object(OpenFolder, "read", wait):
        try:
            yield
        finally:
            gone.set()  # lets the reader go


def test_what_work_raises_is_raised_where_it_was_asked_for():
    worker = DeadlineWorker()
    assert worker.run(lambda: 7, 5) == 7
    with pytest.raises(KeyError):
        worker.run(lambda: {}["no"], 5)
    assert worker.run(lambda: 8, 5) == 8


@pytest.mark.parametrize("error", [OSError(), RuntimeError(), RuntimeError("no\nstack of C++"), ValueError("no")])
def test_a_lost_store_gives_the_reason_on_one_line(tmp_path, error):
    board = folder_boards(tmp_path)()

    def refuse(_):
        raise error

    with pytest.raises(StoreLost, match=rf"^the folder {tmp_path} is no longer reachable: (no|OSError|RuntimeError)$"):
        board.call(refuse)
