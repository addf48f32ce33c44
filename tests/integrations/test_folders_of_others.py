"""The callback's folder, where other users can write: nothing of theirs is followed, and the run is as it would be."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from doctor.core.files.trusted_owners import VARIABLE, UntrustedPath
from doctor.monitor.sinks.console import print_status
from doctor.monitor.telemetry.stacks.stack_files import read_stack_file
from doctor.monitor.watch_options import WatchOptions
from doctor.monitor.watch_session import WatchSession
from doctor.monitor.watchdog.local_peers.stack_dump import StackDumper, stack_file
from tests.lab.needs import clean_environ
from tests.lab.users import ALICE, BOB, NOBODY, TEAM, as_user, belongs_to, public_folder, require_root, run_as


@pytest.fixture
def share():
    with public_folder() as folder:
        yield folder


@pytest.fixture
def home(tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    for name in ("rank-0.json", "report.json", "notes", "rank_0"):
        (home / name).write_text('{"run": "abc-1"}')
    return home


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def watched(default, **options):
    """A run that was watched from its beginning to its end."""
    asked = WatchOptions(**options)
    run = WatchSession(asked, rank=0, world_size=1, directory=asked.folder(default, print_status))
    run.open()
    run.check_start()
    run.close()
    return run.directory


def lines(capfd, *words):
    return [line for line in capfd.readouterr().err.splitlines() if all(word in line for word in words)]


def mode(path):
    return stat.S_IMODE(path.lstat().st_mode)


def test_what_a_run_leaves_is_for_this_user_alone(tmp_path):
    before = os.umask(0)
    try:
        for _ in range(2):
            directory = watched(tmp_path)
    finally:
        os.umask(before)
    made = [directory, *directory.rglob("*")]
    assert {mode(path) for path in made if path.is_dir()} == {0o700}
    assert {mode(path) for path in made if path.is_file()} == {0o600}
    assert {path.name for path in made} >= {"report.json", "rank-0.json", "earlier"}


def test_the_modes_of_a_folder_that_was_there_are_kept(tmp_path):
    (tmp_path / "mine").mkdir(mode=0o755)
    (tmp_path / "mine").chmod(0o775)
    watched(tmp_path, dirpath=tmp_path / "mine")
    assert mode(tmp_path / "mine") == 0o775
    assert mode(tmp_path / "mine" / "report.json") == 0o600


@pytest.mark.parametrize("owner", ["another user", "this user"])
def test_a_link_in_place_of_its_own_folder(share, home, capfd, owner):
    (share / "rankdoctor").symlink_to(home)
    if owner == "another user":
        require_root()
        belongs_to(NOBODY, share / "rankdoctor")
    before = contents(home)
    watched(share)
    assert contents(home) == before
    told = capfd.readouterr().err
    assert told.count("is a symbolic link of") == 1, "one sentence"
    assert "report: not written" in told


def test_a_link_that_the_user_named(share, tmp_path, home, capfd):
    """The user's own is followed, that of another one is not."""
    (tmp_path / "runs").mkdir()
    (share / "mine").symlink_to(tmp_path / "runs")
    watched(tmp_path, dirpath=share / "mine")
    assert (tmp_path / "runs" / "report.json").is_file()
    capfd.readouterr()
    require_root()
    (share / "theirs").symlink_to(home)
    belongs_to(NOBODY, share / "theirs")
    before = contents(home)
    watched(tmp_path, dirpath=share / "theirs")
    assert contents(home) == before
    assert len(lines(capfd, "is a symbolic link of user nobody")) == 1


def test_a_folder_of_another_user(share, capfd):
    require_root()
    (share / "run").mkdir()
    (share / "run").chmod(0o777)
    belongs_to(ALICE, share / "run")
    with as_user(BOB):
        watched(share, dirpath=share / "run")
    assert len(lines(capfd, f"belongs to uid {ALICE} and this process runs as uid {BOB}", "share_group")) == 1
    assert list((share / "run").iterdir()) == []


@pytest.mark.parametrize("name", ["rank-0.json", "report.json", "earlier", "flight-recorder"])
@pytest.mark.parametrize("owner", ["another user", "this user"])
def test_links_at_names_of_its_own(share, home, name, owner):
    directory = share / "run"
    directory.mkdir()
    (directory / "rank-0.json").write_text('{"run": "abc-1"}')
    if name.endswith("json"):
        (directory / "rank-0.json").unlink()
    (directory / name).symlink_to(home / name if name.endswith("json") else home)
    if owner == "another user":
        require_root()
        belongs_to(NOBODY, directory / name)
    before = contents(home)
    watched(share, dirpath=directory)
    assert contents(home) == before


@pytest.mark.parametrize("kind", ["endless", "pipe", "sparse"])
def test_records_that_never_end(share, kind):
    directory = share / "run"
    directory.mkdir()
    for name in ("rank-0.json", "rank-1.json", "report.json"):
        if kind == "endless":
            (directory / name).symlink_to("/dev/zero")
        elif kind == "pipe":
            os.mkfifo(directory / name)
        else:
            (directory / name).touch()
            os.truncate(directory / name, 2 << 30)
    code = (
        "import sys; from pathlib import Path; from tests.integrations.test_folders_of_others import watched;"
        "watched(Path(sys.argv[1]).parent, dirpath=sys.argv[1])"
    )
    command = ["prlimit", f"--as={2 << 30}", sys.executable, "-c", code, directory]
    done = subprocess.run(command, env=clean_environ(share), capture_output=True, text=True, timeout=60)
    assert (done.returncode, "Traceback" in done.stderr, "Error" in done.stderr) == (0, False, False), done.stderr


def test_records_of_other_users_are_not_moved(share, capfd):
    require_root()
    directory = share / "run"
    directory.mkdir(mode=0o777)
    for name in ("rank-0.json", "rank-1.json"):
        (directory / name).write_text('{"run": "abc-1"}')
        belongs_to(NOBODY, directory / name)
    watched(share, dirpath=directory)
    assert {(directory / f"rank-{n}.json").read_text() for n in range(2)} == {'{"run": "abc-1"}'}
    assert len(lines(capfd, "cannot write its record to", "belongs to user nobody")) == 1


def test_a_group_that_shares_the_runs(share, monkeypatch):
    require_root()
    with as_user(ALICE, TEAM):
        directory = watched(share, share_group=TEAM, html_report=True)
    monkeypatch.setenv(VARIABLE, str(TEAM))
    with as_user(BOB, TEAM):
        assert watched(share) == directory
    report = json.loads((directory / "report.json").read_text())
    assert (directory / "report.json").stat().st_uid == BOB
    assert report["verdict"] != "fail"
    made = [directory, *directory.rglob("*")]
    assert {path.stat().st_gid for path in made} == {TEAM}
    assert {mode(path) for path in made if path.is_dir()} == {0o2770}
    assert {mode(path) for path in made if path.is_file()} == {0o660}
    assert len([path for path in made if "earlier" in path.parts and path.is_file()]) == 3


def test_a_group_that_is_none(share, monkeypatch, capfd):
    with pytest.raises(ValueError, match="share_group: the share group 'no-such-group' is not a group"):
        WatchOptions(share_group="no-such-group")
    monkeypatch.setenv(VARIABLE, "no-such-group")
    assert (watched(share) / "report.json").is_file()
    assert len(lines(capfd, VARIABLE, "continuing without a group")) == 1


TRAINING = """
import os, sys
from pathlib import Path
from doctor import DoctorCallback
from tests.integrations.twins import fit
share = Path(sys.argv[1])
for name, dirpath in (("alone", ""), ("refused", str(share / "run"))):
    if not os.fork():
        with open(share / f"{name}.stderr", "w") as errors:
            os.dup2(errors.fileno(), 2)
        left = fit(share / "fit", [DoctorCallback(dirpath, every_n_steps=2)] if dirpath else [], workers=0, devices=1)
        (share / f"{name}.left").write_text(repr(left))
        os._exit(0)
    assert os.wait()[1] == 0, name
    (share / "fit").rename(share / name)
"""


def test_training_goes_on_where_the_folder_is_refused(share, tmp_path):
    """It is the run without the doctor, bit by bit."""
    require_root()
    pytest.importorskip("lightning.pytorch")
    (share / "run").mkdir()
    belongs_to(ALICE, share / "run")
    command = [*run_as(BOB), sys.executable, "-c", TRAINING, share]
    done = subprocess.run(command, env=clean_environ(share), capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr[-3000:]
    for name in ("alone", "refused"):
        errors = (share / f"{name}.stderr").read_text()
        assert errors.count(f"belongs to uid {ALICE}") == (name == "refused"), errors
    assert (share / "alone.left").read_text() == (share / "refused.left").read_text()
    assert Path(share / "run").is_dir()


@pytest.mark.parametrize("where", ["folder", "file"])
def test_stacks_go_through_no_link(share, home, where):
    """A neighbour makes a rank write them at any time."""
    (share / "run").mkdir()
    if where == "folder":
        (share / "run" / ".stacks").symlink_to(home)
        (home / "rank-0.txt").write_text("mine")
    else:
        (share / "run" / ".stacks").mkdir()
        (share / "run" / ".stacks" / "rank-0.txt").symlink_to(home / "notes")
    before, stacks, file = contents(home), StackDumper(), stack_file(share / "run", 0)
    if where == "folder":
        with pytest.raises(UntrustedPath, match="symbolic link"):
            stacks.write_to(file, 1)
        assert read_stack_file(file) == ()
    else:
        stacks.write_to(file, 1)
        assert file.read(99) == b"training thread 0x1\n"
        assert mode(file.path) == 0o600
    stacks.discard(file)
    assert contents(home) == before
