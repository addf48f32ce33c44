"""Which py-spy is run, as whom, and what ends it."""

import os
import sys
import sysconfig
import time
from pathlib import Path

import pytest

from doctor.attach import py_spy
from doctor.attach.py_spy import DumpRequest, find_py_spy, run_dump
from doctor.attach.stop_guard import stop_state
from doctor.core.process import ChildOwner
from tests.attach.readable import SLEEPER, started
from tests.lab.speed import patience
from tests.lab.users import ALICE, public_folder, require_root


def program(folder: Path, text: str, mode: int = 0o755) -> Path:
    path = folder / "py-spy"
    path.write_text(text)
    path.chmod(mode)
    return path


@pytest.fixture
def elsewhere(monkeypatch, tmp_path):
    """An installation without py-spy."""
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path / "absent"))
    return tmp_path


def test_py_spy_of_this_interpreter_comes_first(monkeypatch, tmp_path):
    program(tmp_path, "#!/bin/sh\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_py_spy() == Path(sysconfig.get_path("scripts"), "py-spy")


def test_trusted_py_spy_on_path(monkeypatch, elsewhere):
    elsewhere.chmod(0o755)
    monkeypatch.setenv("PATH", f"{elsewhere}/absent:{elsewhere}")
    assert find_py_spy() is None
    assert program(elsewhere, "#!/bin/sh\n") == find_py_spy()


def test_py_spy_of_the_working_directory_is_not_run(monkeypatch, elsewhere):
    program(elsewhere, "#!/bin/sh\n")
    monkeypatch.chdir(elsewhere)
    monkeypatch.setenv("PATH", ":.")
    assert find_py_spy() is None


def test_py_spy_that_others_may_change_is_not_run(monkeypatch, elsewhere):
    found = program(elsewhere, "#!/bin/sh\n")
    elsewhere.chmod(0o755)
    monkeypatch.setenv("PATH", str(elsewhere))
    for path in (found, elsewhere):
        path.chmod(0o777)
        assert find_py_spy() is None
        path.chmod(0o755)
    assert find_py_spy() == found
    found.chmod(0o644)
    assert find_py_spy() is None


def test_py_spy_of_another_user_is_not_run(monkeypatch, elsewhere):
    require_root()
    elsewhere.chmod(0o755)
    os.chown(program(elsewhere, "#!/bin/sh\n"), ALICE, ALICE)
    monkeypatch.setenv("PATH", str(elsewhere))
    assert find_py_spy() is None


def test_child_of_another_user_has_no_capability_and_no_group():
    require_root()
    with public_folder() as folder, started() as target:
        shows = program(folder, "#!/bin/sh\ncat /proc/self/status\nexec id -G\n")
        request = DumpRequest(target.pid, target.started, owner=ChildOwner(ALICE, ALICE), seconds=patience(5))
        lines = run_dump(shows, request).document.decode().splitlines()
    status = {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
    assert status["Uid"].split() == status["Gid"].split() == [str(ALICE)] * 4
    assert {int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {0}
    assert lines[-1] == str(ALICE)


def test_child_gets_no_variable_of_ours(monkeypatch, tmp_path):
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    with started() as target:
        request = DumpRequest(target.pid, target.started, seconds=patience(5))
        assert b"hunter2" not in run_dump(program(tmp_path, "#!/bin/sh\nenv\n"), request).document


def test_endless_output_is_ended(tmp_path):
    endless = program(tmp_path, "#!/bin/sh\nexec cat /dev/zero\n")
    with started() as target:
        output = run_dump(endless, DumpRequest(target.pid, target.started, seconds=patience(20)))
    assert (output.stopped_by, output.status) == ("size", None)
    assert py_spy.MOST_OUTPUT < len(output.document) < py_spy.MOST_OUTPUT + (1 << 20)


def test_reader_that_hangs_is_ended_at_its_deadline(tmp_path):
    hangs = program(tmp_path, "#!/bin/sh\nexec sleep 300\n")
    with started() as target:
        for blocking in (True, False):
            begin = time.monotonic()
            output = run_dump(hangs, DumpRequest(target.pid, target.started, blocking=blocking, seconds=0.3))
            assert time.monotonic() - begin < patience(3)
            assert (output.stopped_by, output.status) == ("deadline", None)


@pytest.mark.real_time
def test_reader_that_keeps_its_target_stopped_is_ended(tmp_path):
    """PTRACE_SEIZE and PTRACE_INTERRUPT, as py-spy."""
    require_root()
    stops = program(
        tmp_path,
        f"""#!{sys.executable} -S
import ctypes, sys, time
pid = int(sys.argv[sys.argv.index("--pid") + 1])
libc = ctypes.CDLL(None)
assert libc.ptrace(0x4206, pid, None, None) == 0
assert libc.ptrace(0x4207, pid, None, None) == 0
time.sleep(300)
""",
    )
    with started(SLEEPER) as target:
        output = run_dump(stops, DumpRequest(target.pid, target.started, seconds=patience(5)))
        assert output.stopped_by == "pause"
        assert output.paused > py_spy.MOST_PAUSE
        assert stop_state(target.pid).runs_freely
