"""Processes that tests read from outside, and the doctor's sampler as another user or with fewer rights."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from doctor.attach.sampler import SamplingOptions, sample
from doctor.collectors.host.local_processes import process_start_time
from doctor.core.facts import AttachedProcess
from tests.lab.needs import clean_environ
from tests.lab.speed import patience

QUICK = SamplingOptions(rounds=1, interval=0.1, seconds=patience(10))
SLEEPER = """
import time

def outer():
    inner()

def inner():
    print("ready", flush=True)
    time.sleep(300)

outer()
"""
FORBIDS_TRACING = "import ctypes\nctypes.CDLL(None).prctl(4, 0, 0, 0, 0)\n"
"""PR_SET_DUMPABLE of prctl(2)."""

FILTER = """
import ctypes, os, platform, struct, sys
# ptrace, process_vm_readv, process_vm_writev: asm/unistd_64.h and asm-generic/unistd.h
refused = {"x86_64": (101, 310, 311), "aarch64": (117, 270, 271)}[platform.machine()]
rules = [struct.pack("HBBI", 0x20, 0, 0, 0)]
for number in refused:
    rules += [struct.pack("HBBI", 0x15, 0, 1, number), struct.pack("HBBI", 0x06, 0, 0, 0x00050000 | 1)]
rules.append(struct.pack("HBBI", 0x06, 0, 0, 0x7FFF0000))
code = ctypes.create_string_buffer(b"".join(rules))
program = struct.pack("HxxxxxxQ", len(rules), ctypes.addressof(code))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, program, 0, 0) == 0
os.execvp(sys.argv[1], sys.argv[1:])
"""
"""Runs a program under a seccomp filter that refuses ptrace and process_vm_readv/writev with EPERM (seccomp(2))."""
FILTERED = [sys.executable, "-S", "-c", FILTER]

_SAMPLE = """
import sys
import msgspec
from doctor.attach.sampler import SamplingOptions, sample
from doctor.core.facts import AttachedProcess

targets = msgspec.json.decode(sys.argv[1], type=tuple[AttachedProcess, ...])
sys.stdout.buffer.write(msgspec.json.encode(sample(targets, SamplingOptions(rounds=1, seconds=float(sys.argv[2])))))
"""


@contextlib.contextmanager
def started(
    program: str = SLEEPER, *, before: Sequence[str] = (), arguments: Sequence[str] = (), imports: bool = False
) -> Iterator[AttachedProcess]:
    """A Python process that has printed ``ready``; ``before``: what its command begins with; ``imports``: it may import
    what is installed."""
    command = [*before, sys.executable, *([] if imports else ["-S"]), "-c", program, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True, cwd="/") as process:
        try:
            assert process.stdout.readline() == "ready\n"
            _let_settle(process.pid)
            yield target_of(process.pid)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _let_settle(pid: int) -> None:
    """Wait until the process sleeps, unless it is busy or has ended."""
    for _ in range(20):
        with contextlib.suppress(OSError):
            if status_of(pid)["State"][0] != "R":
                return
        time.sleep(0.01)


def target_of(pid: int) -> AttachedProcess:
    return AttachedProcess(pid=pid, started=process_start_time(pid) or 0.0, rank=0)


def read_one(target: AttachedProcess, options: SamplingOptions = QUICK) -> AttachedProcess:
    """The process, with what was read of it."""
    (found,) = sample([target], options)
    return found


def read_from(before: Sequence[str], target: AttachedProcess) -> AttachedProcess:
    """The same, read by a process whose command begins with ``before``."""
    targets = msgspec.json.encode([target]).decode()
    command = [*before, sys.executable, "-c", _SAMPLE, targets, str(patience(10))]
    environ = clean_environ(Path("/"))
    done = subprocess.run(command, capture_output=True, env=environ, cwd="/", timeout=patience(30))
    assert done.returncode == 0, done.stderr.decode()
    (found,) = msgspec.json.decode(done.stdout, type=tuple[AttachedProcess, ...])
    return found


def functions_of(found: AttachedProcess, at: int = 0) -> list[str]:
    """The functions on the stack of the main thread, innermost first."""
    (main,) = (one for one in found.samples[at].threads if one.is_main)
    return [frame.function for frame in main.frames]


def only_child(pid: int) -> int:
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


def status_of(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + patience(10)
    while not condition():
        assert time.monotonic() < until, "not in time"
        time.sleep(0.01)
