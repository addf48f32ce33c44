"""The board in a folder: what may stand, vanish or be forbidden there."""

import os
import shutil
import subprocess
from contextlib import contextmanager

import pytest

from doctor.cluster.rendezvous.process_identity import ProcessIdentity
from doctor.cluster.rendezvous.store_access import RendezvousFailed, open_file_store
from doctor.cluster.transport import file_store as carried
from doctor.cluster.transport.store import StoreLost
from doctor.core.files.open_folder import MARK
from tests.cluster.boards import folder_boards, without_rights
from tests.lab.needs import require_namespaces, require_tools

IDENTITY = ProcessIdentity(0, 2, "key")
NOBODY = 65534


@pytest.fixture
def board(tmp_path):
    return folder_boards(tmp_path)()


@pytest.fixture
def root(tmp_path):
    return tmp_path / ".rankdoctor-key"


def test_gatherings_of_other_keys_do_not_mix(tmp_path):
    one, other = folder_boards(tmp_path, "one")(), folder_boards(tmp_path, "other")()
    one.set("call", b"one")
    one.append("facts", b"one")
    assert other.get("call") is None
    assert other.mailbox("facts").fresh() == []


def test_half_a_file_is_never_read(root, board):
    """A writer that died leaves what it wrote aside, and nobody takes it for an entry."""
    board.append("facts", b"whole")
    (root / "facts" / ".0123456789abcdef").write_bytes(b"ha")
    assert board.mailbox("facts").fresh() == [b"whole"]


def test_entries_that_cannot_be_read_do_not_hide_the_others(root, board):
    board.append("facts", b"whole")
    (root / "facts" / "folder").mkdir()
    (root / "facts" / "link").symlink_to("nowhere")
    (root / "facts" / "forbidden").write_bytes(b"")
    (root / "facts" / "forbidden").chmod(0)
    for path in (root.parent, root, *root.rglob("*")):
        os.chown(path, NOBODY if os.geteuid() == 0 else -1, -1, follow_symlinks=False)
    with readable_parents(root), without_rights():
        board = folder_boards(root.parent)()
        box = board.mailbox("facts")
        assert sorted(box.fresh()) == [b"", b"", b"", b"whole"]
        assert box.fresh() == [], "what can't be read is looked at once"


@contextmanager
def readable_parents(path):
    """For whoever has no rights: the folders of pytest are the user's alone."""
    closed = [parent for parent in path.parents if not parent.stat().st_mode & 0o001]
    modes = [(parent, parent.stat().st_mode) for parent in closed]
    for parent, mode in modes:
        parent.chmod(mode | 0o011)
    try:
        yield
    finally:
        for parent, mode in modes:
            parent.chmod(mode)


@pytest.mark.parametrize("name", ["call", "nonce/verdict"])
def test_a_folder_where_a_file_should_be(root, board, name):
    (root / name).mkdir(parents=True)
    with pytest.raises(StoreLost, match="Is a directory"):
        board.get(name)
    with pytest.raises(StoreLost):
        board.set(name, b"")
    assert not [entry for entry in os.listdir((root / name).parent) if entry.startswith(".")]


def test_a_file_where_a_folder_should_be(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    for directory in (tmp_path / "file", tmp_path / "file" / "deeper"):
        with pytest.raises(RendezvousFailed, match=r"file.* is no longer reachable: .*Not a directory"):
            open_file_store(directory, IDENTITY)


def test_a_folder_that_is_forbidden(tmp_path):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    (closed / "deeper").mkdir()
    closed.chmod(0)
    with without_rights(), pytest.raises(RendezvousFailed, match="Permission denied"):
        open_file_store(closed / "deeper", IDENTITY)


def test_a_folder_that_is_not_there_is_made(tmp_path):
    open_file_store(tmp_path / "new" / "one", IDENTITY).store.set("call", b"")
    assert (tmp_path / "new" / "one" / ".rankdoctor-key" / "call").exists()


def test_a_folder_that_vanishes_is_empty_and_can_be_filled_again(root, board):
    board.set("call", b"1")
    box = board.mailbox("facts")
    board.append("facts", b"1")
    shutil.rmtree(root)
    assert board.get("call") is None
    assert box.fresh() == []
    board.append("facts", b"2")
    assert box.fresh() == [b"2"]


@contextmanager
def tiny_disk(path):
    require_namespaces()
    require_tools("mount", "umount")
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "rankdoctor-test", path], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)


def test_a_full_disk(tmp_path):
    with tiny_disk(tmp_path / "disk") as disk:
        board = folder_boards(disk)()
        board.set("call", b"small")
        with pytest.raises(StoreLost, match="No space left on device"):
            board.append("facts", b"x" * (1 << 20))
        assert board.get("call") == b"small"
        board.append("facts", b"y" * (1 << 14))  # nothing of what did not fit is left


def test_only_stale_gathers_are_removed(root, board, monkeypatch):
    board.set("running/verdict", b"")
    board.set("call", b"")
    for name, age in (("left", 2.0), ("younger", 0.5)):
        board.set(f"{name}/verdict", b"")
        board.set(f"{name}-file", b"")
        for entry in (root / name, root / f"{name}-file"):
            before = entry.stat().st_mtime - age * carried.STALE_AFTER
            os.utime(entry, (before, before))
    board.clear("ended")
    assert sorted(os.listdir(root)) == [MARK, "call", "running", "younger", "younger-file"]


def test_clearing_removes_a_gathering_from_the_disk(root, board):
    board.set("ended/verdict", b"")
    board.append("ended/facts", b"")
    board.clear("ended")
    assert os.listdir(root) == [MARK]
