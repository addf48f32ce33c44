"""Stacks: of running threads, of errors, and the conditions that lead there."""

import ast
import inspect
import json
import os
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from doctor.core.facts import Frame
from doctor.core.frames import (
    MOST,
    call_site_frames,
    frames_of_stack,
    frames_of_traceback,
    is_user_code,
    new_group_in,
    root_in,
    shorten_stack,
    waits_in,
    waits_now,
)
from doctor.core.stack_dumps.rank_conditions import is_answered, rank_condition
from doctor.monitor.telemetry.stacks import rank_conditions
from doctor.monitor.telemetry.stacks.live_stacks import awaited_transfer, has_other_work, named_root, thread_stack
from tests.lab.speed import NEVER


def _waiting_thread(inside):
    """A thread that has come to ``inside``'s call of its argument, and what lets it go on."""
    reached, go = threading.Event(), threading.Event()

    def wait():
        reached.set()
        go.wait(NEVER)

    thread = threading.Thread(target=inside, args=(wait,))
    thread.start()
    assert reached.wait(10)
    return thread, go


def test_a_thread_that_is_at_work_beside_another_one(monkeypatch):
    """It sleeps in the user's code; one that waits for a third thread is not at work."""
    own, frames = threading.get_ident(), sys._current_frames
    others = set(frames()) - {own}  # threads that earlier tests left
    monkeypatch.setattr(sys, "_current_frames", lambda: {a: b for a, b in frames().items() if a not in others})
    idle, go = _waiting_thread(lambda wait: wait())
    while idle.is_alive() and sys._current_frames()[idle.ident].f_code.co_filename != threading.__file__:
        time.sleep(0.01)
    assert not has_other_work(own)
    busy = threading.Thread(target=lambda: time.sleep(1.0))
    busy.start()
    assert has_other_work(own)
    assert has_other_work(idle.ident)  # this one
    go.set()
    idle.join()
    busy.join()
    assert not has_other_work(own)


@pytest.mark.parametrize(("function", "name"), [("broadcast", "group_src"), ("gather", "group_dst")])
def test_the_root_of_a_call_is_read_while_a_rank_waits_in_it(function, name):
    named = {}
    source = f"def {function}(wait, {name}):\n    wait()"
    exec(compile(source, "/env/site-packages/torch/distributed/distributed_c10d.py", "exec"), named)
    lock = threading.Lock()
    lock.acquire()
    thread = threading.Thread(target=named[function], args=(lock.acquire, 2))
    thread.start()
    roots = {named_root(thread.ident) for _ in range(20) if not time.sleep(0.01)}
    lock.release()
    thread.join()
    assert 2 in roots
    assert named_root(thread.ident) is None


@pytest.mark.parametrize(
    ("group", "source", "expected"), [(None, 2, 2), ("pipeline", 6, 1), ("pipeline", 5, None), ("pipeline", None, None)]
)
def test_the_source_of_a_receive_is_numbered_in_its_group(group, source, expected):
    ranks = {"pipeline": {4: 0, 6: 1}}
    named = {"get_group_rank": lambda group, rank: ranks[group][rank]}
    text = "def recv(wait, src, group, group_src=None):\n    wait()"
    exec(compile(text, "/env/site-packages/torch/distributed/distributed_c10d.py", "exec"), named)
    thread, go = _waiting_thread(lambda wait: named["recv"](wait, source, group))
    frame = sys._current_frames()[thread.ident]
    while frame.f_code.co_name != "recv":
        frame = frame.f_back
    assert root_in(frame) == expected
    go.set()
    thread.join()


@pytest.mark.parametrize(
    ("number", "local", "expected"), [("4", False, "4 of ranks 0, 2"), ("4", True, ""), ("a3f", False, "")]
)
def test_the_ranks_of_a_group_that_all_ranks_make(number, local, expected):
    """One that only its members make has a name of its own, by which they find together."""
    text = "def new_group(wait, ranks, use_local_synchronization, group_name):\n    wait()"
    named = {}
    exec(compile(text, "/env/site-packages/torch/distributed/distributed_c10d.py", "exec"), named)
    thread, go = _waiting_thread(lambda wait: named["new_group"](wait, [0, 2], local, number))
    frame = sys._current_frames()[thread.ident]
    while frame.f_code.co_name != "new_group":
        frame = frame.f_back
    assert new_group_in(frame) == expected
    go.set()
    thread.join()


def test_the_installed_torch_numbers_groups_before_it_waits():
    c10d = pytest.importorskip("torch.distributed.distributed_c10d")
    source = inspect.getsource(c10d._new_group_with_tag)
    assert "group_name = _process_group_name(ranks" in source
    assert "use_local_synchronization" in source


class Work:
    """A handle of a transfer, as torch names its class."""

    __module__ = "torch.distributed.distributed_c10d"

    def __init__(self, number, acquire):
        self._get_op_type, self.wait = (lambda: number), acquire


@pytest.mark.parametrize(
    ("line", "number", "expected"),
    [
        ("work.wait()", 12, "send"),
        ("work.wait()", 13, "recv"),
        ("work.wait()", 1, ""),
        ("irecv(work).wait()", 13, "recv"),
        ("[one.wait() for one in [work]]", 12, "send"),
        ("lock.acquire()", 12, ""),
    ],
)
def test_a_transfer_that_is_waited_for(tmp_path, line, number, expected):
    lock = threading.Lock()
    lock.acquire()
    named = {"work": Work(number, lock.acquire), "lock": lock, "irecv": lambda work: work}
    file = tmp_path / "train.py"
    file.write_text(f"def train(work, lock):\n    {line}\n")
    exec(compile(file.read_text(), str(file), "exec"), named)
    thread = threading.Thread(target=named["train"], args=(named["work"], lock))
    thread.start()
    found = {awaited_transfer(thread.ident) for _ in range(20) if not time.sleep(0.01)}
    lock.release()
    thread.join()
    assert expected in found
    assert found <= {expected, ""}


def test_the_numbers_of_transfers_are_those_of_the_installed_torch():
    c10d = pytest.importorskip("torch.distributed.distributed_c10d")
    assert (c10d.Work.__module__, c10d.Work.__name__) == ("torch.distributed.distributed_c10d", "Work")


def test_the_installed_torch_computes_the_root_before_it_waits():
    c10d = pytest.importorskip("torch.distributed.distributed_c10d")
    for function, name in (("broadcast", "src"), ("scatter", "src"), ("reduce", "dst"), ("gather", "dst")):
        source = inspect.getsource(getattr(c10d, function))
        assert f"group_{name} = _canonicalize_group_rank(" in source


def test_the_stack_of_another_thread_innermost_first():
    def training_step(wait):
        wait()

    thread, go = _waiting_thread(training_step)
    stack = thread_stack(thread.ident)
    go.set()
    thread.join()
    own = [frame.function for frame in stack if frame.user]
    assert own[:2] == ["wait", "training_step"]
    assert stack[0].file.endswith("threading.py")
    assert not stack[0].user


def test_a_deep_stack_is_cut_and_a_dead_thread_has_none():
    def deep(wait, left=200):
        return deep(wait, left - 1) if left else wait()

    thread, go = _waiting_thread(deep)
    assert len(thread_stack(thread.ident)) == MOST
    go.set()
    thread.join()
    assert thread_stack(thread.ident) == ()


def test_the_traceback_of_an_error():
    def training_step():
        json.loads("no json")

    with pytest.raises(ValueError) as raised:
        training_step()
    frames = frames_of_traceback(raised.value.__traceback__)
    assert frames[0].function == "raw_decode"
    assert next(frame.function for frame in frames if frame.user) == "training_step"
    assert frames_of_traceback(ValueError("never raised").__traceback__) == ()


@pytest.mark.parametrize(
    ("file", "own"),
    [
        ("/home/me/train.py", True),
        ("train.py", True),
        ("<stdin>", True),
        ("<frozen importlib._bootstrap>", False),
        (json.__file__, False),
        (pytest.__file__, False),
        ("/usr/lib/python3/dist-packages/torch/x.py", False),
        ("/usr/lib64/python3.12/threading.py", False),
        (rank_conditions.__file__, False),
    ],
)
def test_whose_code_it_is(file, own):
    assert is_user_code(file) is own


def test_what_is_kept_of_a_stack():
    frames = thread_stack(threading.get_ident())
    assert len(shorten_stack(frames, 3, 8)) >= 3
    assert {frames[0], *[frame for frame in frames if frame.user][:3]} <= set(call_site_frames(frames))
    assert len(call_site_frames(frames)) <= 9


SOURCE = textwrap.dedent(
    """\
    def training_step(self, batch):
        if self.global_rank == 0:
            self.all_gather(batch)
        elif self.global_rank == 1:
            self.log(batch)
        else:
            for part in batch:
                self.skip(part)
        if batch.kind == "image":
            self.show(batch)
        if not self.trainer.is_global_zero:
            return
        with self.timer:
            self.save(batch)

    @rank_zero_only
    def save(self):
        self.trainer.save_checkpoint("x")

    if rank == 0:
        def helper():
            barrier()
    lora_rank = 8
    if lora_rank > 4:
        big()
    """
)


@pytest.mark.parametrize(
    ("call", "condition"),
    [
        ("self.all_gather", "if self.global_rank == 0, line 2"),
        ("self.log", "elif self.global_rank == 1, line 2"),
        ("self.skip", "else of if self.global_rank == 1, line 2"),
        ("self.show", ""),
        ("self.save(batch)", "after if not self.trainer.is_global_zero: return, line 11"),
        ("self.trainer.save_checkpoint", "@rank_zero_only"),
        ("barrier()", ""),
        ("big()", ""),
    ],
)
def test_the_condition_that_a_line_is_under(call, condition):
    import ast

    (number,) = (number for number, line in enumerate(SOURCE.splitlines(), 1) if call in line)
    assert rank_condition(ast.parse(SOURCE), number) == condition


def _stack_in(path: Path, text: str):
    """The stack of a thread that waits in ``step`` of a file of the user's."""
    path.write_text(text)
    space: dict = {}
    exec(compile(text, str(path), "exec"), space)
    thread, go = _waiting_thread(space["step"])
    stack = thread_stack(thread.ident)
    go.set()
    thread.join()
    return next(frame for frame in stack if frame.function == "step")


TEXT = "def step(wait, rank=0):\n    if rank == 0:\n        wait()\n"


def test_conditions_come_with_stacks(tmp_path, monkeypatch):
    monkeypatch.setattr(rank_conditions, "_STARTED", time.time() + 60)
    assert _stack_in(tmp_path / "train.py", TEXT).condition == "if rank == 0, line 2"


def test_a_source_that_was_edited_since_tells_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(rank_conditions, "_STARTED", time.time() - 60)
    assert _stack_in(tmp_path / "edited.py", TEXT).condition == ""


def test_a_source_that_does_not_answer_costs_a_deadline(tmp_path, monkeypatch):
    go = threading.Event()
    monkeypatch.setattr(rank_conditions, "_source", lambda file: str(go.wait(NEVER)))
    silent = Frame(str(tmp_path / "on_a_dead_mount.py"), 1, "step", user=True)
    for _ in range(3):
        assert rank_conditions.with_conditions([(silent,)], 0.2) == [(silent,)]
    go.set()


def test_what_is_no_source_tells_nothing(tmp_path):
    pipe = tmp_path / "pipe.py"
    os.mkfifo(pipe)
    os.utime(pipe, (1, 1))
    (broken := tmp_path / "broken.py").write_text("if rank == 0\n")
    for path in (pipe, broken, tmp_path / "nowhere.py", tmp_path):
        frame = Frame(str(path), 1, "step", user=True)
        assert rank_conditions.with_conditions([(frame,)]) == [(frame,)]


C10D, LOGGER = "torch/distributed/distributed_c10d.py", "torch/distributed/c10d_logger.py"


@pytest.mark.parametrize(
    ("calls", "waits"),
    [
        ((("train.py", "main"), (C10D, "all_reduce")), True),
        (((C10D, "barrier"), (LOGGER, "wrapper")), True),
        (((C10D, "all_gather_object"), (C10D, "_object_to_tensor")), False),
        (((C10D, "broadcast"), ("train.py", "hook")), False),
        ((("train.py", "main"), (LOGGER, "wrapper")), False),
        ((("torch/nn/parallel/distributed.py", "forward"),), True),
    ],
)
def test_a_running_stack_is_seen_to_wait_as_its_frames_are(calls, waits):
    seen = []

    def look():
        frame = inspect.currentframe().f_back
        seen.append((waits_now(frame), bool(waits_in(frames_of_stack(frame)))))

    inner = look
    for file, function in reversed(calls):
        named = {"inner": inner}
        exec(compile(f"def {function}():\n    inner()", f"/env/site-packages/{file}", "exec"), named)
        inner = named[function]
    inner()
    assert seen == [(waits, waits)]


EXCHANGE = """
def collects(rank):
    if rank == 0:
        dist.recv(buffer, 1)
    else:
        send(buffer, 0)
def receives(link):
    dist.recv(
        buffer,
    )
    link.close()
def relays(rank):
    for peer in peers:
        works = [dist.irecv(buffer, peer), dist.isend(buffer, peer)]

"""


@pytest.mark.parametrize(
    ("line", "expected"), [(4, True), (6, True), (3, False), (8, False), (9, False), (11, False), (14, True)]
)
def test_an_exchange_has_both_of_its_calls_in_one_function(line, expected):
    assert is_answered(ast.parse(EXCHANGE), line) is expected
