"""Stacks that a process writes itself: the script on this Python, and ``sys.remote_exec`` on a real Python 3.14."""

import gc
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest

from doctor.attach import injected_stacks, sampler
from tests.attach.jobs import doctor_attach
from tests.attach.readable import FORBIDS_TRACING, QUICK, functions_of, read_one, target_of
from tests.lab.speed import patience
from tests.lab.users import ALICE, require_root, run_as


def run_script(answer: Path) -> None:
    """As the interpreter runs it (run_remote_debugger_source in Python/ceval_gil.c): in a namespace of its own."""
    text = injected_stacks._SCRIPT.replace("ANSWER", repr(str(answer)))
    exec(compile(text, "<string>", "exec"), {})


class Held:
    """Something that a frame holds."""


def test_script_writes_all_threads_and_keeps_nothing(tmp_path, capfd):
    answer = tmp_path / "answer"
    answer.touch()
    done, held = threading.Event(), []

    def waits():
        one = Held()
        held.append(weakref.ref(one))
        done.wait()

    thread = threading.Thread(target=waits, name="a\tb\nc")
    thread.start()
    loaded = set(sys.modules)
    gc.disable()
    try:
        run_script(answer)
        done.set()
        thread.join()
        assert held[0]() is None
    finally:
        gc.enable()
    assert set(sys.modules) == loaded
    assert capfd.readouterr() == ("", "")
    own, other = sorted(injected_stacks._threads(answer.read_text()), key=lambda one: not one.is_main)[:2]
    assert own.is_main
    assert own.native_id == threading.get_native_id()
    names = [frame.function for frame in own.frames]
    assert names[:2] == ["run_script", "test_script_writes_all_threads_and_keeps_nothing"]
    assert (other.name, other.is_main) == ("a b c", False)
    assert "waits" in [frame.function for frame in other.frames]


def test_script_without_its_folder_does_nothing(tmp_path, capfd):
    run_script(tmp_path / "gone" / "answer")
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr() == ("", "")


def test_interrupt_within_the_script_reaches_the_program(tmp_path, monkeypatch):
    answer = tmp_path / "answer"
    answer.touch()
    monkeypatch.setattr(sys.modules["posix"], "write", lambda *_: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - the interpreter raises it between two calls
        run_script(answer)
        time.sleep(patience(1))


def test_hostile_answers_are_bounded():
    assert list(injected_stacks._threads("frame\t1\tf\tg\nthread\t1\n\0\tx\nend\n")) == []
    text = f"thread\t1\t{'9' * 30}\t\x1b[2J\nframe\t-{'9' * 15}\t{'f' * 9999}\t\x1b\nframe\tNone\tg\tx.py\nend\n"
    (thread,) = injected_stacks._threads(text)
    assert thread.name.isprintable()
    assert [(frame.line, len(frame.function)) for frame in thread.frames] == [(0, 200), (0, 1)]


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="needs a Python without sys.remote_exec")
def test_option_needs_a_python_that_has_it():
    done = doctor_attach("--allow-inject")
    assert "--allow-inject needs Python 3.14 or later" in done.stderr
    assert (done.returncode, done.stdout) == (2, "")


@pytest.fixture(scope="module")
def python() -> Path:
    """A Python 3.14, as tests/other_pythons finds it."""
    found = [shutil.which("python3.14"), *sorted(Path.home().glob(".pyenv/versions/3.14*/bin/python"))]
    path = next((Path(one) for one in found if one), None)
    if path is None:
        pytest.skip("no Python 3.14 here")
    return path


BUSY = """
import threading, time
threading.Thread(target=time.sleep, args=[300], daemon=True).start()
def busy():
    print("ready", flush=True)
    while True:
        sum(range(100))
busy()
"""
SLEEPS = """
import signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
print("ready", flush=True)
signal.sigtimedwait([signal.SIGUSR1], 300)
print(sorted(sys.modules))
"""
"""Sleeps in a call that ends only with the signal, and then runs what is pending."""


@pytest.fixture
def started(python):
    """Start a process of Python 3.14, or of another interpreter, and give its PID."""
    running = []

    def start(program, *options, before=(), of=python):
        command = [*before, str(of), *options, "-S", "-c", program]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen(command, text=True, cwd="/", env={"PATH": os.environ["PATH"]}, **pipes)
        running.append(process)
        assert process.stdout.readline() == "ready\n", process.stderr.read()
        return process

    yield start
    for process in running:
        process.kill()
        process.communicate()


@pytest.fixture
def asked(monkeypatch, python):
    """The doctor, as if it ran on Python 3.14."""
    monkeypatch.setattr(injected_stacks, "PYTHON", python)
    monkeypatch.setattr(injected_stacks, "SECONDS", patience(1))
    monkeypatch.setattr(sampler, "find_py_spy", lambda: None)
    before = set(Path("/tmp").glob("rankdoctor-*"))
    yield lambda process: read_one(target_of(process.pid), QUICK._replace(rounds=2, inject=True))
    assert not [one for one in set(Path("/tmp").glob("rankdoctor-*")) - before if (one / "script.py").exists()]


def test_busy_process_writes_its_stacks_and_goes_on(started, asked):
    process = started(BUSY)
    found = asked(process)
    assert (found.stack_source, found.refused) == ("interpreter", "")
    assert [functions_of(found, at) for at in range(2)] == [["busy", "<module>"]] * 2
    assert len(found.samples[0].threads) == 2
    assert process.poll() is None
    process.terminate()
    assert process.communicate() == ("", "")


def test_process_in_native_code_is_left_as_it_was(started, asked, monkeypatch):
    monkeypatch.setattr(injected_stacks, "SECONDS", 0.3)
    process, other = started(SLEEPS), started(SLEEPS)
    found = asked(process)
    assert "did not run in time" in found.refused
    assert "py-spy is not installed" in found.refused
    assert found.remedy == "pip install py-spy"
    outputs = []
    for one in (process, other):
        one.send_signal(signal.SIGUSR1)
        outputs.append(one.communicate(timeout=patience(10)))
        assert one.returncode == 0
    assert outputs[0] == outputs[1]
    assert outputs[0][1] == ""


def test_processes_that_cannot_run_it(started, asked, monkeypatch):
    assert "not enabled in the remote process" in asked(started(BUSY, "-X", "disable-remote-debug")).refused
    assert "no interpreter of Python 3.14" in asked(started(BUSY, of=sys.executable)).refused
    process = started(BUSY)
    monkeypatch.setenv("PYTHON_DISABLE_REMOTE_DEBUG", "1")
    assert "disabled for doctor attach itself" in asked(process).refused


def test_processes_of_other_users_and_other_roots(started, asked):
    require_root()
    found = asked(started(BUSY, before=run_as(ALICE)))
    assert functions_of(found) == ["busy", "<module>"]
    assert "PR_SET_DUMPABLE" in asked(started(FORBIDS_TRACING + BUSY, before=run_as(ALICE))).refused
    apart = started(BUSY, before=["unshare", "--mount"])
    assert "another root directory" in asked(apart).refused
