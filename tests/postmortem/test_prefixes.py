"""Prefixes of launchers, loggers, containers and schedulers: who, when, and what is left."""

from __future__ import annotations

import datetime

import pytest

from doctor.postmortem.logs.prefixes import PLAIN, LineOrigin, PrefixedLine, PrefixStyle, parse_line, style_of
from doctor.postmortem.logs.timestamps import Calendar
from tests.lab.cases import each_case

MODIFIED = datetime.datetime(2026, 1, 15, tzinfo=datetime.timezone.utc).timestamp()


def said(line: str, style: PrefixStyle = PLAIN, modified: float | None = MODIFIED) -> PrefixedLine:
    return parse_line(line, Calendar(modified), style)


def at(text: str) -> float:
    day, _, clock = text.partition("T")
    hour, minute, second = clock.split(":")
    start = datetime.datetime.fromisoformat(day).replace(tzinfo=datetime.timezone.utc).timestamp()
    return start + int(hour) * 3600 + int(minute) * 60 + float(second)


@each_case(
    ("line", "origin", "body"),
    [
        ("[rank3]: ValueError: x", LineOrigin(rank=3), "ValueError: x"),
        ('[rank12]:   File "a.py", line 3, in f', LineOrigin(rank=12), '  File "a.py", line 3, in f'),
        ("[rank: 3] Seed set to 42", LineOrigin(rank=3), "Seed set to 42"),
        ("[RANK 3]: hello", LineOrigin(rank=3), "hello"),
        ("[default3]:hello", LineOrigin(local_rank=3), "hello"),
        ("[trainer0|3]: hello", LineOrigin(rank=3, local_rank=0), "hello"),
        ("[1,3]<stderr>:hello", LineOrigin(rank=3), "hello"),
        ("[prterun-node7-123@1,3]<stdout>: hello", LineOrigin(rank=3), "hello"),
        (
            "(RayTrainWorker pid=123, ip=10.0.0.2) [rank3]: hello",
            LineOrigin(rank=3, host="10.0.0.2", pid=123, tag="RayTrainWorker"),
            "hello",
        ),
        ("[3]<stderr>:hello", LineOrigin(rank=3), "hello"),
        ("CRITICAL [root, rank=3] hello", LineOrigin(rank=3), "hello"),
        (
            "[1668693503.473099] [node7:123:0]          ib_log.c:246  UCX  ERROR hello",
            LineOrigin(host="node7", pid=123),
            "ib_log.c:246  UCX  ERROR hello",
        ),
        ("[node7:123  :0:456] Caught signal 11", LineOrigin(host="node7", pid=123), "Caught signal 11"),
        (
            "[ERROR] 2024-05-21-11:57:54 (PID:123, Device:1, RankID:3) ERR02200 DIST hello",
            LineOrigin(rank=3, pid=123),
            "ERR02200 DIST hello",
        ),
        (
            "ERROR:megatron.core.rerun_state_machine:Rank 3, node node7, device 1, iteration #3: hello",
            LineOrigin(rank=3, host="node7"),
            "iteration #3: hello",
        ),
        ("[1,mpirank:3,algo-2]<stderr>:hello", LineOrigin(rank=3, host="algo-2"), "hello"),
        ("Fri Jan  2 03:04:05 2026[1,3]<stderr>:hello", LineOrigin(rank=3), "hello"),
        ("trainer/3 [rank5]: hello", LineOrigin(rank=5, tag="trainer/3"), "hello"),
        ("(pid=123) hello", LineOrigin(pid=123), "hello"),
        ("node7:123:456 [0] NCCL INFO Using network IB", LineOrigin(host="node7", pid=123), "Using network IB"),
        (
            "[rank3]: [2026-01-02 03:04:05] node7:123:456 [3] misc/socket.cc:71 NCCL WARN socketProgress: closed",
            LineOrigin(rank=3, host="node7", pid=123),
            "socketProgress: closed",
        ),
        (
            "10-0-0-7:123:456 [0] NCCL INFO Channel 00/02 : 0 1",
            LineOrigin(host="10-0-0-7", pid=123),
            "Channel 00/02 : 0 1",
        ),
        ("Nov 22 04:23:18 node7 kernel: [12345.678901] NVRM: Xid", LineOrigin(host="node7"), "NVRM: Xid"),
        ("2026-01-02T03:04:05.123456+01:00 node7 slurmd[99]: hello", LineOrigin(host="node7", pid=99), "hello"),
        ("[12345.678901] NVRM: Xid", LineOrigin(), "NVRM: Xid"),
        ("[12345.678901][ T1234] NVRM: Xid", LineOrigin(), "NVRM: Xid"),
        ("[pod/train-worker-1/pytorch] hello", LineOrigin(host="train-worker-1"), "hello"),
        ("worker-1  | [rank3]: hello", LineOrigin(rank=3, host="worker-1"), "hello"),
        ("ERROR:root:ValueError: x", LineOrigin(), "ValueError: x"),
        ("2026-01-02 03:04:05.678 | ERROR    | mod:func:12 - hello", LineOrigin(), "hello"),
        ("[2026-01-02 03:04:05,678][__main__][ERROR] - hello", LineOrigin(), "hello"),
        ("[2026-01-02 03:04:05,678] [INFO] [launch.py:123:main] hello", LineOrigin(), "hello"),
        ("01/02/2026 03:04:05 - INFO - __main__ - hello", LineOrigin(), "hello"),
        ("INFO 01-02 03:04:05 [core.py:12] hello", LineOrigin(), "hello"),
        ("[NeMo W 2026-01-02 03:04:05 nemo_logging:349] hello", LineOrigin(), "hello"),
        ("[W socket.cpp:401] [c10d] hello", LineOrigin(), "hello"),
        (" 35%|####   | 10/20 [00:01<00:02, 1.2it/s]hello", LineOrigin(), "hello"),
        (
            "104.17.1.2: node7:123:456 [0] NCCL INFO Using network IB",
            LineOrigin(host="node7", pid=123),
            "Using network IB",
        ),
        ("    node7:123:456 [0] NCCL INFO Using network IB", LineOrigin(host="node7", pid=123), "Using network IB"),
        ("(raylet, ip=10.0.0.2) hello", LineOrigin(tag="raylet"), "hello"),
        ("2026-01-02 03:04:05,367\tINFO services.py:1274 -- hello", LineOrigin(), "hello"),
        ("ERROR 10-27 07:48:16 worker_base.py:464]   File", LineOrigin(), "  File"),
        ("  what():  [PG 0 Rank 3] hello", LineOrigin(), "hello"),
        ("nothing: [rank3] stands here", LineOrigin(), "nothing: [rank3] stands here"),
        ("12: hello", LineOrigin(), "12: hello"),
        ("[3] hello", LineOrigin(), "[3] hello"),
        ("{'rank': 3}", LineOrigin(), "{'rank': 3}"),
        ("", LineOrigin(), ""),
    ],
)
def test_who_says_a_line(line: str, origin: LineOrigin, body: str) -> None:
    told = said(line)
    assert (told.origin, told.body) == (origin, body)


@each_case(
    ("line", "time"),
    [
        ("2026-01-02 03:04:05,678 - root - ERROR - x", "2026-01-02T03:04:05.678"),
        ("2026-01-02T03:04:05.678Z x", "2026-01-02T03:04:05.678"),
        ("2026-01-02T03:04:05.678+01:00 node7 kernel: x", "2026-01-02T02:04:05.678"),
        ("2026-01-02T03:04:05.123456789Z stderr F x", "2026-01-02T03:04:05.123456"),
        ("[2026/01/02 03:04:05] x", "2026-01-02T03:04:05"),
        ("01/02/2026 03:04:05 - INFO - x", "2026-01-02T03:04:05"),
        ("[rank3]:[E102 03:04:05.500000000 ProcessGroupNCCL.cpp:629] x", "2026-01-02T03:04:05.5"),
        ("E0102 03:04:05.500000 140 torch/distributed/api.py:869] x", "2026-01-02T03:04:05.5"),
        ("E20260102 03:04:05.500000 140 a.cc:869] x", "2026-01-02T03:04:05.5"),
        ("[rank3]:[E1231 23:59:59.000 a.cpp:1] x", "2025-12-31T23:59:59"),
        ("Jan  2 03:04:05 node7 kernel: x", "2026-01-02T03:04:05"),
        ("[Fri Jan  2 03:04:05 2026] NVRM: x", "2026-01-02T03:04:05"),
        ('{"log": "x\\n", "stream": "stderr", "time": "2026-01-02T03:04:05.5Z"}', "2026-01-02T03:04:05.5"),
        ('{"message": "x", "timestamp": 1767323045.5}', "2026-01-02T03:04:05.5"),
    ],
)
def test_when_a_line_was_said(line: str, time: str) -> None:
    told = said(line)
    assert told.at == pytest.approx(at(time), abs=1e-5)
    assert told.body == "x" or told.body == "NVRM: x"


@pytest.mark.parametrize(
    "line", ["[rank3]: x", "[12345.678901] x", "9999-99-99 99:99:99 x", "03:04:05 x", "[E1350 03:04:05.1 a.cpp:1] x"]
)
def test_a_line_without_a_day_has_no_time(line: str) -> None:
    assert said(line).at is None


def test_the_year_of_a_log_serves_stamps_without_one() -> None:
    calendar = Calendar()
    parse_line("2024-03-02 03:04:05,678 x", calendar)
    assert parse_line("[E302 03:04:06.000 a.cpp:1] x", calendar).at == at("2024-03-02T03:04:06")


def test_without_any_year_the_order_within_a_log_is_kept() -> None:
    first, second = (said(f"[E302 03:04:0{second}.000 a.cpp:1] x", modified=None).at for second in (1, 2))
    assert first is not None
    assert second == first + 1


def test_lines_in_json_are_unwrapped() -> None:
    line = '{"log": "[rank3]:   File \\"a.py\\", line 3, in f\\n", "stream": "stderr", "time": "2026-01-02T03:04:05Z"}'
    assert said(line)[:1] == (LineOrigin(rank=3),)
    assert said(line).body == '  File "a.py", line 3, in f'
    assert said('{"message": "x", "rank": 5, "hostname": "node7"}').origin == LineOrigin(rank=5, host="node7")
    assert said('{"loss": 0.5}').body == '{"loss": 0.5}'
    assert said('{"message": ' * 50).origin == LineOrigin()


@pytest.mark.parametrize(
    ("prefix", "weak"),
    [
        ("[Rank 3] ", 3),
        ("[PG 0 Rank 3] ", 3),
        ("[PG ID 0 PG GUID 0(default_pg) Rank 3] ", 3),
        ("[PG ID 0 PG GUID 0 Rank 3] ", 3),
        ("[PG ID 2 PG GUID 3(dp) Rank 3] ", None),
        ("[PG 2 Rank 3] ", None),
        ("[TC][rank=3][name=default_pg] ", 3),
    ],
)
def test_the_rank_in_a_group_is_that_of_the_job_only_in_the_default_group(prefix: str, weak: int | None) -> None:
    """c10d prints the rank in the group: ProcessGroupNCCL::createLogPrefix."""
    told = said(f"[E1218 20:27:21.426 ProcessGroupNCCL.cpp:629] {prefix}Watchdog caught")
    assert (told.origin.rank, told.weak_rank, told.body) == (None, weak, "Watchdog caught")
    assert told.text == f"{prefix}Watchdog caught"


@pytest.mark.parametrize(
    ("line", "mild"),
    [
        ("[W socket.cpp:401] x", True),
        ("[E socket.cpp:401] x", False),
        ("WARNING:root:x", True),
        ("ERROR:root:x", False),
        ("2026-01-02 03:04:05,678 - a - WARNING - x", True),
        ("2026-01-02 03:04:05.678 | CRITICAL | a:b:1 - x", False),
        ("x", False),
    ],
)
def test_the_level_tells_what_ends_nothing(line: str, mild: bool) -> None:
    assert said(line).mild is mild


def test_numbers_before_a_line_count_where_nearly_all_lines_have_them() -> None:
    assert style_of(["0: a", " 1: b", "12: c"]) == PrefixStyle(numbered=True)
    assert style_of(["0: a", "epoch 1", "12: c"]) == PrefixStyle()
    assert style_of(["[0] a", "[1] b"]) == PrefixStyle(bracketed=True)
    assert style_of(["node1: a", "node2: b"]) == PrefixStyle(hosts=True)
    assert style_of(["3: a"]) == PrefixStyle()
    assert style_of(["10.0.0.1: a", "10.0.0.2: b"]) == PrefixStyle(hosts=True)
    assert style_of([f"{number}: a line of a listing" for number in range(20)]) == PrefixStyle()
    assert said(" 3: [default1]: x", PrefixStyle(numbered=True)).origin == LineOrigin(task=3, local_rank=1)
    assert said("node2: [rank3]: x", PrefixStyle(hosts=True)).origin == LineOrigin(rank=3, host="node2")
