"""Whoever can write to the board of a job, as a process of its own: what it can't make the ranks do."""

import os
import secrets
import sys

import pytest

from doctor.cluster.rendezvous.process_identity import process_identity
from doctor.cluster.transport.secret_file import VARIABLE
from tests.cluster.processes import ABOUT_THE_JOB, LIMIT, Commands, rank_environ, until, wait
from tests.lab.ports import free_ports
from tests.lab.sample import long_only
from tests.lab.speed import VARIABLE as SLOWNESS
from tests.lab.speed import patience, slowness

PORTS = free_ports()
WAITED_OUT = patience(5)
"""Seconds of a gathering in which a rank waits for another one in vain."""
SICK = {"NCCL_SOCKET_IFNMAE": "eth0"}
"""A variable that a rank finds wrong by itself."""
BY_ITSELF = ["--select", "NCCL001", "--fail-on", "warning"]


@pytest.fixture
def commands(tmp_path):
    with Commands(tmp_path) as opened:
        yield opened


class Stage:
    """A job of two ranks that meet in a folder or in the store of rank 0, and one that is none of them."""

    def __init__(self, commands, folder, carrier):
        self.commands, self.folder, self.carrier, self.port = commands, folder, carrier, next(PORTS)
        self.environ = {}

    def with_a_key(self):
        path = self.folder / "key"
        path.write_text(secrets.token_hex(16))
        path.chmod(0o600)
        self.environ = {VARIABLE: str(path)}

    def hostile(self, role, *arguments):
        key = process_identity(rank_environ(0, 2, self.port)).key
        share = self.folder / "share"
        where = f"folder:{share}" if self.carrier == "folder" else f"store:{self.port}"
        command = [sys.executable, "-m", "tests.cluster.hostile", where, key, role, *arguments]
        stranger = self.commands.start(command, **{SLOWNESS: f"{slowness():.2f}"})
        until(lambda: "ready" in stranger.stdout or stranger.process.poll() is not None)
        return stranger

    def rank(self, number, *arguments, seconds=WAITED_OUT, **environ):
        together = ["--share", self.folder / "share"] if self.carrier == "folder" else ["--gather", "store"]
        options = [*together, "--timeout", f"{seconds:.0f}", "--format", "json", *arguments]
        return self.commands.rank(number, 2, self.port, "check", *options, **{**self.environ, **environ})


@pytest.fixture(params=["folder", "store"])
def stage(request, commands, tmp_path):
    if request.param == "store":
        pytest.importorskip("torch", reason="the store is torch's")
    return Stage(commands, tmp_path, request.param)


ORDERS = ["environment", "experiment", "storage"]
SAME_CHANGES = long_only("the order that changes the environment is run")
NOBODY_LISTENS = long_only("a signed run listens to no order, whichever it is")


@pytest.mark.parametrize(
    ("stage", "role", "with_key"),
    [pytest.param("store", role, False, id=f"store-without a key-{role}") for role in (ORDERS[0], ORDERS[2])]
    + [pytest.param("store", ORDERS[1], False, id=f"store-without a key-{ORDERS[1]}", marks=SAME_CHANGES)]
    + [pytest.param("store", ORDERS[0], True, id="store-with a key")]
    + [pytest.param("folder", ORDERS[0], False, id=f"folder-without a key-{ORDERS[0]}")]
    + [
        pytest.param("folder", role, False, id=f"folder-without a key-{role}", marks=NOBODY_LISTENS)
        for role in ORDERS[1:]
    ]
    + [pytest.param("folder", ORDERS[0], True, id="folder-with a key", marks=NOBODY_LISTENS)],
    indirect=["stage"],
)
def test_orders_of_a_stranger_do_nothing(stage, tmp_path, role, with_key):
    """It poses as the coordinator. Without a key the ranks listen to it: and do nothing that they would not do anyway,
    and rank 0, whose report is never made, does not leave with 0. With a key nobody listens; a job that meets in a
    folder has one there."""
    is_signed = with_key or stage.carrier == "folder"
    if with_key:
        stage.with_a_key()
    victim = tmp_path / "victim"
    victim.mkdir()
    proof = victim / "proof"
    asked = ["--probe", "full"] if role == "storage" else ["--why"]
    stranger = stage.hostile(role, str(proof))
    ranks = [stage.rank(number, *asked, "--select", "ENV", seconds=LIMIT) for number in range(2)]
    if is_signed:
        # Full probes of two real ranks take their time, and what the stranger says changes nothing of it.
        until(lambda: stranger.process.poll() is not None)
        assert "came" not in stranger.stdout, "nobody came to its gathering"
        for rank in ranks:
            rank.end()
    else:
        codes = wait(*ranks)
        assert {"came 0", "came 1"} <= {*stranger.stdout.splitlines()}
        assert codes[0] in (1, 3)
        assert codes[1] in (0, 1, 3), "by what it found itself"
    assert os.listdir(victim) == []


def test_a_forged_verdict_clears_no_rank(stage):
    """Rank 1 finds an error in itself, the stranger tells all that nothing was found and poses as both ranks."""
    stranger = stage.hostile("forger")
    first = stage.rank(0, *BY_ITSELF)
    if stage.carrier == "store":
        until(lambda: "heard" in stranger.stdout)
    codes = wait(first, stage.rank(1, *BY_ITSELF, **SICK))
    assert stage.carrier == "store" or "heard" not in stranger.stdout
    assert codes[1] == 1, "its own facts"
    assert codes[0] in (1, 3), "rank 1 was judged, or is not known"


def test_with_a_key_a_forger_changes_nothing(stage):
    stage.with_a_key()
    stranger = stage.hostile("forger")
    ranks = [stage.rank(number, *ABOUT_THE_JOB, seconds=LIMIT) for number in range(2)]
    assert wait(*ranks) == [0, 0]
    assert ranks[0].report["coverage"]["ranks_seen"] == 2
    assert "posed" not in stranger.stdout


EACH_ONCE = long_only("each carrier and each rank without a key is run once")


@pytest.mark.parametrize(
    ("stage", "keyed"),
    [
        ("folder", 0),
        ("store", 1),
        pytest.param("folder", 1, marks=EACH_ONCE),
        pytest.param("store", 0, marks=EACH_ONCE),
    ],
    indirect=["stage"],
)
def test_one_rank_has_no_key(stage, keyed):
    """Neither hangs, nobody is called absent, and the sentence names the variable."""
    environ = stage.with_a_key() or stage.environ
    stage.environ = {}
    ranks = [stage.rank(number, *ABOUT_THE_JOB, **(environ if number == keyed else {})) for number in range(2)]
    assert wait(*ranks) == [3, 3]
    for rank in ranks:
        assert "DOCTOR_SECRET_FILE" in rank.stderr


def test_a_key_that_can_not_be_used_is_unusable_input(stage, tmp_path):
    (tmp_path / "short").write_text("short")
    (tmp_path / "short").chmod(0o600)
    rank = stage.rank(1, **{VARIABLE: str(tmp_path / "short")})
    assert rank.wait() == 2
    assert rank.stderr == (
        f"doctor: {tmp_path}/short (DOCTOR_SECRET_FILE) is not used: a key has 16 to 4096 bytes; this one has 5\n"
    )
