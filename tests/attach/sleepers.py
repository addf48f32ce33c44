"""Processes that do nothing but look like those of a job: their variables, parents, threads and names are real."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import psutil

from doctor.attach.processes import ProcessTable, process_table
from doctor.attach.targets import TargetJob, TargetList, TargetRequest, find_targets
from tests.lab.running import first_line

READY = "print(flush=True)\nimport sys\nsys.stdin.read()\n"
"""Print a line when ready, and sleep until standard input closes."""
THREAD = """
import ctypes, threading, time
def name_thread(name):
    ctypes.CDLL(None).prctl(15, name.encode(), 0, 0, 0)
def thread(name):
    ready = threading.Event()
    threading.Thread(target=lambda: (name_thread(name), ready.set(), time.sleep(1000)), daemon=True).start()
    ready.wait()
"""
"""``thread(name)`` starts one that has this name, as those of torch have theirs; ``name_thread`` names this one."""
FORK = """
import os, sys
def fork(work=None):
    started, report = os.pipe()
    if os.fork() == 0:
        if work is not None:
            work()
        os.write(report, b"1")
        sys.stdin.read()
        os._exit(0)
    os.read(started, 1)
"""
"""``fork(work)`` starts a child that does ``work`` and sleeps."""
RANK_0_OF_2 = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29561"}


@contextlib.contextmanager
def running(
    code: str = "", environ: Mapping[str, str] | None = None, command: Sequence[str | Path] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """A process of ``code``, or of another command that prints a line when it is ready, with this environment alone."""
    argv = [sys.executable, "-S", "-c", code + "\n" + READY] if command is None else list(map(str, command))
    env = {"PATH": os.environ["PATH"], **(environ or {})}
    process = subprocess.Popen(argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        first_line(process)
        yield process
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            pipe.close()


@contextlib.contextmanager
def running_all(*environs: Mapping[str, str], code: str = "") -> Iterator[list[int]]:
    """Processes of ``code`` with these environments; gives their PIDs."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(running(code, environ)).pid for environ in environs]


def table_of_tests() -> ProcessTable:
    """The processes of this host without those that run the tests, whose children are the scene."""
    table = process_table()
    own = table.processes[os.getpid()]
    absent = {own.pid, *(parent.pid for parent in table.ancestors(own))}
    left = {pid: process for pid, process in table.processes.items() if pid not in absent}
    return msgspec.structs.replace(table, processes=left, own=None)


def found(request: TargetRequest | None = None) -> TargetList:
    """What is found among all processes of the host."""
    return find_targets(table_of_tests(), request or TargetRequest())


def jobs_of(pids: Sequence[int], request: TargetRequest | None = None) -> list[TargetJob]:
    """The jobs that have one of these processes; other tests run beside this one."""
    return [job for job in found(request).jobs if {target.facts.pid for target in job.targets} & set(pids)]


def ranks_of(pids: Sequence[int], request: TargetRequest | None = None) -> dict[int, int | None]:
    """The ranks of these processes by PID, of all jobs that have one of them."""
    jobs = jobs_of(pids, request)
    return {target.facts.pid: target.facts.rank for job in jobs for target in job.ranks}


def roles_of(process: subprocess.Popen[str]) -> dict[str, list[str]]:
    """The roles of a process and all its descendants, by what they print as their name (comm)."""
    table = table_of_tests()
    pids = {process.pid, *(child.pid for child in table.descendants(process.pid))}
    roles: dict[str, list[str]] = {}
    for job in find_targets(table, TargetRequest()).jobs:
        for target in job.targets:
            if target.facts.pid in pids:
                roles.setdefault(target.facts.role, []).append(target.process.name)
    return {role: sorted(names) for role, names in roles.items()}
