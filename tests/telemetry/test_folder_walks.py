"""Walks of real threads through folders, some of which contain themselves by a symbolic link."""

import contextlib
import glob
import os
import sys
import threading
import time

import pytest

from doctor.core.facts.telemetry import WALK
from doctor.monitor.telemetry.stacks.folder_walks import folder_loop, walk_in_words
from doctor.monitor.telemetry.stacks.tight_loops import TightLoop
from tests.lab.speed import patience

pytestmark = pytest.mark.real_time
STOP = threading.Event()


def walks(folder):
    for _ in os.walk(folder, followlinks=True):
        if STOP.is_set():
            return


def globs(folder):
    for _ in glob.iglob(f"{folder}/**/*", recursive=True):
        if STOP.is_set():
            return


def lists(folder):
    """Follow links to folders, as functions of users do."""
    with contextlib.suppress(OSError):  # too many levels of links
        for entry in os.scandir(folder) if not STOP.is_set() else ():
            if entry.is_dir():
                lists(entry.path)


@pytest.fixture
def thread_of():
    """Starts a thread, and ends it."""
    started = []

    def start(work, *arguments):
        STOP.clear()
        started.append(threading.Thread(target=work, args=arguments, daemon=True))
        started[0].start()
        return started[0]

    yield start
    STOP.set()
    started[0].join(patience(10))


@pytest.fixture
def circle(tmp_path):
    """A folder with two links to itself."""
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ("train", "test"):
        (folder / name).symlink_to(folder)
    return folder


def eventually(question, thread):
    until = time.monotonic() + patience(10)
    found = None
    while not found and time.monotonic() < until:
        found = question(sys._current_frames().get(thread.ident))
        time.sleep(0.01)
    return found


@pytest.mark.parametrize("work", [walks, globs, lists])
def test_a_folder_that_contains_itself(work, circle, thread_of):
    thread = thread_of(work, str(circle))
    found = eventually(folder_loop, thread)
    assert found.folder == str(circle)
    assert found.link.startswith(f"{circle}/t")
    words = f"{WALK}{circle}, which contains itself as {circle}/t"
    assert eventually(lambda frame: walk_in_words(frame).startswith(words), thread)


@pytest.mark.parametrize("work", [walks, lists])
def test_the_time_in_such_a_walk(work, circle, thread_of):
    thread = thread_of(work, str(circle))
    loop, longest, until = TightLoop(thread.ident, thread.native_id), 0.0, time.monotonic() + patience(10)
    while longest < 1.5 and time.monotonic() < until:
        longest = max(longest, loop.look())
        time.sleep(0.1)
    assert longest >= 1.5


def test_folders_that_only_have_one_name(tmp_path, thread_of):
    folder = tmp_path.joinpath(*["part"] * 12)
    folder.mkdir(parents=True)

    def visits():
        while not STOP.is_set():
            walks(tmp_path)

    thread = thread_of(visits)
    until = time.monotonic() + 1.0
    while time.monotonic() < until:
        assert folder_loop(sys._current_frames().get(thread.ident)) is None
    assert eventually(lambda frame: walk_in_words(frame).startswith(f"{WALK}{tmp_path}"), thread)


def test_a_thread_that_walks_nowhere(tmp_path, thread_of):
    thread = thread_of(STOP.wait)
    assert walk_in_words(sys._current_frames().get(thread.ident)) == ""
