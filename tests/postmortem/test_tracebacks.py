"""Tracebacks of Python in logs: whose they are, what they end with, what came first."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from doctor.core.facts import Event
from doctor.postmortem.logs.scanner import read_lines
from doctor.postmortem.logs.tracebacks import is_user_code

FIRST = """Traceback (most recent call last):
  File "/home/me/train.py", line 12, in main
    step()
  File "/opt/env/lib/python3.11/site-packages/torch/nn/functional.py", line 99, in linear
    return torch.addmm(bias, x, weight)
           ^^^^^^^^^^^^^^^^^^^^^^^^^^^^
ValueError: first"""
SECOND = """Traceback (most recent call last):
  File "/home/me/data.py", line 3, in load
    raise KeyError("x")
KeyError: 'x'"""


def exceptions(*lines: str, kind: str = "python.exception") -> list[Event]:
    events, _ = read_lines([line for text in lines for line in text.split("\n")], "job.log")
    return [event for event in events if event.kind == kind]


def of_rank(rank: int, text: str) -> list[str]:
    return [f"[rank{rank}]: {line}" for line in text.split("\n")]


def test_a_traceback_is_one_event_at_its_last_line() -> None:
    (event,) = exceptions("step 1", FIRST)
    assert (event.line, event.text) == (8, "ValueError: first")
    assert event.named == {"type": "ValueError", "message": "first", "source_line": "step()"}
    assert [(frame.file.rpartition("/")[2], frame.line, frame.function, frame.user) for frame in event.frames] == [
        ("functional.py", 99, "linear", False),
        ("train.py", 12, "main", True),
    ]


def test_ranks_that_write_at_the_same_time_are_told_apart() -> None:
    mixed = [line for pair in zip(of_rank(0, SECOND), of_rank(1, FIRST), strict=False) for line in pair]
    mixed += of_rank(1, FIRST)[len(of_rank(0, SECOND)) :]
    found = exceptions(*mixed)
    assert {(event.rank, event.value("type"), len(event.frames)) for event in found} == {
        (0, "KeyError", 1),
        (1, "ValueError", 2),
    }


def test_of_a_chain_the_first_is_the_event() -> None:
    for words in (
        "During handling of the above exception, another exception occurred:",
        "The above exception was the direct cause of the following exception:",
    ):
        (event,) = exceptions(FIRST, "", words, "", SECOND, "", words, "", SECOND.replace("KeyError", "TypeError"))
        assert event.value("message") == "first"
        assert event.value("then") == "TypeError"
        assert event.frames[0].line == 99


def test_what_follows_a_chain_is_another_exception() -> None:
    chain = (FIRST, "", "During handling of the above exception, another exception occurred:", "", SECOND)
    found = exceptions(*chain, "", SECOND.replace("load", "save").replace("line 3", "line 4"))
    assert [event.value("type") for event in found] == ["ValueError", "KeyError"]


def test_the_error_of_a_worker_is_the_event() -> None:
    (event,) = exceptions(
        FIRST.replace("first", "Caught KeyError in DataLoader worker process 0."), "Original " + SECOND
    )
    assert event.named == {"type": "KeyError", "message": "'x'", "then": "ValueError"}
    assert event.frames[0].file == "/home/me/data.py"


def test_the_error_of_a_spawned_process_is_the_event() -> None:
    spawn = FIRST.replace("ValueError: first", "torch.multiprocessing.spawn.ProcessRaisedException: ")
    (event,) = exceptions(spawn, "", "-- Process 1 terminated with the following error:", SECOND)
    assert (event.value("type"), event.value("then")) == (
        "KeyError",
        "torch.multiprocessing.spawn.ProcessRaisedException",
    )


def test_of_a_group_the_first_member_is_the_event() -> None:
    found = exceptions(
        "  + Exception Group Traceback (most recent call last):",
        '  |   File "/home/me/a.py", line 3, in <module>',
        "  |     raise ExceptionGroup('eg', [ValueError(1), TypeError(2)])",
        "  | ExceptionGroup: eg (2 sub-exceptions)",
        "  +-+---------------- 1 ----------------",
        "    | Traceback (most recent call last):",
        '    |   File "/home/me/b.py", line 5, in f',
        "    |     g()",
        "    | ValueError: 1",
        "    +---------------- 2 ----------------",
        "    | TypeError: 2",
        "    +------------------------------------",
    )
    assert [(event.value("type"), event.value("then")) for event in found] == [
        ("ValueError", "ExceptionGroup"),
        ("TypeError", None),
    ]
    assert found[0].frames[0].file == "/home/me/b.py"


def test_the_message_has_all_its_lines() -> None:
    (event,) = exceptions(
        *of_rank(0, FIRST),
        "[rank0]: CUDA kernel errors might be asynchronously reported at some other API call.",
        "[rank0]: Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.",
        "[rank1]: step 12",
        "[rank0]:[W1218 20:27:21.426 ProcessGroupNCCL.cpp:1250] Warning: not destroyed",
        "[rank0]: another line",
    )
    assert event.value("message") == (
        "first\nCUDA kernel errors might be asynchronously reported at some other API call.\n"
        "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions."
    )


def test_frames_of_cpp_are_no_part_of_the_message() -> None:
    (event,) = exceptions(FIRST, "Exception raised from recvBytes at a.cpp:6 (most recent call first):", "frame #0: x")
    assert event.value("message") == "first"


def test_a_long_message_is_cut() -> None:
    (event,) = exceptions(FIRST, *("    " + "x" * 300 for _ in range(100)))
    assert len(str(event.value("message"))) == 2000


def test_a_syntax_error_has_no_function() -> None:
    (event,) = exceptions('  File "x.py", line 3', "    foo(", "       ^", "SyntaxError: '(' was never closed")
    assert (event.value("type"), event.frames[0].line, event.frames[0].function) == ("SyntaxError", 3, "")


def test_a_last_line_alone_is_an_exception_too() -> None:
    (event,) = exceptions("torch.distributed.DistBackendError: NCCL error in: a.cpp:1, unhandled system error")
    assert event.value("type") == "torch.distributed.DistBackendError"
    (event,) = exceptions("2026-01-02 03:04:05,678 - root - ERROR - ValueError: x")
    assert event.at is not None


@pytest.mark.parametrize(
    "line",
    [
        "Mean Absolute Error: 0.3",
        "Error: 0.3",
        "error rate: 0.1",
        "WARNING:root:ConnectionError: attempt 1, trying again",
        "raise ValueError('x')",
        "we saw ValueError: x before",
        "Exit: 3",
        "NoErrors: 3",
        "ValueErrors: 3",
        "HTTPErrorCount: 3",
        "Epoch: 3",
    ],
)
def test_other_lines_are_no_exception(line: str) -> None:
    assert exceptions(line) == []


def test_an_application_line_after_a_stack_is_no_exception() -> None:
    stack = FIRST.rpartition("\n")[0]
    (event,) = exceptions(stack, "Epoch: 3", "Loss 0.3", "ValueError: first")
    assert (event.value("type"), len(event.frames)) == ("ValueError", 2)


def test_an_exception_of_any_name_counts_after_its_stack() -> None:
    for name in ("zlib.error: incorrect header", "queue.Empty", "StopIteration", "hydra.errors.MissingConfig: x"):
        (event,) = exceptions(FIRST.replace("ValueError: first", name))
        assert event.text == name


def test_source_code_in_a_stack_says_nothing() -> None:
    stack = FIRST.replace("step()", 'raise RuntimeError("CUDA out of memory. Tried to allocate 4.00 GiB")')
    events, _ = read_lines(stack.split("\n"), "x")
    assert [event.kind for event in events] == ["python.exception"]


def test_a_header_with_a_logger_s_prefix_belongs_to_the_lines_below() -> None:
    head, _, rest = FIRST.partition("\n")
    (event,) = exceptions(f"[rank3]:[E1218 20:27:21.426 a.cpp:607] {head}", rest)
    assert (event.rank, len(event.frames), event.value("message")) == (3, 2, "first")
    assert event.at is not None


def test_a_progress_bar_before_a_header_does_not_hide_it() -> None:
    (event,) = exceptions("Running: 47%|####  | 3/6 [30:11<38:27, 1578.58 examples/s]" + FIRST)
    assert len(event.frames) == 2


def test_frames_in_a_box_are_read() -> None:
    (event,) = exceptions(
        "╭───────────────────── Traceback (most recent call last) ──────────────────────╮",
        "│ /home/me/train.py:12 in main                                                 │",
        "│                                                                              │",
        '│ ❱ 12     raise ValueError("CUDA out of memory. Tried to allocate 3.00 GiB")  │',
        "╰──────────────────────────────────────────────────────────────────────────────╯",
        "ValueError: rich",
    )
    assert [(frame.file, frame.line, frame.function) for frame in event.frames] == [("/home/me/train.py", 12, "main")]


def test_the_thread_that_died_is_shown() -> None:
    (event,) = exceptions(
        "Fatal Python error: Segmentation fault",
        "",
        "Thread 0x00007f1 (most recent call first):",
        '  File "/usr/lib/python3.11/threading.py", line 324 in wait',
        "",
        "Current thread 0x00007f2 (most recent call first):",
        '  File "/home/me/a.py", line 3 in f',
        '  File "/home/me/a.py", line 9 in <module>',
        "",
        kind="python.fatal",
    )
    assert event.named == {"what": "Segmentation fault"}
    assert [frame.line for frame in event.frames] == [3, 9]


def test_the_same_exception_again_is_counted() -> None:
    (event,) = exceptions(FIRST, "", FIRST, "", FIRST)
    assert (event.line, event.count, event.value("message")) == (8 - 1, 3, "first")


def test_a_deep_recursion_is_cut_to_its_inner_frames() -> None:
    frames = [f'  File "/home/me/a.py", line {depth}, in f' for depth in range(500)]
    (event,) = exceptions(
        "Traceback (most recent call last):", *frames, "RecursionError: maximum recursion depth exceeded"
    )
    assert [frame.line for frame in event.frames[:2]] == [499, 498]
    assert len(event.frames) == 60


@pytest.mark.parametrize(
    ("file", "own"),
    [
        ("/home/me/train.py", True),
        ("train.py", True),
        ("<string>", True),
        ("/home/me/torch/models.py", True),
        ("C:\\Users\\me\\train.py", True),
        ("<frozen runpy>", False),
        ("/opt/conda/lib/python3.6/threading.py", False),
        ("/usr/lib/python3/dist-packages/torch/nn.py", False),
        (".../torch/nn.py", False),
        ("torch/nn.py", False),
        ("C:\\Python311\\Lib\\site-packages\\torch\\nn.py", False),
    ],
)
def test_the_users_own_files(file: str, own: bool) -> None:
    assert is_user_code(file) is own


PROGRAM = """
import faulthandler, sys
def inner(): return {}["missing"]
def outer():
    try: inner()
    except KeyError as error: raise RuntimeError("outer failed") from error
{run}
"""


@pytest.mark.parametrize(
    ("run", "type_", "then"),
    [
        ("outer()", "KeyError", "RuntimeError"),
        ("inner()", "KeyError", None),
        ("eval('1 +')", "SyntaxError", None),
        ("raise SystemError", "SystemError", None),
        ("raise KeyboardInterrupt", "KeyboardInterrupt", None),
    ],
)
def test_what_this_python_prints_is_read(tmp_path: Path, run: str, type_: str, then: str | None) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.replace("{run}", run))
    printed = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, check=False).stderr
    (event,) = exceptions(printed)
    assert (event.value("type"), event.value("then")) == (type_, then)
    assert event.frames[-1].file == str(program)
    assert event.frames[-1].user


def test_the_cause_of_an_error_of_ray_is_the_event() -> None:
    (event,) = exceptions(
        "Traceback (most recent call last):",
        '  File "/opt/env/lib/python3.9/site-packages/ray/_private/worker.py", line 2547, in get',
        "    raise value.as_instanceof_cause()",
        "ray.exceptions.RayTaskError(ValueError): ray::_Inner.train() (pid=249, ip=10.0.0.78, repr=TorchTrainer)",
        '  File "/home/me/train.py", line 12, in loop',
        "    step()",
        "ValueError: boom",
    )
    assert (event.text, event.value("then")) == ("ValueError: boom", "ray.exceptions.RayTaskError(ValueError)")
    assert [frame.line for frame in event.frames] == [12]


def test_every_line_of_a_traceback_may_have_a_logger_s_prefix() -> None:
    (event,) = exceptions(*(f"ERROR 10-27 07:48:16 worker_base.py:464] {line}" for line in FIRST.split("\n")))
    assert (event.text, len(event.frames)) == ("ValueError: first", 2)


def test_the_same_exception_of_ranks_without_a_prefix_is_one_event() -> None:
    (event,) = exceptions(*(line for line in FIRST.split("\n") for _ in range(4)))
    assert (event.count, [frame.line for frame in event.frames]) == (4, [99, 12])
