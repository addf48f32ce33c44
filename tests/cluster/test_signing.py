"""What is signed, what is ignored, and where the key comes from."""

from __future__ import annotations

import os

import pytest

from doctor.cluster.transport.file_store import FileStoreBackend
from doctor.cluster.transport.secret_file import VARIABLE, secret_from_environ
from doctor.cluster.transport.signing import SIGNED, RejectedMessages, Secret, SignedBackend
from doctor.cluster.transport.store import KeyValueStore
from doctor.core.errors import UnusableError
from tests.cluster.boards import without_rights

KEY, OTHER = Secret(b"k" * 16, "test"), Secret(b"o" * 16, "test")


class Opened:
    """Boards that show the same, each with its own key."""

    def __init__(self, boards):
        self._boards = boards

    def __call__(self, secret, run="run"):
        board, rejected = self._boards(), RejectedMessages()
        board.wrap(lambda carrier: SignedBackend(carrier, run, secret, rejected))
        board.rejected = rejected
        return board


@pytest.fixture
def opened(boards):
    return Opened(boards)


def test_what_is_signed_is_read(opened):
    one, other = opened(KEY), opened(KEY)
    one.set("call", b"a")
    one.append("hello", b"b")
    one.set("empty", b"")
    assert (other.get("call"), other.mailbox("hello").fresh(), other.get("empty"), other.get("nothing")) == (
        b"a",
        [b"b"],
        b"",
        None,
    )
    assert other.exchange("call", b"a", b"c")
    assert not one.exchange("call", b"a", b"d")
    assert one.get("call") == b"c"
    assert (one.rejected.count, other.rejected.count) == (0, 0)


def test_what_another_key_signed_is_ignored_and_counted_once(opened):
    one, other = opened(KEY), opened(OTHER)
    one.set("call", b"a")
    one.append("hello", b"b")
    hello = other.mailbox("hello")
    for _ in range(3):
        assert (other.get("call"), hello.fresh()) == (None, [])
    assert other.rejected.count == 2
    assert other.rejected.warning == (
        "2 messages could not be authenticated and were ignored. "
        "Give every rank of the job the same DOCTOR_SECRET_FILE."
    )


def test_with_and_without_a_key(opened):
    signs, plain = opened(KEY), opened(None)
    signs.set("call", b"a")
    assert plain.get("call") is None
    assert "they are signed, and this rank has no key" in plain.rejected.warning
    plain.set("call", b"b")
    assert signs.get("call") is None
    assert "1 message could not be authenticated" in signs.rejected.warning
    assert signs.exchange("call", None, b"c"), "what is not authentic is as good as nothing"
    assert signs.get("call") == b"c"


def test_a_message_moved_elsewhere_is_ignored(opened, boards):
    one, raw = opened(KEY), boards()
    one.set("a/verdict", b"0")
    one.append("a/hello", b"h")
    raw.set("b/verdict", raw.get("a/verdict"))
    raw.append("b/hello", raw.mailbox("a/hello").fresh()[0])
    other = opened(KEY)
    assert (other.get("a/verdict"), other.get("b/verdict"), other.mailbox("b/hello").fresh()) == (b"0", None, [])
    assert opened(KEY, "another run").get("a/verdict") is None


def test_a_damaged_signature(opened, boards):
    one, raw = opened(KEY), boards()
    one.set("call", b"message")
    whole = raw.get("call")
    assert whole.startswith(SIGNED)
    for at in range(len(whole)):
        raw.set("call", whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert one.get("call") is None
    for at in range(len(whole)):
        raw.set("call", whole[:at])
        assert one.get("call") is None


def test_a_key_is_not_shown():
    assert "kkkk" not in repr(KEY)


def key_file(path, data=b"0123456789abcdef\n", mode=0o600):
    path.write_bytes(data)
    path.chmod(mode)
    return {VARIABLE: str(path)}


def test_a_key_in_a_file(tmp_path):
    assert secret_from_environ({}) is None
    assert secret_from_environ({VARIABLE: ""}) is None
    first, second = (
        secret_from_environ(key_file(tmp_path / "a")),
        secret_from_environ(key_file(tmp_path / "b", b"0123456789abcdef")),
    )
    assert first.signer("run")("name", b"x") == second.signer("run")("name", b"x")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert secret_from_environ({VARIABLE: str(tmp_path / "link")}) is not None


@pytest.mark.parametrize(
    ("data", "mode", "why"),
    [
        (b"0123456789abcde", 0o600, "a key has 16 to 4096 bytes; this one has 15"),
        (b"", 0o600, "this one has 0"),
        (b"x" * 5000, 0o600, "this one has more than 4096"),
        (b"0123456789abcdef", 0o640, "other users have access to it (mode 0640): chmod 600"),
        (b"0123456789abcdef", 0o604, "other users have access"),
        (b"0123456789abcdef", 0o622, "other users have access"),
    ],
)
def test_a_file_that_is_no_key(tmp_path, data, mode, why):
    with pytest.raises(UnusableError, match=r"\(DOCTOR_SECRET_FILE\) is not used: ") as refused:
        secret_from_environ(key_file(tmp_path / "key", data, mode))
    assert why in str(refused.value)
    assert "\n" not in str(refused.value)


def test_files_of_other_kinds(tmp_path):
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "nothing", "/dev/zero"):
        with pytest.raises(UnusableError, match=VARIABLE):
            secret_from_environ({VARIABLE: str(path)})


def test_another_users_file(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("needs root")
    environ = key_file(tmp_path / "key")
    os.chown(tmp_path / "key", 65534, 65534)
    with pytest.raises(UnusableError, match="it belongs to uid 65534, and this process runs as uid 0"):
        secret_from_environ(environ)
    with without_rights(), pytest.raises(UnusableError):
        secret_from_environ(environ)  # its folder may not be entered


def test_stores_without_a_signing_layer_are_unchanged(tmp_path):
    board = KeyValueStore(FileStoreBackend(tmp_path, "key"))
    board.set("call", b"a")
    assert board.get("call") == b"a"
