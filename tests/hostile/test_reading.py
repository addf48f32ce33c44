"""Inputs that would block, never end or take too long: said in the report, never healthy, never a hang."""

from __future__ import annotations

import gzip
import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from doctor.core.errors import UnusableError
from doctor.core.files import read_deadline, spooled_streams, timed_file
from doctor.core.files.read_deadline import ReadBudget, ReadDeadline
from doctor.core.files.spooled_streams import spooled_paths
from doctor.core.files.timed_file import TimedFile
from doctor.postmortem.file_kinds import kind_of
from doctor.postmortem.logs.scanner import read_log
from doctor.postmortem.run_reader import read_runs
from doctor.postmortem.sandbox import decompression
from tests.lab.speed import patience

FAILED = b"[rank1]: ValueError: no such column\n"
HOSTILE = "[rank{rank}]: ConnectionRefusedError: [Errno {digits}111] Connection refused {rank}\n"


class Clock:
    """Advances by one second each time that it is asked."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def doctor(*arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "doctor", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=patience(110), **options)  # type: ignore[call-overload]


def frame_of_runs(blocks: int) -> bytes:
    """A zstd frame of blocks that each repeat a zero 128 KiB times (RFC 8878, 3.1.1.2)."""
    block = (1 << 1 | (128 << 10) << 3).to_bytes(3, "little") + b"\0"
    last = (1 | 1 << 1 | 1 << 3).to_bytes(3, "little") + b"\0"
    return b"\x28\xb5\x2f\xfd" + bytes([0]) + bytes([0x38]) + block * blocks + last


def test_a_log_of_hostile_lines_is_read(tmp_path: Path) -> None:
    """256 KiB, which took minutes with a pattern that backtracks."""
    path = tmp_path / "hostile.log"
    path.write_text("".join(HOSTILE.format(rank=rank, digits="0x1" * 2650) for rank in range(32)))
    _, file = read_log(path, "hostile.log", ReadBudget(110))
    assert (file.lines, file.cut) == (32, None)


def test_a_log_that_takes_too_long_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "long.log"
    path.write_bytes(FAILED * 1000)
    clock = Clock()
    _, file = read_log(path, "long.log", ReadBudget(30, clock))
    assert file.cut is not None
    assert file.cut.startswith("stopped reading long.log after ")
    assert file.cut.endswith(f"of {36 * 1000} bytes)")


def test_what_was_not_read_is_never_healthy(tmp_path: Path) -> None:
    (tmp_path / "job.log").write_bytes(b"Trainer.fit stopped: max_epochs=3 reached.\n" * 10)
    done = doctor("diagnose", "job.log", "--read-timeout", 0, "--format", "json", cwd=tmp_path)
    report = json.loads(done.stdout)
    assert (done.returncode, report["verdict"]) == (3, "inconclusive")
    (note,) = report["inputs"][0]["notes"]
    assert note.startswith("stopped reading job.log after ")


def test_the_time_of_all_files_is_bounded_too() -> None:
    clock = Clock()
    common = ReadBudget(clock=clock)
    first = common.for_file(0)
    clock.now += read_deadline.FILE_SECONDS
    assert first.is_over
    clock.now += read_deadline.ALL_SECONDS
    assert common.for_file(0).is_over
    assert not common.for_file(1 << 30).is_over
    assert isinstance(first, ReadDeadline)


@pytest.mark.parametrize("name", ["runs.zst", "bomb.gz"])
def test_an_archive_that_grows_too_much_is_cut(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decompression, "UNSUSPECTED", 16 << 20)
    path = tmp_path / name
    path.write_bytes(frame_of_runs(2000) if name == "runs.zst" else gzip.compress(bytes(64 << 20)))
    _, file = read_log(path, name)
    assert file.cut is not None
    assert re.match("it unpacks to more than 1[67] MiB", file.cut)
    assert file.bytes <= 17 << 20


def test_archives_are_cut_at_bytes_that_are_read_in_seconds() -> None:
    assert decompression.UNSUSPECTED <= 256 << 20


@pytest.mark.parametrize("empty", [b"\x28\xb5\x2f\xfd\x20\x00\x01\x00\x00", gzip.compress(b"")], ids=["zstd", "gzip"])
def test_members_without_content_end_at_the_deadline(tmp_path: Path, empty: bytes) -> None:
    path = tmp_path / "empty"
    path.write_bytes(empty * 20_000)
    _, file = read_log(path, "empty", ReadBudget(5, Clock()))
    assert file.cut is not None
    assert file.cut.startswith("stopped reading empty after ")


def test_a_file_that_blocks_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As on a mount whose server is gone: the read never returns while the writer of a pipe sends nothing."""
    reader, writer = os.pipe()
    try:
        monkeypatch.setattr(timed_file.os, "open", lambda *_: os.dup(reader))
        with TimedFile(tmp_path, seconds=0.2) as stream, pytest.raises(TimeoutError):
            stream.read(1)
    finally:
        os.close(writer)
        os.close(reader)


@pytest.mark.skipif(not os.access("/proc/kmsg", os.R_OK) or os.geteuid() != 0, reason="needs root")
def test_a_file_of_the_kernel_that_blocks_is_refused() -> None:
    assert kind_of(Path("/proc/kmsg")) in ("blocked", "log", "missing")


@pytest.mark.parametrize("command", ["diagnose", "lint"])
def test_standard_input_is_read(command: str) -> None:
    text = {"diagnose": FAILED.decode(), "lint": "import torch\nfrom torch import distributed\n"}[command]
    done = doctor(command, "-", "--format", "json", input=text)
    report = json.loads(done.stdout)
    assert [one["path"] for one in report["inputs"]] == ["standard input"]
    assert done.returncode == (1 if command == "diagnose" else 0)


@pytest.mark.parametrize("command", ["diagnose", "lint"])
def test_pipes_are_read(tmp_path: Path, command: str) -> None:
    script = {"diagnose": FAILED.decode().strip(), "lint": "import torch"}[command]
    shell = f'exec "{sys.executable}" -m doctor {command} <(echo "{script}") --format json'
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=patience(100))
    assert json.loads(done.stdout)["inputs"][0]["path"].startswith("/dev/fd/")


def test_a_stream_without_a_byte_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(spooled_streams, "SILENCE", 0.2)
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(UnusableError, match=r"pipe: nothing was sent for 0\.2 s"), spooled_paths([path]):
        pass


def test_a_stream_without_end_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spooled_streams, "MOST_BYTES", 1 << 20)
    with subprocess.Popen(["yes"], stdout=subprocess.PIPE) as endless:
        assert endless.stdout is not None
        try:
            name = Path(f"/dev/fd/{endless.stdout.fileno()}")
            with spooled_paths([name]) as files:
                _, _, inputs = read_runs(files)[0]
        finally:
            endless.kill()
    (one,) = inputs
    assert one.path == str(name)
    assert any(note.startswith(f"stopped reading {name} after ") for note in one.notes or ())
    assert not files[0].exists()


def test_frames_are_as_the_format_says() -> None:
    assert struct.unpack("<I", frame_of_runs(1)[:4])[0] == 0xFD2FB528
