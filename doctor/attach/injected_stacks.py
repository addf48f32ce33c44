"""Stacks that a process writes itself, because a script of ours runs in it (``sys.remote_exec``, PEP 768).

CPython 3.14 lets a process that may trace another one write the path of a script into the memory of its interpreter,
whose main thread then runs the script where it would handle a signal. A main thread that is blocked in native code
does not run it until it returns to Python. Both interpreters must have the same minor version.

A child of ours makes the request, as the user of the process: it owns the script and the file for the answer, in a
folder that only this user may enter. A request that is not answered in time is replaced by one for ``/dev/null``:
the interpreter reports a script that it cannot open on standard error.

Sources: PEP 768; sys.remote_exec and "Remote debugging attachment protocol" in the documentation of Python 3.14;
Python/remote_debugging.c and Python/ceval_gil.c of CPython.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from doctor.attach.refusals import Refusal, explain_denial, printable_text
from doctor.collectors.base import link_target, parse_int
from doctor.core.facts import Frame, StackThread
from doctor.core.process import ChildOwner, abandon_child, start_child
from doctor.core.stack_dumps.threads import dumped_frame, dumped_thread

PYTHON = Path(sys.executable)
"""The interpreter of the child."""
SECONDS = 1.0
"""Seconds within which a process has to answer."""
_START = 2.0
"""Further seconds in which the child has to start and to end."""
_DISABLED = "PYTHON_DISABLE_REMOTE_DEBUG"
_PROC = Path("/proc")
_NO_ACCESS = "no access"
_NO_INTERPRETER = "PyRuntime"
_NOT_FOUND = Refusal("sys.remote_exec found no interpreter of Python 3.14 or later in this process.")
_LATE = Refusal("The script of --allow-inject did not run in time: the main thread executed no Python code.")

_SCRIPT = """
import sys, posix, _thread
try:
    file = posix.open(ANSWER, posix.O_WRONLY | posix.O_NOFOLLOW | posix.O_CLOEXEC)
    try:
        own, lines = _thread.get_ident(), []
        known = getattr(sys.modules.get("threading"), "_active", {})
        frames = {own: sys._getframe()} if "t" in sys.abiflags else sys._current_frames()
        for ident, frame in frames.items():
            more = getattr(known.get(ident), "__dict__", {})
            lines.append(("thread", str(int(ident == own)), str(more.get("_native_id")), str(more.get("_name"))))
            while frame is not None and len(lines) < 20000:
                code = frame.f_code
                if frame.f_globals is not globals():
                    lines.append(("frame", str(frame.f_lineno), code.co_name, code.co_filename))
                frame = frame.f_back
        lines = ["\\t".join(part.replace("\\n", " ").replace("\\t", " ") for part in line) for line in lines]
        text = ("\\n".join(lines) + "\\nend\\n").encode("utf-8", "backslashreplace")
        while text:
            text = text[posix.write(file, text):]
    finally:
        posix.close(file)
except KeyboardInterrupt:
    _thread.interrupt_main()
except Exception:
    pass
finally:
    globals().clear()
"""
"""What runs in the process: it writes one line for each thread and frame. It imports nothing that is not loaded, holds
no reference afterwards, and does nothing if the file for the answer is gone. In a build without the interpreter's lock
it reads its own thread only, as all others would have to stop. A signal that arrives meanwhile is raised again."""

_REQUEST = """
import os, shutil, sys, tempfile, time

pid, seconds, script = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]

def write(name, text):
    path = os.path.join(folder, name)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    return path

def read():
    with open(answer, "rb") as file:
        text = file.read(8 << 20)
    return text if text.endswith(b"\\nend\\n") else b""

def is_denial(error):
    return error is not None and (isinstance(error, PermissionError) or is_denial(error.__context__))

if not hasattr(sys, "remote_exec"):
    sys.exit("Python %d.%d has no sys.remote_exec" % sys.version_info[:2])
folder = tempfile.mkdtemp(prefix="rankdoctor-", dir="/tmp")
try:
    answer = write("answer", "")
    script = write("script.py", script.replace("ANSWER", repr(answer)))
    sys.remote_exec(pid, script)
    until = time.monotonic() + seconds
    while not (text := read()) and time.monotonic() < until:
        time.sleep(0.01)
    if not text:
        sys.remote_exec(pid, "/dev/null")
        time.sleep(0.05)
        text = read()
    sys.stdout.buffer.write(text)
except Exception as error:
    sys.exit("no access" if is_denial(error) else str(error))
finally:
    shutil.rmtree(folder, ignore_errors=True)
"""
"""What the child runs. It prints the answer, and nothing if there is none in time."""


class Injection(NamedTuple):
    """The threads that a process wrote, or why it did not."""

    threads: tuple[StackThread, ...] = ()
    refusal: Refusal | None = None


def inject(pid: int, owner: ChildOwner | None = None) -> Injection:
    """Let a process write its stacks. ``owner``: the user of the process, if it is not that of this one."""
    if refusal := _obstacle(pid):
        return Injection(refusal=refusal)
    command = [str(PYTHON), "-I", "-S", "-c", _REQUEST, str(pid), str(SECONDS), _SCRIPT]
    try:
        child = start_child(command, stderr=subprocess.PIPE, env={"LC_ALL": "C.UTF-8"}, cwd="/", owner=owner)
    except OSError as error:
        reason = f"The Python of doctor attach could not be started: {error.strerror or type(error).__name__}."
        return Injection(refusal=Refusal(reason))
    try:
        answer, message = child.communicate(timeout=SECONDS + _START)
    except subprocess.TimeoutExpired:
        return Injection(refusal=_LATE)
    finally:
        abandon_child(child)
    if child.returncode:
        return Injection(refusal=_refusal(message, pid, owner))
    threads = tuple(_threads(answer.decode("utf-8", "replace")))
    return Injection(threads) if threads else Injection(refusal=_LATE)


def _obstacle(pid: int) -> Refusal | None:
    """Return why the process cannot read a script that is written here, or must not be asked."""
    if os.environ.get(_DISABLED) or "disable-remote-debug" in sys._xoptions:
        return Refusal(f"Remote debugging is disabled for doctor attach itself ({_DISABLED}).")
    own, target = ((_PROC / one / "ns" / "mnt", _PROC / one / "root") for one in ("self", str(pid)))
    if any(link_target(path) not in (None, link_target(here)) for path, here in zip(target, own, strict=True)):
        return Refusal("The process has another root directory, so a script cannot be handed to it.")
    return None


def _refusal(message: bytes, pid: int, owner: ChildOwner | None) -> Refusal:
    text = printable_text(message.decode("utf-8", "replace").strip())
    if text == _NO_ACCESS:
        return explain_denial(pid, owner)
    return _NOT_FOUND if _NO_INTERPRETER in text else Refusal(f"sys.remote_exec failed: {text.rstrip('.')}.")


def _threads(answer: str) -> Iterator[StackThread]:
    """Yield the threads of an answer; frames innermost first."""
    found: list[tuple[list[str], list[Frame]]] = []
    for line in answer.split("\n"):
        kind, *rest = line.split("\t")
        if kind == "thread" and len(rest) == 3:
            found.append((rest, []))
        elif kind == "frame" and len(rest) == 3 and found:
            number, function, file = rest
            found[-1][1].append(dumped_frame(file, parse_int(number) or 0, function))
    for (is_main, native_id, name), frames in found:
        yield dumped_thread(frames, name=name, native_id=parse_int(native_id) or 0, is_main=is_main == "1")
