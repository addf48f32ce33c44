"""Processes of real pools: those that fail as they start, and those that are replaced after each of their tasks."""

import multiprocessing
import os
import threading
import time

import msgspec
import pytest

from doctor.core.facts import ChildProcess
from doctor.core.facts.telemetry import FAILING
from doctor.monitor.telemetry.failing_processes import FailingProcesses
from tests.lab.speed import patience

pytestmark = pytest.mark.real_time


def fails():
    os._exit(3)


def naps(_):
    time.sleep(0.05)


def watched(work, seconds=8.0):
    """Look while ``work`` runs in a thread, until something is found or the time is over."""
    failing, until = FailingProcesses(), time.monotonic() + patience(seconds)
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    while time.monotonic() < until and thread.is_alive() and not failing.words():
        failing.look()
        time.sleep(0.1)
    return failing


def test_a_pool_whose_processes_fail_as_they_start():
    pool = multiprocessing.get_context("fork").Pool(2, initializer=fails)
    try:
        failing = watched(lambda: pool.map_async(len, ["a", "b"]).wait(patience(10)))
        assert failing.words().startswith(FAILING)
        assert failing.words().endswith("of them, with exit code 3)")
        child, other = ChildProcess(max(failing._running, default=1 << 30), "R"), ChildProcess(os.getpid(), "R")
        found = failing.without_progress([child, other])
        assert [one.still is not None for one in found] == [True, False]  # another child may work
        failing.restart()
        assert failing.words() == ""
    finally:
        pool.terminate()


def test_a_pool_that_replaces_its_processes_after_each_task():
    with multiprocessing.get_context("fork").Pool(2, maxtasksperchild=1) as pool:
        assert watched(lambda: pool.map(naps, range(30), chunksize=1)).words() == ""


def test_processes_that_work_beside_one_that_has_failed():
    context = multiprocessing.get_context("fork")

    def work():
        for target in (fails, *[os.getpid] * 6):
            process = context.Process(target=target)
            process.start()
            process.join()
            time.sleep(0.2)

    assert watched(work).words() == ""


def test_a_child_that_was_there_before_is_none_that_replaced_another():
    failing = FailingProcesses()
    process = multiprocessing.get_context("fork").Process(target=naps, args=(0,))
    process.start()
    failing.look()
    child = ChildProcess(process.pid, "R")
    assert failing.without_progress([child]) == (child,)
    process.join()
    assert failing.without_progress([msgspec.structs.replace(child)])[0].still is not None  # it has ended meanwhile
