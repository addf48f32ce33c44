"""``python -m doctor`` in a process forked from one that has imported it: the imports take longer than most commands.

What a test claims of the start of the interpreter, of signals or of odd streams needs a process of its own.
"""

from __future__ import annotations

import atexit
import functools
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

from tests.lab.speed import patience

STARTING = ("PYTHON", "LANG", "LC_")
"""How variables begin that the interpreter itself reads when it starts: only a new process can follow other values."""
IMPORTED = (
    "cli.main",
    "cli.lint",
    "core.capture",
    "session",
    "postmortem.run_reader",
    "report.html.document",
    "report.machine_formats",
    "report.terminal",
)


def run_doctor(
    *arguments: object, cwd: Path, env: Mapping[str, str] | None = None, seconds: float = 60
) -> subprocess.CompletedProcess[str]:
    """The result of ``python -m doctor`` with these arguments, without a terminal.

    Raises ``subprocess.TimeoutExpired`` after ``seconds`` of an idle machine.
    """
    words = [*map(str, arguments)]
    environ = dict(os.environ if env is None else env)
    command = [sys.executable, "-m", "doctor", *words]
    if any(value != os.environ.get(name) for name, value in environ.items() if name.startswith(STARTING)):
        return subprocess.run(
            command, cwd=cwd, env=environ, capture_output=True, text=True, check=False, timeout=patience(seconds)
        )
    with tempfile.TemporaryDirectory() as folder:
        streams = [Path(folder, name) for name in ("stdout", "stderr")]
        code = _server().run([words, str(cwd), environ, [*map(str, streams)], _umask()], patience(seconds))
        stdout, stderr = (path.read_text(encoding="utf-8") for path in streams)
    return subprocess.CompletedProcess(command, code, stdout, stderr)


def _umask() -> int:
    """The mask of this process, which a process that it starts inherits."""
    umask = os.umask(0)
    os.umask(umask)
    return umask


class _Server:
    """The process that has imported the command, and forks a child for each request."""

    def __init__(self) -> None:
        code = (
            f"import sys; sys.path.append({str(Path(__file__).parents[2])!r}); import tests.lab.command as c; c.serve()"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/"
        )
        atexit.register(self._process.communicate)

    def run(self, request: list[object], seconds: float) -> int:
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        pid = int(self._process.stdout.readline())
        killed = threading.Event()
        timer = threading.Timer(seconds, lambda: (killed.set(), os.kill(pid, signal.SIGKILL)))
        timer.start()
        code = int(self._process.stdout.readline())
        timer.cancel()
        if killed.is_set():
            raise subprocess.TimeoutExpired("doctor", seconds)
        return code


_server = functools.cache(_Server)


def serve() -> None:
    """Answer each line of standard input with the process id and the exit code of a command."""
    import importlib

    for name in ("__main__", *IMPORTED):
        importlib.import_module(f"doctor.{name}")
    _load_checks()
    for line in sys.stdin:
        if not (pid := os.fork()):
            _run(*json.loads(line))
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def _load_checks() -> None:
    """Import all checks and rules and compile the known messages, which nearly every command needs."""
    from doctor.core.check_registry import builtin_checks
    from doctor.knowledge.log_patterns import known_patterns
    from doctor.lint.engine.registry import builtin_rules

    for _ in (*builtin_checks(), *builtin_rules(), *(message.compiled for message in known_patterns())):
        pass


def _run(words: list[str], cwd: str, environ: dict[str, str], streams: list[str], umask: int) -> NoReturn:
    """Become ``python -m doctor`` in a forked child."""
    from doctor import __main__ as command

    _redirect(streams)
    os.umask(umask)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environ)
    sys.path[0] = cwd
    sys.argv = [str(command.__file__), *words]
    os._exit(_code_of(command.main))


def _redirect(streams: list[str]) -> None:
    """Open the standard streams as an interpreter does in the POSIX locale."""
    for number, path in enumerate([os.devnull, *streams]):
        opened = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), encoding="utf-8")
    for name, number, errors in (("stdout", 1, "surrogateescape"), ("stderr", 2, "backslashreplace")):
        raw = io.BufferedWriter(io.FileIO(number, "w", closefd=False))
        stream = io.TextIOWrapper(raw, encoding="utf-8", errors=errors, line_buffering=number == 2)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _code_of(main: Callable[[], None]) -> int:
    try:
        main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code
