"""The command in folders that other users can write to: one sentence, exit 3, and nobody's files are harmed."""

import os
import re
import shutil
import stat
import subprocess

import pytest

from doctor.cluster.transport.file_store import STALE_AFTER
from tests.cluster.processes import ABOUT_THE_JOB, DOCTOR, Commands, rank_environ, wait
from tests.lab.ports import free_ports
from tests.lab.sample import long_only
from tests.lab.users import ALICE, BOB, NOBODY, TEAM, belongs_to, public_folder, require_root, run_as, squashed

PORTS = free_ports()
KEY = ".rankdoctor-c3f13a8fd116"
"""The folder of ranks that were started by hand: its name holds no secret."""
MEMORY = 2 << 30


@pytest.fixture
def commands():
    with public_folder() as folder, Commands(folder) as opened:
        yield opened


@pytest.fixture
def share():
    with public_folder() as folder:
        yield folder


def start(commands, number, share, *arguments, before=(), **environ):
    """A rank in the folder, as another user where ``before`` says so."""
    command = [*before, *DOCTOR, "check", "--share", share, "--timeout", "4", *ABOUT_THE_JOB, *arguments]
    return commands.start(command, **{**rank_environ(number, 2, next(PORTS)), **environ})


def refused(command, *words):
    """It ends with 3, and one sentence holds all of these words."""
    assert command.wait() == 3, (command.stdout, command.stderr)
    lines = [line for line in command.stderr.splitlines() if " is not safe to use: " in line]
    assert len(lines) == 1, command.stderr
    assert all(re.search(word, lines[0]) for word in words), lines
    assert command.stdout == ""
    return lines[0]


def test_a_planted_link_deletes_nothing(commands, share, tmp_path):
    require_root()
    home = tmp_path / "home"
    (home / ".ssh").mkdir(parents=True)
    for name in (".ssh/id", "results.csv"):
        (home / name).write_text("mine")
    for path in (*home.rglob("*"),):
        old = path.stat().st_mtime - 3 * STALE_AFTER
        os.utime(path, (old, old))
    (share / KEY).symlink_to(home)
    belongs_to(NOBODY, share / KEY)
    refused(start(commands, 0, share), "is a symbolic link of user nobody", "remove it, or use another folder")
    assert sorted(str(path.relative_to(home)) for path in home.rglob("*")) == [".ssh", ".ssh/id", "results.csv"]
    assert (share / KEY).is_symlink()


@pytest.mark.parametrize("number", [0, 1])
def test_the_folder_of_another_user(commands, share, number):
    require_root()
    (share / KEY).mkdir(mode=0o777)
    (share / KEY).chmod(0o777)
    belongs_to(NOBODY, share / KEY)
    refused(start(commands, number, share), "belongs to user nobody .uid 65534. and .*user root", "--share-group")
    assert os.listdir(share / KEY) == []


def test_redacted_messages_name_no_user(commands, share):
    require_root()
    (share / KEY).mkdir()
    (share / "rank-0.json").write_text("theirs")
    belongs_to(NOBODY, share / KEY, share / "rank-0.json")
    command = start(commands, 0, share, "--redact")
    assert command.wait() == 3
    assert command.stderr.count("name their group with --share-group") == 2
    assert "name their group with --share-group" in command.stderr
    assert "user nobody" not in command.stderr
    assert "65534" not in command.stderr


KINDS = ["endless", "pipe", "folder", "sparse"]
NAMES = ["call", "doorbell", "doorbell/x", "last"]
OTHER_RANK = long_only("each entry of each kind meets one rank")


@pytest.mark.parametrize(
    ("name", "kind", "number"),
    [
        pytest.param(name, kind, number, marks=OTHER_RANK if (row + column + number) % 2 else ())
        for row, name in enumerate(NAMES)
        for column, kind in enumerate(KINDS)
        for number in (0, 1)
    ],
)
def test_entries_that_never_end(commands, share, number, kind, name):
    """They take neither time nor memory, and what they cause is no finding."""
    if (name, kind) == ("doorbell", "folder"):
        pytest.skip("it is one")
    path = share / KEY / name
    path.parent.mkdir(parents=True)
    for folder in (share / KEY, path.parent):
        folder.chmod(0o700)
    {
        "endless": lambda: path.symlink_to("/dev/zero"),
        "pipe": lambda: os.mkfifo(path),
        "folder": path.mkdir,
        "sparse": lambda: (path.touch(), os.truncate(path, MEMORY)),
    }[kind]()
    command = start(commands, number, share, before=["prlimit", f"--as={MEMORY}"])
    # An entry that can't be read is passed over; then the rank judges, and finds that nobody else came.
    assert command.wait() == (3 if name in ("call", "doorbell") else 1), command.stderr


def test_users_who_share_on_purpose(commands, share):
    require_root()
    arguments = ("--share-group", str(TEAM), "--format", "json", "--timeout", "40")
    alice = start(commands, 0, share, *arguments, before=run_as(ALICE, TEAM))
    bob = start(commands, 1, share, *arguments, before=run_as(BOB, TEAM))
    codes = wait(alice, bob)
    assert codes[0] == codes[1] in (0, 1), (alice.stderr, bob.stderr)
    assert alice.report["coverage"]["ranks_seen"] == 2
    assert alice.report["job"]["absent"] == []


def test_the_environment_names_the_group_too(commands, share):
    require_root()
    for number, user in enumerate((ALICE, BOB)):
        start(
            commands,
            number,
            share,
            "--timeout",
            "40",
            before=run_as(user, TEAM),
            DOCTOR_SHARE_GROUP=str(TEAM),
        )
    codes = wait(*commands._started)
    assert codes[0] == codes[1] in (0, 1), [one.stderr for one in commands._started]


def test_users_who_share_by_accident(commands, share):
    """In a project folder, whose group the sentence asks for."""
    require_root()
    belongs_to(0, share, gid=TEAM)
    share.chmod(0o2775)
    alice = start(commands, 0, share, before=run_as(ALICE, TEAM))
    assert alice.wait() == 1, "the other rank is missing"
    refused(start(commands, 1, share, before=run_as(BOB, TEAM)), f"belongs to uid {ALICE}", "--share-group")


def test_a_group_that_is_none(commands, share):
    command = start(commands, 0, share, "--share-group", "no-such-group")
    assert command.wait() == 2
    assert command.stderr == (
        "doctor: the share group 'no-such-group' is not a group on this host: use its name or its number (GID)\n"
    )


def test_an_export_that_squashes_root(commands, share):
    require_root()
    with squashed(share) as mounted:
        refused(start(commands, 0, mounted), "root_squash", "name the group of these files, 65534, with --share-group")
        started = [start(commands, n, mounted, "--share-group", "65534", "--timeout", "40") for n in range(2)]
        codes = wait(*started)
    assert codes[0] == codes[1] in (0, 1), [one.stderr for one in started]


def unshared(*options):
    """A user namespace, in which the folder's owner may be nobody."""
    command = ["unshare", "--user", *options]
    if shutil.which("unshare") is None or subprocess.run([*command, "true"], capture_output=True).returncode:
        pytest.skip("needs user namespaces")
    return command


def test_a_user_namespace_without_a_map(commands, share):
    """All users are one there, and this process is that one."""
    refused(
        start(commands, 0, share, before=unshared()), "every user that its user namespace does not map", "mapped user"
    )


def test_an_owner_whom_the_user_namespace_does_not_map(commands, share):
    require_root()
    (share / KEY).mkdir()
    belongs_to(ALICE, share / KEY)
    refused(
        start(commands, 0, share, before=unshared("--map-root-user")),
        "belongs to .*65534.*, whom this user namespace does not map,",
        "--share-group",
    )


def test_a_group_that_the_user_namespace_does_not_map(commands, share):
    """It stands for all others."""
    command = start(commands, 0, share, "--share-group", "65534", before=unshared("--map-root-user"))
    refused(command, "gid 65534 represents every group that this user namespace does not map")


def test_ranks_in_user_namespaces_meet(commands, share):
    before = unshared("--map-root-user")
    started = [start(commands, number, share, "--timeout", "40", before=before) for number in range(2)]
    codes = wait(*started)
    assert codes[0] == codes[1] in (0, 1), [one.stderr for one in started]
    (folder,) = share.glob(".rankdoctor-*")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_refused_folder_is_reported_when_the_store_works(commands, share):
    require_root()
    (share / KEY).mkdir()
    belongs_to(NOBODY, share / KEY)
    port = next(PORTS)
    command = [*DOCTOR, "check", "--gather", "store", "--share", share, "--timeout", "60", *ABOUT_THE_JOB]
    started = [commands.start(command, **rank_environ(number, 2, port)) for number in range(2)]
    codes = wait(*started)
    assert codes[0] == codes[1] in (0, 1), [one.stderr for one in started]
    assert "belongs to user nobody" in started[0].stderr
