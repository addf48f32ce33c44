"""Any bytes and any mixture of prefixes: nothing breaks the reader, and what ranks were made to write is read so."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import pytest

pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from doctor.postmortem.logs.prefixes import PrefixStyle, parse_line
from doctor.postmortem.logs.scanner import read_lines, read_log
from doctor.postmortem.logs.timestamps import Calendar
from doctor.postmortem.sandbox import zstd
from tests.lab.sample import examples

FUZZ = settings(
    max_examples=examples(150),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
WORDS = st.sampled_from(
    [
        "Traceback (most recent call last):",
        '  File "/home/me/a.py", line 3, in f',
        "    raise ValueError('x')",
        "ValueError: x",
        "KeyError",
        "During handling of the above exception, another exception occurred:",
        "Original Traceback (most recent call last):",
        "-- Process 1 terminated with the following error:",
        "  | ExceptionGroup: eg (2 sub-exceptions)",
        "  +-+---------------- 1 ----------------",
        "Fatal Python error: Segmentation fault",
        "Current thread 0x1 (most recent call first):",
        "Failures:",
        "Root Cause (first observed failure):",
        "[0]:",
        "  rank      : 99999999999999999999 (local_rank: 1)",
        "  rank      : 1 (local_rank: 1)",
        "  time      : 9999-99-99_99:99:99",
        "  exitcode  : -9 (pid: 1)",
        "  traceback : Traceback (most recent call last):",
        "=" * 60,
        "╭──── Traceback (most recent call last) ────╮",
        "│ /home/me/train.py:12 in main │",
        "node1:77:78 [0] NCCL INFO comm 0x55 rank 5 nranks 8 cudaDev 0 busId 1000 - Init START",
        "ip=10.0.0.1, pid=3) world_rank=3",
        "CUDA out of memory. Tried to allocate 4.00 GiB",
        "\x1b[31m",
        "\r",
        "",
        " ",
        "[rank1]: ",
        "[rank2]:[E1350 99:99:99.999 a.cpp:1] ",
        "[1,3]<stderr>:",
        "9999-99-99 99:99:99 ",
        '{"log": "x"}',
        "{" * 2000,
        "[" * 2000,
        "50%|" * 500,
    ]
)
TEXTS = st.lists(st.lists(WORDS | st.text(max_size=20), max_size=4).map("".join), max_size=60)


@FUZZ
@given(st.lists(st.binary(max_size=400) | WORDS.map(str.encode), max_size=40).map(b"\n".join))
def test_any_bytes(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "job.log"
    path.write_bytes(data)
    events, file = read_log(path, "job.log")
    assert file.cut is not None or file.lines <= data.count(b"\n") + data.count(b"\n\0") + 1
    assert all(1 <= event.line <= max(file.lines, 1) for event in events)


@FUZZ
@given(TEXTS)
def test_any_lines(texts: list[str]) -> None:
    events, file = read_lines(texts, "x")
    assert [event.line for event in events] == sorted(event.line for event in events)
    assert all(event.count >= 1 and len(event.text) <= 600 for event in events)
    assert len(events) <= 20 * (file.lines + 1)


@FUZZ
@given(st.text(max_size=300), st.builds(PrefixStyle, st.booleans(), st.booleans(), st.booleans()))
def test_any_line_is_taken_apart(line: str, style: PrefixStyle) -> None:
    said = parse_line(line, Calendar(), style)
    assert len(said.body) <= len(line)


@FUZZ
@given(st.integers(0, 2000), st.binary(min_size=1, max_size=3))
def test_any_damage_to_an_archive(tmp_path: Path, place: int, damage: bytes) -> None:
    for pack in _packers():
        data = bytearray(pack(b"[rank1]: ValueError: x\n" * 200 + bytes(range(256)) * 8))
        place %= len(data)
        data[place : place + len(damage)] = damage
        path = tmp_path / "job.log"
        path.write_bytes(bytes(data))
        read_log(path, "job.log")


def _packers():
    import gzip

    yield gzip.compress
    yield zstd._module().compress


START = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.timezone.utc)


def _clock(second: int) -> datetime.datetime:
    return START + datetime.timedelta(seconds=second)


WHO = {
    "torch": "[rank{rank}]: ",
    "Lightning": "[rank: {rank}] ",
    "roles": "[trainer{local}|{rank}]: ",
    "mpirun": "[1,{rank}]<stderr>:",
    "Ray": "(RayTrainWorker pid={pid}, ip=10.0.0.{rank}) [rank{rank}]: ",
    "pods": "[pod/worker-{rank}/pytorch] [rank{rank}]: ",
    "srun": "{rank}: ",
    "MPICH": "[{rank}] ",
    "pdsh": "node{local}: [rank{rank}]: ",
    "SageMaker": "[1,mpirank:{rank},algo-{local}]<stderr>:",
}
WHEN = {
    "none": "",
    "kubernetes": "%Y-%m-%dT%H:%M:%S.000000000Z stderr F ",
    "brackets": "[%Y-%m-%d %H:%M:%S,000] ",
    "syslog": "%b %d %H:%M:%S node7 job[12]: ",
    "ISO": "%Y-%m-%dT%H:%M:%S+00:00 ",
}
LEVELS = st.sampled_from(["", "[ERROR] ", "ERROR:root:", "[E a.cpp:12] "])
TRACEBACK = """Traceback (most recent call last):
  File "/home/me/train.py", line {line}, in step
    call()
ValueError: rank {rank} failed"""


@FUZZ
@given(
    st.sampled_from(sorted(WHO)),
    st.sampled_from(sorted(WHEN)),
    LEVELS,
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_what_was_written_is_read(who: str, when: str, level: str, outside: bool, chance) -> None:
    """Ranks write a traceback each, a line at a time, in any order, between lines that mean nothing."""
    left = {rank: TRACEBACK.format(rank=rank, line=rank + 1).split("\n") for rank in range(8)}
    lines: list[str] = []
    times: dict[int, float] = {}
    while left:
        rank = chance.choice(sorted(left))
        text = left[rank].pop(0) if chance.random() < 0.6 else None
        if not left[rank]:
            del left[rank]
        moment = _clock(len(lines))
        stamp, name = moment.strftime(WHEN[when]), WHO[who].format(rank=rank, local=rank % 4, pid=100 + rank)
        first = text is not None and text.startswith("Traceback")
        if text is not None and text.startswith("ValueError"):
            times[rank] = moment.timestamp()
        front = stamp + name if outside else name + stamp
        lines.append(front + (level if first else "") + (text if text is not None else "    step: 1, loss: 0.3"))
    events, file = read_lines(lines, "job.log")
    found = {event.rank: event for event in events if event.kind == "python.exception"}
    assert sorted(found) == list(range(8))
    for rank, event in found.items():
        assert (
            event.value(
                "message",
            ).partition("\n")[0]
            == f"rank {rank} failed"
        )
        assert [frame.line for frame in event.frames] == [rank + 1]
        if when not in ("none", "syslog"):
            assert event.at == times[rank]
    assert file.ranks == tuple(range(8))


@FUZZ
@given(TEXTS)
def test_lines_in_json_are_read_as_the_lines_themselves(texts: list[str]) -> None:
    plain = [text for text in texts if "\r" not in text and "\x1b" not in text and '"' not in text and "{" not in text]
    plain = [text.rstrip() for text in plain if text.isprintable() and text.rstrip()]
    wrapped = [json.dumps({"log": text + "\n", "stream": "stderr"}, ensure_ascii=False) for text in plain]
    direct, _ = read_lines(plain, "x")
    inner, _ = read_lines(wrapped, "x")
    assert [(event.kind, event.line, event.rank) for event in inner] == [
        (event.kind, event.line, event.rank) for event in direct
    ]
