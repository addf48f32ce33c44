"""The child that has torch loaded: asked, refused, killed, lost."""

import os
import signal
import time

import msgspec
import pytest

from doctor.probes.runtime.torch_child import ChildLost, TorchChild, WorkRefused
from doctor.probes.runtime.torch_startup import LoadedTorch
from tests.lab.needs import ROOT, clean_environ
from tests.lab.speed import patience


@pytest.fixture
def child():
    made = TorchChild(clean_environ(ROOT))
    yield made
    made.close()


def ends(process):
    until = time.monotonic() + patience(10)
    while process.poll() is None and time.monotonic() < until:
        time.sleep(0.02)
    return process.poll() is not None


def test_loads_torch_and_is_there_for_the_next_question(child):
    pytest.importorskip("torch")
    first = child.ask("load", {}, LoadedTorch, patience(60))
    assert child.ask("load", {}, LoadedTorch, patience(60)) == first
    assert first.version


def test_what_can_not_be_done_is_refused_and_the_child_goes_on(child):
    with pytest.raises(WorkRefused, match="KeyError"):
        child.ask("no such work", {}, LoadedTorch, patience(30))
    with pytest.raises(WorkRefused, match="KeyError"):
        child.ask("another", {}, LoadedTorch, patience(30))
    assert not child.is_lost


def test_a_child_that_is_killed_is_lost_at_once(child):
    os.kill(child._child.pid, signal.SIGKILL)
    with pytest.raises(ChildLost, match=r"-9|gone"):
        child.ask("load", {}, LoadedTorch, patience(30))
    assert child.is_lost
    with pytest.raises(ChildLost):
        child.ask("load", {}, LoadedTorch, patience(30))


def test_a_child_that_does_not_answer_is_killed(child):
    process = child._child
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(ChildLost, match="no answer within"):
        child.ask("load", {}, LoadedTorch, 0.3)
    assert ends(process)


def test_it_ends_with_its_input_whatever_it_does(child):
    process = child._child
    process.stdin.close()
    assert ends(process)


def test_an_answer_that_is_none_ends_it(child):
    class Other(msgspec.Struct):
        never: int

    pytest.importorskip("torch")
    with pytest.raises(ChildLost, match="invalid response"):
        child.ask("load", {}, Other, 60.0)


def test_variables_can_be_changed_and_taken_away():
    pytest.importorskip("torch")
    made = TorchChild({**clean_environ(ROOT), "GONE": "1"}, {"GONE": None, "PYTHONPATH": "/nowhere"})
    try:
        environ = (f"/proc/{made._child.pid}/environ",)
        with open(environ[0], "rb") as file:
            lines = file.read().split(b"\0")
        assert b"PYTHONPATH=/nowhere" in lines
        assert not [line for line in lines if line.startswith(b"GONE")]
    finally:
        made.close()


def test_it_keeps_to_the_processors_that_it_was_given():
    own = sorted(os.sched_getaffinity(0))
    made = TorchChild(clean_environ(ROOT), processors=(own[-1],))
    try:
        assert os.sched_getaffinity(made._child.pid) == {own[-1]}
        assert sorted(os.sched_getaffinity(0)) == own
    finally:
        made.close()


def test_nothing_is_started_where_nothing_can_be():
    made = TorchChild(clean_environ(ROOT), processors=(100_000,))
    assert made.is_lost
    with pytest.raises(ChildLost, match="cannot start a process"):
        made.ask("load", {}, LoadedTorch, 1.0)
