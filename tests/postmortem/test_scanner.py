"""Logs into events: who says what, when, how often, and what is no message."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from doctor.core.facts import Event
from doctor.postmortem.logs import deduplication, event_store
from doctor.postmortem.logs.rank_attribution import rank_of_name
from doctor.postmortem.logs.scanner import read_lines, read_log
from tests.lab.cases import each_case

CASES = Path(__file__).parents[3] / "shared" / "cases"
CLOSED = "misc/socket.cc:71 NCCL WARN socketProgress: Connection closed by remote peer node02<41234>"
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 4.00 GiB."
PLACE = "cudaDev 0 nvmlDev 0 busId 1000"
TABLE = """============================================================
train.py FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-01-02_03:04:06
  host      : node01
  rank      : 9 (local_rank: 1)
  exitcode  : 1 (pid: 4322)
  error_file: /tmp/x/error.json
  traceback : Traceback (most recent call last):
    File "/opt/env/lib/python3.11/site-packages/torch/distributed/elastic/errors/__init__.py", line 355, in wrapper
      return f(*args, **kwargs)
    File "/home/me/train.py", line 14, in main
      raise ValueError("bad")
  ValueError: bad

------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-01-02_03:04:05
  host      : node01
  rank      : 8 (local_rank: 0)
  exitcode  : -9 (pid: 4321)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 4321
============================================================"""


def events_of(*lines: str, name: str = "job.log") -> list[Event]:
    events, _ = read_lines([line for text in lines for line in text.split("\n")], name)
    return events


def of(events: list[Event], *kinds: str) -> list[Event]:
    return [event for event in events if event.kind in kinds]


@pytest.mark.skipif(not CASES.is_dir(), reason="the collection of failures is not here")
def test_every_collected_failure_is_read() -> None:
    for path in sorted(CASES.glob("*.json")):
        text = json.loads(path.read_text())["text"]
        events, file = read_lines(text.split("\n"), path.name)
        assert file.lines == text.count("\n") + 1
        assert all(0 < event.line <= file.lines and event.file == path.name for event in events)


def test_the_table_of_torchrun_gives_an_event_an_entry() -> None:
    events = of(events_of(TABLE), "elastic.entry")
    assert [(event.rank, event.local_rank, event.host, event.pid, event.line) for event in events] == [
        (9, 1, "node01", 4322, 9),
        (8, 0, "node01", 4321, 24),
    ]
    assert [(event.value("exitcode"), event.value("root"), event.value("message")) for event in events] == [
        ("1", "no", "ValueError: bad"),
        ("-9", "yes", "Signal 9 (SIGKILL) received by PID 4321"),
    ]
    assert events[1].at == 1767323045


def test_a_traceback_in_the_table_is_an_exception_of_its_rank() -> None:
    (event,) = of(events_of(TABLE), "python.exception")
    assert (event.rank, event.value("type"), event.frames[0].line, event.frames[0].user) == (9, "ValueError", 14, True)
    events = events_of("[rank9]: ValueError: bad", TABLE)
    assert [(event.rank, event.line) for event in of(events, "python.exception")] == [(9, 1)]


def test_what_a_launcher_says_of_a_process_is_that_process_s() -> None:
    failed = "failed (exitcode: -9) local_rank: 0 (pid: 4321) of binary: /usr/bin/python3.11"
    events = events_of(f"E0102 03:04:05.5 140 torch/distributed/elastic/multiprocessing/api.py:869] {failed}", TABLE)
    (event,) = of(events, "elastic.failed")
    assert (event.rank, event.local_rank, event.pid) == (8, 0, 4321)
    assert {event.rank for event in of(events, "elastic.signal_tb")} <= {8}


def test_tables_of_two_launchers_are_told_apart() -> None:
    first, second = (
        TABLE.split("\n"),
        TABLE.replace("node01", "node02").replace("rank      : ", "rank      : 1").split("\n"),
    )
    mixed = [text for pair in zip(first, second, strict=True) for text in (f"0: {pair[0]}", f"1: {pair[1]}")]
    entries = of(events_of(*mixed), "elastic.entry")
    assert {(event.rank, event.host) for event in entries} == {
        (9, "node01"),
        (8, "node01"),
        (19, "node02"),
        (18, "node02"),
    }


def test_the_old_form_of_the_table_is_read() -> None:
    events = events_of(
        "*****************************************",
        "     train.py FAILED",
        "Root Cause:",
        "[0]:",
        "  time: 2021-07-01_03:04:05",
        "  rank: 1 (local_rank: 1)",
        "  exitcode: -11 (pid: 77)",
        "  error_file: <N/A>",
        '  msg: "Signal 11 (SIGSEGV) received by PID 77"',
        "*****************************************",
    )
    (event,) = of(events, "elastic.entry")
    assert (event.rank, event.value("exitcode"), event.value("root")) == (1, "-11", "yes")
    assert event.value("message") == "Signal 11 (SIGSEGV) received by PID 77"


def test_a_table_without_end_is_read() -> None:
    (event,) = of(events_of(TABLE.partition("error_file")[0]), "elastic.entry")
    assert (event.rank, event.value("root")) == (9, "no")


def test_the_rank_of_an_nccl_process_is_that_of_its_communicator() -> None:
    head = "node1:77:78 [0]"
    events = events_of(
        f"{head} {CLOSED}",
        f"{head} NCCL INFO ncclCommInitRank comm 0x55 rank 5 nranks 8 {PLACE} commId 0xab - Init START",
        f"{head} NCCL INFO ncclCommSplit comm 0x56 rank 1 nranks 2 {PLACE} commId 0xac - Init START",
        "node1:99:100 [0] " + CLOSED,
    )
    closed = of(events, "nccl.peer_closed")
    assert [(event.host, event.pid, event.rank) for event in closed] == [("node1", 77, 5), ("node1", 99, None)]


def test_ranks_in_several_groups_of_one_size_are_not_those_of_the_job() -> None:
    events = events_of(
        *(
            f"node{node}:7{rank}:78 [0] NCCL INFO comm 0x{node}{rank} rank {rank} nranks 2 {PLACE} - Init START"
            for node in range(2)
            for rank in range(2)
        ),
        f"node1:70:78 [0] {CLOSED}",
    )
    assert of(events, "nccl.peer_closed")[0].rank is None


def test_a_launcher_s_prefix_tells_the_rank_of_an_nccl_process() -> None:
    events = events_of("[1,3]<stdout>:node1:77:78 [0] NCCL INFO Using network IB", f"node1:77:79 [0] {CLOSED}")
    assert {event.rank for event in events} == {3}


def test_ray_tells_the_rank_of_its_workers() -> None:
    events = events_of(
        "(TorchTrainer pid=1, ip=10.0.0.1) - (node_id=ab, ip=10.0.0.2, pid=123) world_rank=3, local_rank=1",
        f"(RayTrainWorker pid=123, ip=10.0.0.2) {OOM}",
    )
    (event,) = of(events, "python.exception")
    assert (event.rank, event.pid, event.host) == (3, 123, "10.0.0.2")


def test_a_task_of_slurm_is_a_rank_unless_it_launches_others() -> None:
    alone = events_of("0: step 1", f"1: {OOM}", "0: step 2", "1: step 3")
    assert of(alone, "python.exception")[0].rank == 1
    launcher = events_of("0: step 1", f"1: {OOM}", "0: step 2", f"1: [rank9]: {OOM}")
    assert [event.rank for event in of(launcher, "python.exception")] == [None, 9]


def test_a_local_rank_is_a_rank_where_one_host_is_seen() -> None:
    events = events_of(f"[default1]: {OOM}", TABLE)
    assert of(events, "python.exception")[0].rank == 9
    several = events_of(f"[default1]: {OOM}", TABLE, f"node7:7:8 [0] {CLOSED}")
    assert of(several, "python.exception")[0].rank is None
    assert of(several, "python.exception")[0].local_rank == 1


@each_case(
    ("name", "ranks"),
    [
        ("rank_3.log", (3, None)),
        ("out/rank3.err", (3, None)),
        ("train-rank-12.txt", (12, None)),
        ("global_rank_3.log", (3, None)),
        ("local_rank_3.log", (None, 3)),
        ("localrank3.log", (None, 3)),
        ("logs/abc_x/attempt_0/3/stderr.log", (None, 3)),
        ("slurm-123_4.out", (None, None)),
        ("job.3.out", (None, None)),
        ("rank_3/job.log", (3, None)),
        ("lora_rank_16/job.log", (None, None)),
        ("out/1/rank.3/stderr", (3, None)),
        ("frank3.log", (None, None)),
        ("rank0_rank1.log", (None, None)),
        ("nccl.node7.1234.log", (None, None)),
    ],
)
def test_the_name_of_a_log_tells_the_rank_only_where_it_is_sure(
    name: str, ranks: tuple[int | None, int | None]
) -> None:
    assert rank_of_name(name) == ranks


def test_who_speaks_is_told_by_the_line_before_the_file() -> None:
    assert of(events_of(OOM, name="rank_3.log"), "python.exception")[0].rank == 3
    assert of(events_of(f"[rank5]: {OOM}", name="rank_3.log"), "python.exception")[0].rank == 5


def test_lines_of_one_message_have_one_speaker() -> None:
    events = events_of(
        "[rank3]:[E1218 20:27:21.426 a.cpp:1] [Rank 3] NCCL watchdog thread terminated with exception: x",
        "ncclInternalError: Internal check failed.",
        "Last error:",
        "Bootstrap : no socket interface found",
        *("step" for _ in range(20)),
        "Bootstrap : no socket interface found",
    )
    assert [event.rank for event in of(events, "nccl.bootstrap.noif")] == [3, None]


def test_what_is_said_again_is_counted() -> None:
    lines = [f"2026-01-02 03:04:0{second} [rank{second % 2}]: {OOM}" for second in range(6)]
    events, file = read_lines(lines, "x")
    assert [(event.rank, event.count, event.line) for event in of(events, "python.exception")] == [(0, 3, 1), (1, 3, 2)]
    first = of(events, "python.exception")[0]
    assert (first.last_at or 0) - (first.at or 0) == 4
    assert (file.last_at or 0) - (file.first_at or 0) == 5
    assert file.ranks == (0, 1)


def test_events_are_few_whatever_the_log_holds() -> None:
    sizes = (f"CUDA out of memory. Tried to allocate {size}.00 GiB. GPU 0 has" for size in range(3000))
    events = events_of(*(f"[rank{number % 8}]: ValueError: {text}" for number, text in enumerate(sizes)))
    assert len(of(events, "python.exception")) <= 8 * event_store.MOST_OF_A_PROCESS
    assert sum(event.count for event in of(events, "python.exception")) == 3000


def test_many_processes_do_not_hide_a_message_that_comes_late() -> None:
    lines = [f"[rank{number}]: ValueError: x" for number in range(event_store.MOST_OF_A_KIND + 500)]
    events = events_of(*lines, "[rank7]: CUDA out of memory. Tried to allocate 4.00 GiB.", f"node1:7:8 [0] {CLOSED}")
    assert len(of(events, "python.exception")) == event_store.MOST_OF_A_KIND
    assert of(events, "nccl.peer_closed")[0].line == len(lines) + 2


def test_what_nccl_says_often_is_counted_by_its_text() -> None:
    lines = [f"node1:{7 + number % 2}:8 [0] NCCL INFO Using network IB" for number in range(2000)]
    events = events_of(*lines)
    assert [(event.pid, event.count) for event in of(events, "nccl.net.using")] == [(7, 1000), (8, 1000)]


def test_a_warning_of_nccl_is_never_only_counted() -> None:
    lines = ["node1:7:8 [0] NCCL INFO Using network IB"] * (deduplication.OFTEN * 3)
    events = events_of(*lines, "node1:7:8 [0] init.cc:1 NCCL WARN Using network Socket")
    assert [event.value("net") for event in of(events, "nccl.net.using")] == ["IB", "Socket"]


@pytest.mark.parametrize(
    "line",
    [
        'raise RuntimeError("CUDA out of memory. Tried to allocate 4.00 GiB")',
        '    print("CUDA out of memory. Tried to allocate 4.00 GiB")',
        "# CUDA out of memory. Tried to allocate 4.00 GiB",
        '+ echo "CUDA out of memory. Tried to allocate 4.00 GiB"',
        'logger.error("CUDA out of memory. Tried to allocate 4.00 GiB")',
        '---> 12     raise RuntimeError("CUDA out of memory. Tried to allocate 4.00 GiB")',
        'elif "CUDA out of memory. Tried to allocate" in str(error):',
    ],
)
def test_source_code_is_no_message(line: str) -> None:
    assert events_of(line) == []
    assert events_of("CUDA out of memory. Tried to allocate 4.00 GiB") != []


def test_lines_of_containers_are_unwrapped() -> None:
    docker = [json.dumps({"log": f"[rank1]: {OOM}\n", "stream": "stderr", "time": "2026-01-02T03:04:05.5Z"})]
    kubernetes = [f"2026-01-02T03:04:05.500000000Z stderr F [rank1]: {OOM}"]
    for lines in (docker, kubernetes):
        (event,) = of(events_of(*lines), "python.exception")
        assert (event.rank, event.at, event.text) == (1, 1767323045.5, OOM)


def test_a_traceback_in_lines_of_json_is_read() -> None:
    traceback = 'Traceback (most recent call last):\n  File "/home/me/a.py", line 3, in f\n    g()\nValueError: x'
    (event,) = of(events_of(*(json.dumps({"log": line + "\n"}) for line in traceback.split("\n"))), "python.exception")
    assert (event.text, event.frames[0].line) == ("ValueError: x", 3)


def test_a_stamp_without_a_year_is_of_the_file_s(tmp_path: Path) -> None:
    path = tmp_path / "job.log"
    path.write_bytes(
        gzip.compress(b"[rank1]:[E1231 23:59:59.000 a.cpp:1] CUDA out of memory. Tried to allocate 1 GiB\n")
    )
    os.utime(path, (1767500000, 1767500000))
    events, file = read_log(path, "job.log")
    assert {event.at for event in events} == {1767225599.0}
    assert file.first_at == file.last_at == 1767225599.0


def test_times_of_a_log_are_its_first_and_last() -> None:
    lines = ["start", "2026-01-02 03:04:05 a", *("x" for _ in range(3000)), "2026-01-02 05:04:05 b", "end"]
    _, file = read_lines(lines, "x")
    assert (file.last_at or 0) - (file.first_at or 0) == 7200


def test_ranks_that_say_nothing_known_speak_too() -> None:
    _, file = read_lines([f"[rank{number % 5}]: step {number}" for number in range(50)], "x")
    assert file.ranks == (0, 1, 2, 3, 4)
    _, table = read_lines(TABLE.split("\n"), "x")
    assert table.ranks == ()


def test_of_very_many_states_of_a_progress_bar_the_newest_is_read() -> None:
    bars = [f"Tokenizing: {step // 100}%|##   | {step}/9999 [00:01<00:02, 99.1 examples/s]" for step in range(9000)]
    events = events_of(*bars[:5000], "CUDA out of memory. Tried to allocate 4.00 GiB", *bars[5000:])
    shown = {event.text.split("|")[-1].split("/")[0].strip() for event in events if event.kind.startswith("run.bar")}
    assert "8999" in shown
    assert {event.line for event in of(events, "oom.device", "cuda.oom.bare")} == {5001}
    assert len(events) < 300


def test_numbers_without_end_are_no_numbers() -> None:
    long = "9" * 5000
    assert events_of(
        f"Jan  2 03:04:05 node7 job[{long}]: {OOM}",
        f"failed (exitcode: -9) local_rank: {long} (pid: {long}) of binary: /usr/bin/python3.11",
        f"Initializing distributed: GLOBAL_RANK: {long}, MEMBER: {long}/{long}",
        f"[rank{long}]: {OOM}",
        f"node1:{long}:{long} [0] {CLOSED}",
    )


@pytest.mark.parametrize(("prefix", "rank"), [("[1,3]<stderr>:", 3), ("3: ", 3), ("", None)])
def test_a_launcher_names_who_writes_once_a_line(prefix: str, rank: int | None) -> None:
    bars = "\r".join(f"{step}%|#   | {step}/100 [00:01<00:02, 9.9it/s]" for step in range(50))
    events, file = read_lines(["0: start", f"{prefix}{bars}\r{OOM}", "1: end", "2: end", "2: end"], "x")
    assert [(event.rank, event.line) for event in of(events, "python.exception")] == [(rank, 2)]
    assert file.lines == 5


def test_of_an_endless_loop_of_attempts_a_part_is_read() -> None:
    attempts = [f"node{number % 4}:7:8 [0] {CLOSED[:-6]}{number}>" for number in range(deduplication.LOUD + 16_000)]
    stack = ("Traceback (most recent call last):", '  File "/home/me/a.py", line 3, in f', "    g()", "ValueError: x")
    errors = [f"ConnectionError: attempt {number}" for number in range(deduplication.LOUD + 100)]
    events = events_of(*attempts, *errors, *stack)
    closed = of(events, "nccl.peer_closed")
    assert {event.host for event in closed} == {f"node{number}" for number in range(4)}
    assert sum(event.count for event in closed) == len(attempts)
    assert of(events, "python.exception")[-1].frames[0].line == 3
