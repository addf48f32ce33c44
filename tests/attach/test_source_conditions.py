"""Conditions around the lines where processes are: which files are read, and which are not."""

from __future__ import annotations

import ast
import os
import time
from pathlib import Path

import msgspec
import pytest

from doctor.attach.source_conditions import with_source_conditions
from doctor.core.facts import AttachedProcess, Frame
from doctor.core.stack_dumps.rank_conditions import awaited_call, data_of_loop, loop_around
from tests.attach.attached import process

SOURCE = "import torch\nif rank == 0:\n    torch.distributed.barrier()\n"


def _conditions(found: tuple[AttachedProcess, ...]) -> list[str]:
    return [frame.condition for one in found for frame in one.samples[-1].threads[0].frames]


def _at(file: Path, *, pid: int | None = None, user: int | None = None, ago: float = 0.0) -> AttachedProcess:
    started = time.clock_gettime(time.CLOCK_BOOTTIME) - ago
    one = process(0, (Frame(str(file), 3, "<module>", user=True),), user=os.getuid() if user is None else user)
    return msgspec.structs.replace(one, pid=pid or os.getpid(), started=started)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "train.py"
    file.write_text(SOURCE)
    os.utime(file, (1, 1))
    return file


def test_the_condition_of_the_line_is_added(script: Path) -> None:
    assert _conditions(with_source_conditions([_at(script)])) == ["if rank == 0, line 2"]


def test_a_file_that_is_newer_than_the_process_is_not_its_source(script: Path) -> None:
    os.utime(script)
    assert _conditions(with_source_conditions([_at(script, ago=3600)])) == [""]


def test_a_file_that_the_process_may_not_read_is_not_read_for_it(script: Path) -> None:
    script.chmod(0o600)
    assert _conditions(with_source_conditions([_at(script, user=os.getuid() + 1)])) == [""]
    script.chmod(0o644)
    assert _conditions(with_source_conditions([_at(script, user=os.getuid() + 1)])) == ["if rank == 0, line 2"]


def test_pipes_large_files_and_what_is_no_python_are_left_alone(script: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.py"
    os.mkfifo(pipe)
    large = tmp_path / "large.py"
    large.write_text(SOURCE + "#" * (1 << 20))
    broken = tmp_path / "broken.py"
    broken.write_text("if rank == 0:\n" + "(" * 5000)
    for file in (large, broken):
        os.utime(file, (1, 1))
    files = (pipe, large, broken, tmp_path / "missing.py", Path("/proc/self/environ"))
    assert _conditions(with_source_conditions([*map(_at, files), _at(script)])) == [""] * 5 + ["if rank == 0, line 2"]


def test_a_process_that_is_gone_is_left_as_it_is(script: Path) -> None:
    gone = _at(script, pid=(1 << 22) - 1)
    assert with_source_conditions([gone]) == (gone,)


def test_the_group_of_the_call_is_read_as_it_is_written(script: Path) -> None:
    script.write_text("import torch\n\ntorch.distributed.all_reduce(\n    tensor, group=groups['tensor'],\n)\n")
    os.utime(script, (1, 1))
    (found,) = with_source_conditions([_at(script)])
    assert found.samples[-1].threads[0].group == "groups['tensor']"


def test_the_innermost_loop_of_the_function_is_read(script: Path) -> None:
    inner = "for epoch in epochs:\n    for batch in loader:\n        step(batch)\n    validate()\n"
    script.write_text(inner)
    os.utime(script, (1, 1))
    (found,) = with_source_conditions([_at(script)])
    assert found.samples[-1].threads[0].frames[0].loop == (2, 3)
    tree = ast.parse(inner + "while True:\n    def one():\n        step()\n")
    assert [loop_around(tree, line) for line in (1, 2, 4, 7)] == [(1, 4), (2, 3), (1, 4), ()]


@pytest.mark.parametrize(
    ("source", "line", "operation"),
    [
        ("work = dist.all_reduce(x, async_op=True)\nwork.wait()\n", 2, "all_reduce"),
        ("reqs = dist.batch_isend_irecv(ops)\nfor req in reqs:\n    req.wait()\n", 3, "batch_isend_irecv"),
        ("works.append(dist.broadcast(x, 0, async_op=True))\n[one.wait() for one in works]\n", 2, "broadcast"),
        ("self.work = dist.irecv(x)\nself.other = dist.barrier(async_op=True)\nself.work.wait()\n", 3, "recv"),
        ("def one():\n    work = dist.barrier(async_op=True)\ndef two(work):\n    work.wait()\n", 4, "collective"),
        ("works[-1].wait()\n", 1, "collective"),
        ("a = a\nb = a\na = b\na.wait()\n", 4, "collective"),
        ("os.wait()\n", 1, ""),
        ("total += loss.item()\n", 1, "synchronization with the GPU"),
        ("total = (\n    loss\n).cpu().sum()\n", 2, "synchronization with the GPU"),
        ("work.wait()\nstep()\n", 2, ""),
    ],
)
def test_the_collective_whose_handle_a_line_waits_for(source: str, line: int, operation: str) -> None:
    assert awaited_call(ast.parse(source), line) == operation


def test_a_handle_counts_only_for_the_innermost_line(script: Path) -> None:
    script.write_text("work = dist.all_reduce(x, async_op=True)\n\nwork.wait()\n")
    os.utime(script, (1, 1))
    (found,) = with_source_conditions([_at(script)])
    assert found.samples[-1].threads[0].awaits == "all_reduce"
    inner = Frame("/usr/lib/python3.11/threading.py", 622, "wait")
    started = time.clock_gettime(time.CLOCK_BOOTTIME)
    event = process(0, (inner, Frame(str(script), 3, "<module>", user=True)), user=os.getuid())
    (found,) = with_source_conditions([msgspec.structs.replace(event, pid=os.getpid(), started=started)])
    assert found.samples[-1].threads[0].awaits == ""


@pytest.mark.parametrize(
    ("source", "data"),
    [
        ("for batch in loader:\n    step()\n", "loader"),
        ("for index, batch in enumerate(tqdm(loader)):\n    step()\n", "enumerate(tqdm(loader))"),
        ("for batch in loader:\n    step()\n    for one in batch:\n        break\n", "loader"),
        ("for batch in loader:\n    step()\n    if done:\n        break\n", ""),
        ("def train():\n    for batch in loader:\n        step()\n        return\n", ""),
        ("for number in range(steps):\n    step()\n", ""),
        ("for batch in itertools.islice(loader, 10):\n    step()\n", ""),
        ("while True:\n    step()\n", ""),
        ("step()\n", ""),
    ],
)
def test_what_a_loop_iterates_over_if_only_its_end_ends_the_loop(source: str, data: str) -> None:
    line = next(number for number, text in enumerate(source.splitlines(), 1) if "step()" in text)
    assert data_of_loop(ast.parse(source), line) == data
