"""The board in a folder that other users can write to: nothing of theirs is followed, read, or removed."""

import itertools
import os
import re
import resource
import stat
import time

import pytest

from doctor.cluster.rendezvous.process_identity import ProcessIdentity
from doctor.cluster.rendezvous.store_access import RendezvousFailed, open_file_store
from doctor.cluster.transport.file_store import STALE_AFTER, FileStoreBackend
from doctor.cluster.transport.store import KeyValueStore, StoreLost, UntrustedStore
from doctor.core.files import open_folder as opened
from doctor.core.files.open_folder import MARK
from doctor.core.files.own_folder import OwnFolder
from doctor.core.files.trusted_owners import TrustedOwners
from tests.lab.users import ALICE, BOB, NOBODY, TEAM, as_user, belongs_to, public_folder, require_root, squashed

IDENTITY = ProcessIdentity(0, 2, "key")
ROOT = ".rankdoctor-key"
SPARSE = 2 << 30


@pytest.fixture
def share():
    with public_folder() as folder:
        yield folder


@pytest.fixture
def home(tmp_path):
    """A user's files, older than all that is swept."""
    home = tmp_path / "home"
    (home / ".ssh").mkdir(parents=True)
    (home / ".ssh" / "id").write_text("key")
    (home / "0123456789abcdef").mkdir()
    (home / "0123456789abcdef" / "thesis").write_text("text")
    (home / "results").write_text("numbers")
    for path in (*home.rglob("*"), home):
        old = path.stat().st_mtime - 3 * STALE_AFTER
        os.utime(path, (old, old))
    return home


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def board(share, group=None):
    return KeyValueStore(FileStoreBackend(OwnFolder(share, owners=TrustedOwners.here(group)), "key"))


def mode(path):
    return stat.S_IMODE(path.lstat().st_mode)


def use(board):
    """All that is done with a board in a gathering."""
    board.get("call")
    board.set("call", b"1")
    board.append("doorbell", b"1")
    board.mailbox("doorbell").fresh()
    board.clear("0123456789abcdef")


@pytest.mark.parametrize("owner", ["another user", "this user"])
def test_a_link_in_place_of_the_folder(share, home, owner):
    (share / ROOT).symlink_to(home)
    if owner == "another user":
        require_root()
        belongs_to(NOBODY, share / ROOT)
    before = contents(home)
    with pytest.raises(RendezvousFailed, match=rf"{ROOT} is a symbolic link of .*: remove it, or use another folder"):
        open_file_store(share, IDENTITY)
    with pytest.raises(UntrustedStore):
        use(board(share))
    board(share).clear("0123456789abcdef")
    assert contents(home) == before


@pytest.mark.parametrize("rights", [0o777, 0o755, 0o700])
def test_a_folder_of_another_user(share, rights):
    require_root()
    (share / ROOT).mkdir(mode=rights)
    (share / ROOT).chmod(rights)
    belongs_to(ALICE, share / ROOT)
    with as_user(BOB), pytest.raises(RendezvousFailed) as refused:
        open_file_store(share, IDENTITY)
    assert f"{ROOT} belongs to uid {ALICE} and this process runs as uid {BOB}" in refused.value.why
    assert "--share-group" in refused.value.why
    assert str(ALICE) not in refused.value.discreet
    assert os.listdir(share) == [ROOT]
    assert os.listdir(share / ROOT) == []


def test_another_folder_of_this_user_moved_to_its_place(share, home):
    """Who may write to the shared folder may rename what lies in it: nothing is swept that the doctor did not make."""
    home.chmod(0o700)
    home.rename(share / ROOT)
    before = contents(share / ROOT)
    board(share).clear("fedcba9876543210")
    assert contents(share / ROOT) == before


def test_a_folder_of_this_user_that_others_may_write_to(share):
    board(share).set("call", b"1")
    (share / ROOT).chmod(0o777)
    with pytest.raises(RendezvousFailed, match=r"writable by other users \(mode 777\)"):
        open_file_store(share, IDENTITY)


def test_what_is_made_is_for_this_user_alone(share):
    before = os.umask(0)
    try:
        use(board(share))
        board(share).exchange("lead", None, b"1")
        board(share / "new").set("call", b"1")
    finally:
        os.umask(before)
    made = [path for folder in (share / ROOT, share / "new") for path in (folder, *folder.rglob("*"))]
    assert {mode(path) for path in made if path.is_dir()} == {0o700}
    assert {mode(path) for path in made if path.is_file()} == {0o600}


def planted(path, kind):
    """Something at a name of the doctor's that is no message."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "endless":
        path.symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "sparse":
        path.touch()
        os.truncate(path, SPARSE)
    elif kind == "loop":
        path.symlink_to(path)
    else:
        path.write_bytes(b"1")
        belongs_to(NOBODY, path)


KINDS = ["endless", "pipe", "folder", "sparse", "loop", "another user's"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_message_of_ours_is_not_read(share, kind):
    if kind == "another user's":
        require_root()
    board(share).set("last", b"1")
    planted(share / ROOT / "call", kind)
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(StoreLost):
        board(share).get("call")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10
    assert time.monotonic() - began < folders_patience()


def folders_patience():
    """What a call may take before it is given up: this one came back."""
    from doctor.cluster.transport.store import PATIENCE

    return PATIENCE


@pytest.mark.parametrize("kind", KINDS)
def test_entries_that_are_no_messages_of_ours_cost_nothing(share, kind):
    if kind == "another user's":
        require_root()
    one = board(share)
    one.append("doorbell", b"whole")
    for number in range(3):
        planted(share / ROOT / "doorbell" / f"planted-{number}", kind)
    planted(share / ROOT / "doorbell" / ".hidden", "file" if os.geteuid() else kind)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    box = one.mailbox("doorbell")
    assert sorted(box.fresh()) == [b"", b"", b"", b"whole"]
    assert box.fresh() == []
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10


def test_a_box_with_too_many_names(share, monkeypatch):
    monkeypatch.setattr(opened, "MOST_NAMES", 20)
    one = board(share)
    for number in range(21):
        one.append("doorbell", b"%d" % number)
    with pytest.raises(StoreLost, match="more than 20 names"):
        one.mailbox("doorbell").fresh()


def test_a_large_mailbox_is_read_in_several_calls(share, monkeypatch):
    monkeypatch.setattr("doctor.cluster.transport.file_store.AT_ONCE", 100)
    one = board(share)
    for number in range(10):
        one.append("facts", b"%d" % number * 40)
    box = one.mailbox("facts")
    looks = [box.fresh() for _ in range(6)]
    assert max(map(len, looks)) < 5
    assert sorted(itertools.chain(*looks)) == [b"%d" % number * 40 for number in range(10)]


def test_a_gathering_is_removed_without_what_is_not_ours(share, home):
    one = board(share)
    one.append("ended/facts", b"1")
    inner = share / ROOT / "ended" / "facts"
    (inner / "link").symlink_to(home)
    kept = set()
    if os.geteuid() == 0:
        (inner / "theirs").write_text("1")
        belongs_to(NOBODY, inner / "theirs")
        kept = {f"{ROOT}/ended/facts/theirs"}
    before = contents(home)
    one.clear("ended")
    assert contents(home) == before
    assert set(contents(share)) - {f"{ROOT}/{MARK}"} == kept


def test_a_name_that_leads_elsewhere_is_none(share, home):
    for name in ("../home/results", "/etc/passwd", "a/../../home/results", "", "a//b", "."):
        with pytest.raises(StoreLost):
            board(share).get(name)
        with pytest.raises(StoreLost):
            board(share).set(name, b"1")
    board(share).clear("../../home")
    assert set(contents(home)) == {".ssh/id", "0123456789abcdef/thesis", "results"}


def test_the_first_one_s_key_is_everybody_s(share):
    one, other = (FileStoreBackend(share, "key") for _ in range(2))
    key = one.agree("messages", b"k" * 32)
    assert other.agree("messages", b"x" * 32) == key == b"k" * 32
    (path,) = (share / ROOT).glob("messages*")
    assert mode(path) == 0o600
    old = path.stat().st_mtime - 3 * STALE_AFTER
    os.utime(path, (old, old))
    one.clear("ended")
    assert one.agree("messages", b"y" * 32) == key, "it is not swept"
    one.tidy()
    assert os.listdir(share) == []


class TestGroup:
    """Ranks of several users, who share the folder on purpose."""

    @pytest.fixture(autouse=True)
    def root(self):
        require_root()

    def test_members_meet(self, share):
        before = os.umask(0o077)
        try:
            with as_user(ALICE, TEAM):
                board(share, TEAM).set("call", b"1")
                board(share, TEAM).append("doorbell", b"alice")
            with as_user(BOB, TEAM):
                theirs = board(share, TEAM)
                assert theirs.get("call") == b"1"
                theirs.append("doorbell", b"bob")
                theirs.set("call", b"2")
                theirs.append("new/facts", b"3")
            with as_user(ALICE, TEAM):
                ours = board(share, TEAM)
                assert ours.get("call") == b"2"
                assert sorted(ours.mailbox("doorbell").fresh()) == [b"alice", b"bob"]
                assert ours.mailbox("new/facts").fresh() == [b"3"]
                ours.clear("new")
        finally:
            os.umask(before)
        made = [share / ROOT, *(share / ROOT).rglob("*")]
        assert {path.stat().st_gid for path in made} == {TEAM}
        assert {mode(path) for path in made if path.is_dir()} == {0o2770}
        assert {mode(path) for path in made if path.is_file()} == {0o660}
        assert sorted(os.listdir(share / ROOT)) == [MARK, "call", "doorbell"]

    def test_a_project_folder_needs_no_membership_of_its_own(self, share):
        """A setgid folder gives its group to all that is made in it."""
        belongs_to(ALICE, share, gid=TEAM)
        share.chmod(0o2777)
        with as_user(ALICE, TEAM):
            board(share, TEAM).set("call", b"1")
        with as_user(BOB, TEAM):
            assert board(share, TEAM).get("call") == b"1"

    def test_who_is_no_member_is_refused(self, share):
        with as_user(BOB), pytest.raises(RendezvousFailed, match=f"uid {BOB} can't give files to gid {TEAM}"):
            open_file_store(OwnFolder(share, owners=TrustedOwners.here(TEAM)), IDENTITY)
        assert os.listdir(share) == []

    def test_without_the_option_the_sentence_names_it(self, share):
        with as_user(ALICE, TEAM):
            board(share, TEAM).set("call", b"1")
        with (
            as_user(BOB, TEAM),
            pytest.raises(RendezvousFailed, match=r"uid 41001 .*name their group with --share-"),
        ):
            open_file_store(share, IDENTITY)

    def test_another_group_is_refused(self, share):
        with as_user(ALICE, TEAM):
            board(share, TEAM).set("call", b"1")
        with as_user(BOB, TEAM, 41200), pytest.raises(RendezvousFailed, match=r"gid 41100, and .* names gid 41200"):
            open_file_store(OwnFolder(share, owners=TrustedOwners.here(41200)), IDENTITY)

    def test_a_file_that_everybody_may_write_is_not_read(self, share):
        with as_user(ALICE, TEAM):
            one = board(share, TEAM)
            one.set("call", b"1")
            (share / ROOT / "call").chmod(0o666)
            with pytest.raises(UntrustedStore, match="writable by every user"):
                one.get("call")

    def test_what_was_made_for_one_user_is_made_anew(self, share):
        with as_user(ALICE, TEAM):
            board(share).append("doorbell", b"1")
            board(share, TEAM).append("doorbell", b"2")
        with as_user(BOB, TEAM):
            assert board(share, TEAM).mailbox("doorbell").fresh() == [b"2"]

    def test_another_folder_of_this_user_is_not_opened_to_the_group(self, share, home):
        belongs_to(ALICE, home, *home.rglob("*"))
        home.chmod(0o700)
        home.rename(share / ROOT)
        before = contents(share / ROOT)
        with as_user(ALICE, TEAM), pytest.raises(RendezvousFailed, match=f"belongs to gid {ALICE}"):
            open_file_store(OwnFolder(share, owners=TrustedOwners.here(TEAM)), IDENTITY)
        assert contents(share / ROOT) == before
        assert mode(share / ROOT) == 0o700


def test_an_export_that_squashes_root(share):
    require_root()
    with squashed(share) as mounted:
        with pytest.raises(RendezvousFailed) as refused:
            open_file_store(mounted, IDENTITY)
        words = (
            r"what user root \(uid 0\) makes in .* belongs to user nobody \(uid 65534\) .*root_squash.*65534, with --sh"
        )
        assert re.search(words, refused.value.why)
        assert os.listdir(mounted) == []
        use(board(mounted, NOBODY))
        assert board(mounted, NOBODY).get("call") == b"1"
