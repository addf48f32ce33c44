"""How the command ends when its machine are hostile: streams, signals, directories, names, people's files."""

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from doctor.core.capture import encode_document, to_document
from doctor.facts import SoftwareFacts
from doctor.testing import healthy
from tests.lab.sample import long_only
from tests.lab.speed import patience

CLEAN = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "LD_LIBRARY_PATH", "TMPDIR")}
DOCTOR = [sys.executable, "-m", "doctor"]
CAPTURE = encode_document(to_document(healthy(1, 2).alter(SoftwareFacts, ranks=(1,), nccl_libraries=()).job()))
ROOT = str(Path(__file__).parents[2])
SICK = ["diagnose", "capture.json", "--select", "NCCL008"]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "capture.json").write_bytes(CAPTURE)
    return tmp_path


def doctor(*arguments, cwd, code, before="", **variables):
    """Run it in a shell that does ``before`` first."""
    script = f'{before}\nexec "$@"'
    command = ["bash", "-c", script, "bash", *DOCTOR, *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, env={**CLEAN, **variables}, capture_output=True, timeout=patience(60))
    errors = done.stderr.decode()
    assert "Traceback" not in errors
    assert done.returncode == code, (done.returncode, errors)
    return done.stdout.decode(), errors


@pytest.mark.parametrize("closed", ["exec >&-", "exec 2>&-", "exec <&- >&- 2>&-"])
def test_closed_streams_leave_the_exit_code(folder, closed):
    doctor(*SICK, cwd=folder, code=1, before=closed)
    doctor("list", cwd=folder, code=0, before=closed)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_a_full_disk_is_one_sentence(folder):
    for arguments in (
        SICK,
        [*SICK, "--format", "json"],
        ["list"],
        ["check"],
        ["--help"],
        ["check", "-h"],
        ["--version"],
    ):
        _, errors = doctor(*arguments, cwd=folder, code=2, before="exec >/dev/full")
        assert errors == "doctor: cannot write to standard output: No space left on device\n"


@pytest.mark.parametrize("arguments", [SICK, ["check"], ["list"], ["--help"], ["--version"]])
def test_a_limit_on_the_size_of_files_is_one_sentence(folder, arguments):
    done = subprocess.run(
        ["bash", "-c", 'ulimit -f 0\n"$@" >out.txt', "bash", *DOCTOR, *arguments],
        cwd=folder,
        env=CLEAN,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (2, "doctor: cannot write to standard output: File too large\n")


@pytest.mark.real_time  # CPython 3.11 unwinds an exception for ever if it lacks memory for one integer (ceval.c, lasti)
@pytest.mark.parametrize("kilobytes", [100_000, 200_000, 300_000])
def test_a_limit_on_memory_is_no_finding(folder, kilobytes):
    """Between what the interpreter needs and what a check needs: on the way an allocation or a thread fails."""
    script = f'ulimit -v {kilobytes}\nexec "$@"'
    done = subprocess.run(
        ["bash", "-c", script, "bash", *DOCTOR, "check", "--timeout", "5"],
        cwd=folder,
        env=CLEAN,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "Traceback" not in done.stderr
    if done.returncode == -signal.SIGABRT:
        # CPython 3.11 itself may abort where an allocation fails, and says so; that is no finding.
        assert "Fatal Python error: " in done.stderr
        return
    assert done.returncode in (0, 3)
    # A thread may lack even the memory for the arguments of sys.unraisablehook; the interpreter names that on the line.
    assert done.returncode == 0 or "doctor: " in done.stderr


@pytest.mark.parametrize("command", ["check", "capture"])
def test_a_deleted_working_directory_breaks_no_collector(folder, command):
    _, errors = doctor(
        command, cwd=folder, code=0, before='mkdir "$PWD/gone" && cd gone && rmdir "$PWD"', PYTHONPATH=ROOT
    )
    assert errors == ""


def test_a_failure_of_its_own_is_no_finding(folder):
    """A library that is broken where it is installed, as after an update that was cut off."""
    (folder / "broken" / "rich").mkdir(parents=True)
    (folder / "broken" / "rich" / "__init__.py").write_text("raise KeyError('half an update')")
    variables = {"PYTHONPATH": f"{folder / 'broken'}:{ROOT}"}
    _, errors = doctor("check", cwd=folder, code=3, **variables)
    assert errors.startswith("doctor: internal error at __init__.py:1: KeyError: 'half an update'; there is no verdict")
    done = subprocess.run(
        [*DOCTOR, "check"],
        cwd=folder,
        env={**CLEAN, **variables, "DOCTOR_TRACEBACK": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, "Traceback" in done.stderr) == (3, True)


def test_what_a_reader_of_help_leaves_unread_is_no_finding(folder):
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([*DOCTOR, "check", "--help"], cwd=folder, env=CLEAN, stdout=writing, timeout=patience(60))
    os.close(writing)
    assert done.returncode == 0


def test_a_report_goes_into_a_pipe_by_its_name(folder):
    out, _ = doctor(*SICK, "-o", "/dev/stdout", cwd=folder, code=1)
    assert "NCCL008" in out
    read = subprocess.run(
        ["bash", "-c", 'exec "$@" -o >(cat >copy.txt; touch done)', "bash", *DOCTOR, *SICK],
        cwd=folder,
        env=CLEAN,
        timeout=60,
    )
    while not (folder / "done").exists():
        time.sleep(0.01)
    assert (read.returncode, "NCCL008" in (folder / "copy.txt").read_text()) == (1, True)


def test_a_capture_makes_the_folder_that_a_slash_names(folder):
    for rank in (0, 1):
        doctor("capture", "-o", "captures/", cwd=folder, code=0, SLURM_PROCID=str(rank), RANK=str(rank), WORLD_SIZE="2")
    assert sorted(file.name for file in (folder / "captures").iterdir()) == ["rank-0.json", "rank-1.json"]
    assert (folder / "captures" / "rank-0.json").stat().st_mode & 0o777 == 0o600


ESCAPES = "\x1b]0;title\x07\x1b]52;c;Zm9v\x07\x9b31m\u202e"


def test_nothing_steers_the_terminal_from_standard_error(folder):
    """A reason in a capture, a file name that a shell pattern found, an option that is none."""
    broken = json.loads(CAPTURE)
    for part in (*broken["hosts"], *broken["ranks"]):
        part["facts"].pop("storage", None)
        part.setdefault("missing", {})["storage"] = {"lack": "failed", "reason": ESCAPES}
    (folder / "broken.json").write_text(json.dumps(broken))
    for arguments in (
        ["diagnose", "broken.json"],
        ["diagnose", ESCAPES],
        ["check", f"--{ESCAPES}"],
        ["explain", ESCAPES],
    ):
        script = 'exec "$@" 2>&1 >/dev/null'
        done = subprocess.run(
            ["bash", "-c", script, "bash", *DOCTOR, *arguments],
            cwd=folder,
            env=CLEAN,
            capture_output=True,
            timeout=patience(60),
        )
        assert not set("\x1b\x07\x9b\u202e") & set(done.stdout.decode())
        assert done.stdout


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_reader_that_left_does_not_change_the_verdict(folder, form):
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [*DOCTOR, *SICK, "--format", form],
        cwd=folder,
        env=CLEAN,
        stdout=writing,
        stderr=subprocess.PIPE,
        timeout=patience(60),
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, b"")


def test_a_directory_that_was_deleted(folder):
    gone = folder / "gone"
    gone.mkdir()
    doctor("diagnose", folder / "capture.json", "--select", "NCCL008", cwd=gone, code=1, before='rmdir "$PWD"')


def test_without_a_home(folder):
    (folder / "doctor.toml").write_text('[directories]\ncheckpoint = "~nobody-of-that-name/runs"\n')
    doctor(*SICK, cwd=folder, code=1, before="unset HOME")


@pytest.mark.parametrize(
    "columns",
    [
        "0",
        "²",
        "99999999",
        *(
            pytest.param(columns, marks=long_only("other widths that no terminal has are tried"))
            for columns in ("1", "-5", "wide", "999999999999")
        ),
    ],
)
def test_widths_that_no_terminal_has(folder, columns):
    out, _ = doctor(*SICK, cwd=folder, code=1, COLUMNS=columns, LINES="²")
    assert max(map(len, out.splitlines())) <= 1000
    doctor("list", cwd=folder, code=0, COLUMNS=columns)


@pytest.mark.timeout(30)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_and_what_it_started(tmp_path, number, code):
    started = tmp_path / "started"
    os.mkfifo(started)
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f'#!/bin/sh\nsleep 600 &\necho "$$ $!" > {started}\nwait\n')
    scontrol.chmod(0o755)
    environ = {**CLEAN, "PATH": f"{scontrol.parent}:{CLEAN['PATH']}", "SLURM_JOB_ID": "7"}
    running = subprocess.Popen(
        [*DOCTOR, "check"], cwd=tmp_path, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    children = [int(word) for word in started.read_text().split()]
    running.send_signal(number)
    out, errors = running.communicate(timeout=patience(60))
    assert (running.returncode, out) == (code, b"")
    assert b"Traceback" not in errors
    while any(map(_runs, children)):  # killed, which may take a moment; the limit on a test ends this
        time.sleep(0.01)


def _runs(pid):
    try:
        with open(f"/proc/{pid}/stat") as stream:
            return stream.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def test_files_of_the_user_are_not_taken_for_our_packages(folder):
    (folder / "rich").mkdir()
    for name in ("click.py", "checks.py", "msgspec.py", "rich/__init__.py", "signal.py"):
        (folder / name).write_text("raise SystemExit('this is not the package')")
    doctor(*SICK, cwd=folder, code=1)


def test_what_a_guest_prints_does_not_get_into_the_document(folder):
    (folder / "guest.py").write_text(
        "from doctor.api import *\n"
        "print('loaded')\n"
        "@check(id='ACME001', severity=Severity.ERROR)\n"
        "def loud(job):\n"
        "    print('judging')\n"
        "    yield Skip('quiet now')\n"
    )
    out, errors = doctor(*SICK, "--plugin", "guest.py", "--format", "json", cwd=folder, code=1)
    assert json.loads(out)["verdict"] == "fail"
    assert "loaded" in errors
    out, _ = doctor("list", "--plugin", "guest.py", "--format", "json", cwd=folder, code=0)
    assert json.loads(out)["schema"] == 1


def test_names_that_are_not_utf8(folder):
    os.rename(folder / "capture.json", os.fsencode(folder) + b"/\xff\x1b[31m.json")
    out, _ = doctor("diagnose", ".", "--select", "NCCL008", "--format", "json", cwd=folder, code=1)
    assert json.loads(out)["inputs"][0]["path"] == "\ufffd\x1b[31m.json"
    name = os.fsencode("\udcff\x1b[31m.json")
    done = subprocess.run([*DOCTOR, "diff", name, name, "--format", "json"], cwd=folder, env=CLEAN, capture_output=True)
    assert json.loads(done.stdout)["before"] == "\ufffd\x1b[31m.json"
    for form in ("text", "markdown", "junit", "github"):
        out, _ = doctor("diagnose", ".", "--format", form, cwd=folder, code=1)
        assert "\x1b" not in out


def test_environment_values_that_are_not_utf8(tmp_path):
    environ = {**{os.fsencode(k): os.fsencode(v) for k, v in CLEAN.items()}, b"NCCL_SOCKET_IFNAME": b"\xe9th0\x1b[2J"}
    done = subprocess.run([*DOCTOR, "check"], cwd=tmp_path, env=environ, capture_output=True, timeout=patience(60))
    assert done.returncode == 1, done.stderr
    assert b"\x1b" not in done.stdout
    assert b"Traceback" not in done.stderr


def test_an_unusable_word_is_shown_and_not_obeyed(tmp_path):
    _, errors = doctor("explain", "\x1b[31m" + "A" * 5000, cwd=tmp_path, code=2)
    assert errors.startswith("doctor: unknown check '\\x1b[31mAAA")
    assert errors.count("\n") == 1


def test_output_through_a_link_and_under_a_long_name(folder):
    (folder / "latest.json").symlink_to(folder / "real.json")
    doctor(*SICK, "-o", "latest.json", cwd=folder, code=1)
    assert (folder / "latest.json").is_symlink()
    assert (folder / "real.json").is_file()
    doctor(*SICK, "-o", "x" * 250, cwd=folder, code=1)
    assert stat.S_IMODE((folder / ("x" * 250)).stat().st_mode) & 0o400


def test_patterns_of_hosts_are_meant_for_real_names_also_where_stand_ins_are_shown(folder):
    (folder / "doctor.toml").write_text('[[ignore]]\nid = "NCCL008"\nreason = "known"\nhost = "node*"\n')
    doctor(*SICK, cwd=folder, code=0)
    out, _ = doctor(*SICK, "--redact", cwd=folder, code=0)
    assert "node0" not in out


@pytest.mark.skipif(shutil.which("setpriv") is None or os.geteuid() != 0, reason="needs root and setpriv")
class TestWithoutTheRightToLook:
    UNPRIVILEGED = "setpriv --bounding-set=-all --inh-caps=-all true || exit 99; set -- setpriv --bounding-set=-all "
    UNPRIVILEGED += '--inh-caps=-all "$@"'

    @pytest.fixture
    def closed(self, folder):
        closed = folder / "closed"
        closed.mkdir()
        closed.chmod(0)
        return closed

    def test_a_folder_that_is_closed_is_listed(self, folder, closed):
        out, _ = doctor(
            *("diagnose", ".", "--select", "NCCL008", "--format", "json"),
            cwd=folder,
            code=1,
            before=self.UNPRIVILEGED,
        )
        why = {one["path"]: one["skipped"] for one in json.loads(out)["inputs"]}
        assert why["capture.json"] is None
        assert "Permission denied" in why["closed"]

    @pytest.mark.parametrize(
        "arguments",
        [
            ["diagnose", "closed"],
            ["diagnose", "closed/capture.json"],
            ["capture", "-o", "closed/capture.json"],
            [*SICK, "-o", "closed/report.txt"],
            [*SICK, "--plugin", "closed/guest.py"],
            ["diff", "closed/a.json", "capture.json"],
        ],
    )
    def test_one_sentence(self, folder, closed, arguments):
        _, errors = doctor(*arguments, cwd=folder, code=2, before=self.UNPRIVILEGED)
        assert errors.startswith("doctor: ")
        assert errors.count("\n") == 1
