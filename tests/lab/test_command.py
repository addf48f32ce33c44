"""The forked command gives what a process of its own gives."""

import os
import stat
import subprocess
import sys

import pytest

from tests.lab.cases import each_case
from tests.lab.command import run_doctor

CLEAN = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "LD_LIBRARY_PATH", "TMPDIR")}


@each_case("arguments", [["--version"], ["list"], ["explain", "NET007"], ["lint", "x.py"], ["diagnose"], ["--help"]])
def test_output_and_exit_code_are_those_of_a_process_of_its_own(tmp_path, arguments):
    (tmp_path / "json.py").write_text("raise SystemExit('the working directory is on the import path')\n")
    command = [sys.executable, "-m", "doctor", *arguments]
    own = subprocess.run(command, cwd=tmp_path, env=CLEAN, capture_output=True, text=True)
    forked = run_doctor(*arguments, cwd=tmp_path, env=CLEAN)
    assert (forked.returncode, forked.stdout, forked.stderr) == (own.returncode, own.stdout, own.stderr)


def test_nothing_is_left_for_the_next_command(tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "doctor.toml").write_text("fail-on = 3\n")
    assert run_doctor("list", cwd=other, env={**CLEAN, "COLUMNS": "40"}).returncode == 2
    assert run_doctor("list", cwd=tmp_path, env=CLEAN).returncode == 0


def test_the_umask_is_inherited(tmp_path):
    before = os.umask(0o027)
    try:
        (tmp_path / "job.log").write_text("[rank0]: ValueError: no\n")
        run_doctor("diagnose", "job.log", "-o", "report.txt", cwd=tmp_path, env=CLEAN)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "report.txt").stat().st_mode) == 0o640


def test_a_command_that_hangs_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.lab.command.patience", lambda seconds: seconds)
    with pytest.raises(subprocess.TimeoutExpired):
        run_doctor("check", cwd=tmp_path, env=CLEAN, seconds=0.001)
    assert run_doctor("--version", cwd=tmp_path, env=CLEAN).returncode == 0
