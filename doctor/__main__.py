"""The command ``doctor``: runs the command line, and handles errors and signals.

Until the working directory is off the import path, it imports only modules that the interpreter has loaded already,
which ``__future__`` is not.
"""

import codecs
import errno
import io
import os
import sys

from doctor.core.import_path import leave_working_directory

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TextIO

    import click

UNUSABLE, INCONCLUSIVE = 2, 3
"""Exit codes: usage error, or unusable input or output; no verdict, because rankdoctor failed. Never 1, the code for
findings."""
INTERRUPTED, TERMINATED = 130, 143
"""Exit codes as shells set them after SIGINT and SIGTERM."""


def main() -> None:
    """Run the command line and exit with 0, 1, 2 or 3; 130 when interrupted."""
    leave_working_directory()
    if not os.environ.get("DOCTOR_TRACEBACK"):
        # A thread without memory to begin with would print a traceback. A built-in function needs no memory itself.
        sys.unraisablehook = callable
    _ready_streams()
    if sys.argv[1:] == ["--version"]:
        # Before the command line is built, because scripts run this often.
        from doctor.version import __version__

        sys.exit(_run(lambda: print(f"rankdoctor {__version__}")))  # noqa: T201
    if sys.argv[1:2] == ["run"]:
        # Every rank of a job may start this way, and building a command line takes longer than this.
        from doctor.monitor.autostart.launch import read_plain, replace_process

        if (plain := read_plain(sys.argv[2:])) is not None:
            sys.exit(_run(lambda: replace_process(*plain)))
    sys.exit(_run(_command))


def _run(work: "Callable[[], int | None]") -> int:
    """Return the exit code of ``work``, however it ends, after all its output is written."""
    stdout = sys.stdout
    try:
        code = work() or 0
    except KeyboardInterrupt:
        code = INTERRUPTED
    except SystemExit as end:
        # click exits with 1 and wraps the streams if the reader of its help text has exited.
        code = end.code if isinstance(end.code, int) and sys.stdout is stdout else 0
    except Exception as error:  # noqa: BLE001 - an uncaught exception would exit with 1
        code = _failed(error)
    return _flushed(code)


def _failed(error: Exception) -> int:
    """Print why there is no verdict, and with DOCTOR_TRACEBACK the traceback."""
    if os.environ.get("DOCTOR_TRACEBACK"):
        import traceback

        traceback.print_exception(error)
    if isinstance(error, OSError) and error.filename is None and error.errno in _UNWRITABLE:
        _discard(sys.stdout)
        if error.errno == errno.EPIPE:
            return 0  # the reader has exited
        _say(f"cannot write to standard output: {error.strerror}")
        return UNUSABLE
    _say(f"{_reason(error)}; there is no verdict (DOCTOR_TRACEBACK=1 shows the traceback)")
    if _is_exhausted(error):
        os._exit(INCONCLUSIVE)  # without memory, threads abort the interpreter while it finalizes
    return INCONCLUSIVE


_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE, errno.EBADF)
"""Errors of writing to a stream, which name no file."""


def _is_exhausted(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or getattr(error, "errno", None) in (errno.ENOMEM, errno.EAGAIN):
        return True
    return "can't start new thread" in str(error)


def _reason(error: BaseException) -> str:
    if _is_exhausted(error):
        return f"a limit on memory or processes was reached ({type(error).__name__}: {error or 'no memory'})"
    trace, last = error.__traceback__, None
    while trace is not None:
        trace, last = trace.tb_next, trace
    where = f" at {os.path.basename(last.tb_frame.f_code.co_filename)}:{last.tb_lineno}" if last else ""  # noqa: PTH119
    return f"internal error{where}: {type(error).__name__}: {error}"


def _flushed(code: int) -> int:
    """Return ``code``, or 2 if the output can't be written. The interpreter would try again at its end, and exit with
    120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError) as error:
            _discard(stream)
            if stream is sys.stdout and not isinstance(error, BrokenPipeError) and code <= INCONCLUSIVE:
                _say(f"cannot write to standard output: {getattr(error, 'strerror', None) or error}")
                code = UNUSABLE
    return code


def _discard(stream: "TextIO") -> None:
    """Discard what is buffered, and what follows."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    except (OSError, ValueError):
        return


def _say(text: str) -> None:
    """Print one line on standard error, if that is possible."""
    try:
        from doctor.core.masking import mask_text
        from doctor.report.formatting import spelt_out

        print(f"doctor: {spelt_out(mask_text(' '.join(text.split())))}", file=sys.stderr, flush=True)  # noqa: T201
    except (OSError, ValueError):
        return
    except MemoryError:
        os.write(2, b"doctor: not enough memory; there is no verdict\n")


def _command() -> int:
    import gc
    import signal
    import threading

    # The process is short-lived and its data have no cycles: collections take a quarter of the time for a large job.
    gc.disable()
    # Exit in order, so that children of collectors are killed, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    # Whoever waits for the thread's result handles its absence.
    threading.excepthook = lambda broken: _say(f"a thread ended early: {_reason(broken.exc_value or MemoryError())}")
    import click

    from doctor.core.errors import UnusableError

    app: click.Command
    if sys.argv[1:2] == ["run"]:  # without the other commands, for the same reason
        from doctor.cli.run import command

        app, name, arguments = command, f"{_called()} run", sys.argv[2:]
    else:
        from doctor.cli.main import app as commands

        app, name, arguments = commands, _called(), sys.argv[1:]
    try:
        return app.main(arguments, prog_name=name, standalone_mode=False) or 0
    except click.Abort:
        return INTERRUPTED
    except click.ClickException as error:
        _show_usage(error)
    except UnusableError as error:
        _say(str(error))
    return UNUSABLE


def _called() -> str:
    """Return the name of the script that was started: ``doctor`` has ``rankdoctor`` as a second name."""
    return "rankdoctor" if os.path.basename(sys.argv[0]) == "rankdoctor" else "doctor"  # noqa: PTH119 - no import


def _show_usage(error: "click.ClickException") -> None:
    """Print a usage error in one line, and the command that shows the usage; the help text if nothing was given.

    It is escaped, because a shell pattern may have put a hostile file name into it."""
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":  # click 8.2 or later; its message is the help text
        error.show()
        return
    message = error.format_message().rstrip(".")
    hint = f" (see '{context.command_path} --help')" if context is not None else ""
    _say(f"{message[:1].lower() + message[1:] if message[1:2].islower() else message}{hint}")


def _ready_streams() -> None:
    """Open closed streams, and let unencodable characters be replaced."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            # Closed by the caller: the next file that is opened would get its descriptor.
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), "w" if descriptor else "r"))
    for stream in (sys.stdout, sys.stderr):
        # A character that the encoding lacks is replaced, and raises no UnicodeEncodeError.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="doctor.spell")


_SPELLINGS = {"✓": "+", "✗": "x", "·": "-", "─": "-", "━": "=", "–": "-", "…": "...", "→": "->", "×": "x", "≥": ">="}
"""Characters of our own output in ASCII, for streams of the C locale."""


def _spell(error: UnicodeError) -> "tuple[str | bytes, int]":
    """Replace each character that an encoding lacks by its spelling, or by a question mark: an error handler."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    return "".join(_SPELLINGS.get(character, "?") for character in lacking), error.end


codecs.register_error("doctor.spell", _spell)


if __name__ == "__main__":
    main()
