"""Where captures go: nobody else may read them, and no link at a name of the doctor's is followed."""

import json
import os
import stat

import pytest

from tests.core.test_main import doctor
from tests.lab.users import NOBODY, TEAM, belongs_to, public_folder, require_root, squashed

RANK = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533"}


@pytest.fixture
def share():
    with public_folder() as folder:
        yield folder


@pytest.fixture
def diary(tmp_path):
    """A file of the user's that nobody else may read."""
    diary = tmp_path / "diary"
    diary.write_text("mine")
    diary.chmod(0o600)
    return diary


def mode(path):
    return stat.S_IMODE(path.lstat().st_mode)


def is_capture(path):
    return json.loads(path.read_text())["kind"] == "capture"


def test_a_capture_is_for_this_user_alone(tmp_path):
    doctor("capture", "-o", "new.json", cwd=tmp_path)
    doctor("capture", "-o", ".", cwd=tmp_path, **RANK)
    assert {path.name: mode(path) for path in tmp_path.iterdir()} == {"new.json": 0o600, "rank-3.json": 0o600}


def test_a_link_in_a_folder_is_not_followed(share, diary, tmp_path):
    (share / "rank-3.json").symlink_to(diary)
    doctor("capture", "-o", share, cwd=tmp_path, **RANK)
    assert (diary.read_text(), mode(diary)) == ("mine", 0o600)
    assert not (share / "rank-3.json").is_symlink()
    assert is_capture(share / "rank-3.json")
    assert mode(share / "rank-3.json") == 0o600


@pytest.mark.parametrize("what", ["link", "file", "pipe"])
def test_what_another_user_has_there_is_left_alone(share, diary, tmp_path, what):
    require_root()
    path = share / "rank-3.json"
    {
        "link": lambda: path.symlink_to(diary),
        "file": lambda: path.write_text("theirs"),
        "pipe": lambda: os.mkfifo(path),
    }[what]()
    belongs_to(NOBODY, path)
    before = path.lstat()
    done = doctor("capture", "-o", share, cwd=tmp_path, code=2, **RANK)
    assert done.stderr.count("\n") == 1
    assert "user nobody (uid 65534)" in done.stderr
    assert path.lstat().st_ino == before.st_ino
    assert diary.read_text() == "mine"
    assert os.listdir(share) == ["rank-3.json"]


def test_a_link_that_the_user_names_is_followed_and_the_mode_is_kept(tmp_path, diary):
    (tmp_path / "link.json").symlink_to(diary)
    doctor("capture", "-o", "link.json", cwd=tmp_path)
    assert (tmp_path / "link.json").is_symlink()
    assert is_capture(diary)
    assert mode(diary) == 0o600
    for rights in (0o640, 0o644):
        diary.chmod(rights)
        doctor("capture", "-o", "link.json", cwd=tmp_path)
        assert mode(diary) == rights


def test_a_link_that_another_user_put_at_the_named_file_is_not_followed(share, diary):
    require_root()
    link = share / "mine.json"
    link.symlink_to(diary)
    os.lchown(link, NOBODY, NOBODY)
    done = doctor("capture", "-o", str(link), cwd=share)
    assert (done.returncode, diary.read_text()) == (2, "mine")
    assert "symbolic link of user nobody" in done.stderr


def test_a_report_goes_by_the_umask_and_keeps_its_mode(tmp_path):
    before = os.umask(0o027)
    try:
        doctor("check", "--select", "ENV", "-o", "report.txt", cwd=tmp_path)
        assert mode(tmp_path / "report.txt") == 0o640
        (tmp_path / "report.txt").chmod(0o600)
        doctor("check", "--select", "ENV", "-o", "report.txt", cwd=tmp_path)
        assert mode(tmp_path / "report.txt") == 0o600
    finally:
        os.umask(before)


def test_captures_for_a_group(share, tmp_path):
    require_root()
    doctor("capture", "-o", share, "--share-group", TEAM, cwd=tmp_path, **RANK)
    path = share / "rank-3.json"
    assert (mode(path), path.stat().st_gid) == (0o660, TEAM)


def test_captures_on_an_export_that_squashes_root(share, tmp_path):
    """Again and again: what is there was made by this process, as far as the server can tell."""
    require_root()
    with squashed(share) as mounted:
        for _ in range(2):
            doctor("capture", "-o", mounted, cwd=tmp_path, **RANK)
        assert is_capture(mounted / "rank-3.json")
        assert mode(mounted / "rank-3.json") == 0o600


def test_facts_that_are_left_in_a_shared_folder_follow_no_link(share, diary, tmp_path):
    """A rank that finds nobody leaves its capture there."""
    require_root()
    key = share / ".rankdoctor-c3f13a8fd116"
    key.mkdir()
    belongs_to(NOBODY, key)
    (share / "rank-3.json").symlink_to(diary)
    belongs_to(NOBODY, share / "rank-3.json")
    done = doctor("check", "--share", share, "--timeout", "2", cwd=tmp_path, code=3, **RANK)
    assert "cannot write its facts to" in done.stderr
    assert (diary.read_text(), mode(diary)) == ("mine", 0o600)
