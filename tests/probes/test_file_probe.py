"""One file in one directory: written by a real child, seen by others, and gone afterwards whatever happens."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from doctor.probes.runtime.deadline import ProbeDeadline
from doctor.probes.storage.file_probe import COMMAND, ProbeDirectory, WrittenFile, read_files

SIZE = 3 << 20
NAME = ".rankdoctor-probe-0-node0"


def place(folder: Path, size: int = SIZE, name: str = NAME) -> ProbeDirectory:
    return ProbeDirectory(str(folder), "checkpoint", name, size, "node0")


def written(folder: Path, size: int = SIZE, command: tuple[str, ...] = COMMAND) -> WrittenFile:
    return WrittenFile(place(folder, size), 10.0, command)


def wait_until(done: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_it_is_written_read_and_removed(tmp_path: Path) -> None:
    file = written(tmp_path)
    trial = file.trial(ProbeDeadline(10))
    assert (trial.bytes, trial.error, trial.path, trial.role) == (SIZE, None, str(tmp_path), "checkpoint")
    assert trial.write_seconds > 0 < trial.sync_seconds
    [reading] = read_files([place(tmp_path)], ProbeDeadline(10))
    assert (reading.outcome, reading.writer) == ("whole", "node0")
    file.remove(ProbeDeadline(5))
    assert list(tmp_path.iterdir()) == []


def test_other_bytes_are_told_from_the_right_ones(tmp_path: Path) -> None:
    file = written(tmp_path)
    file.trial(ProbeDeadline(10))
    with (tmp_path / NAME).open("r+b") as stream:
        stream.seek(SIZE - 1)
        stream.write(b"\0")
    longer, shorter, changed = read_files(
        [place(tmp_path, SIZE - 5), place(tmp_path, SIZE + 5), place(tmp_path)], ProbeDeadline(10)
    )
    assert [one.outcome for one in (longer, shorter, changed)] == ["other"] * 3
    file.remove(ProbeDeadline(5))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    [reading] = read_files([place(tmp_path)], ProbeDeadline(10))
    assert (reading.outcome, reading.error) == ("absent", None)
    assert reading.seconds >= 1, "another host may need a moment to see a new file"


def test_what_exists_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text("mine")
    assert written(tmp_path).trial(ProbeDeadline(10)).error == "File exists"
    time.sleep(0.1)
    assert (tmp_path / NAME).read_text() == "mine"


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / NAME).symlink_to(tmp_path / "elsewhere")
    assert written(tmp_path).trial(ProbeDeadline(10)).error is not None
    assert not (tmp_path / "elsewhere").exists()


def test_a_directory_that_is_gone(tmp_path: Path) -> None:
    assert written(tmp_path / "runs").trial(ProbeDeadline(10)).error == "No such file or directory"


def test_a_child_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    file = written(tmp_path)
    file.trial(ProbeDeadline(10))
    file.give_up()
    wait_until(lambda: list(tmp_path.iterdir()) == [])


def test_a_doctor_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    program = f"""
import time
from doctor.probes.runtime.deadline import ProbeDeadline
from doctor.probes.storage.file_probe import ProbeDirectory, WrittenFile
file = WrittenFile(ProbeDirectory({str(tmp_path)!r}, "checkpoint", {NAME!r}, {SIZE}), 10.0)
print(file.trial(ProbeDeadline(10)).error, flush=True)
time.sleep(60)
"""
    doctor = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert doctor.stdout.readline() == "None\n"
    assert (tmp_path / NAME).exists()
    doctor.send_signal(signal.SIGKILL)
    doctor.wait()
    doctor.stdout.close()
    wait_until(lambda: list(tmp_path.iterdir()) == [])


def test_no_answer_in_time(tmp_path: Path) -> None:
    silent = (sys.executable, "-c", "import time; time.sleep(60)")
    file = written(tmp_path, command=silent)
    assert file.trial(ProbeDeadline(0.6)).error == "no answer within 1 s"
    [reading] = read_files([place(tmp_path)], ProbeDeadline(0.3), silent)
    assert reading.outcome == "silent"


@pytest.mark.parametrize("command", [("/does/not/exist",), (sys.executable, "-c", "print('{')")])
def test_a_child_that_can_not_try(tmp_path: Path, command: tuple[str, ...]) -> None:
    trial = written(tmp_path, command=command).trial(ProbeDeadline(10))
    assert trial.error.startswith("not tried")
    assert read_files([place(tmp_path)], ProbeDeadline(10), command) == []


def test_a_directory_named_from_where_the_rank_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    file = WrittenFile(ProbeDirectory("runs", "checkpoint", NAME, SIZE), 10.0)
    assert file.trial(ProbeDeadline(10)).error is None
    assert (tmp_path / "runs" / NAME).exists()
    file.remove(ProbeDeadline(5))
