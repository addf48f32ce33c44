"""The command ``doctor``: usage, and the few ways in which a command ends early.

It imports nothing that the interpreter has not loaded before, ``__future__`` included, until the working directory is
off the import path.
"""

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
"""Exit codes: usage, input or output that can't be used; no verdict, for a reason of the doctor's own. Never 1, which
says that something was found."""
INTERRUPTED, TERMINATED = 130, 143
"""Exit codes as shells give them after SIGINT and SIGTERM: neither is a verdict."""


def main() -> None:
    """Run the command line and leave with the exit code of the design: 0, 1, 2 or 3; 130 when interrupted."""
    leave_working_directory()
    _ready_streams()
    if sys.argv[1:] == ["--version"]:
        # Answered before the command line is built: scripts ask for it often.
        from doctor.version import __version__

        sys.exit(_run(lambda: print(f"rankdoctor {__version__}")))  # noqa: T201
    sys.exit(_run(_command))


def _run(work: "Callable[[], int | None]") -> int:
    """The exit code of ``work``, however it ends, with all that it printed written."""
    stdout = sys.stdout
    try:
        code = work() or 0
    except KeyboardInterrupt:
        code = INTERRUPTED
    except SystemExit as end:
        # click ends with 1 and wraps the streams where the reader of its help text has left.
        code = end.code if isinstance(end.code, int) and sys.stdout is stdout else 0
    except Exception as error:  # noqa: BLE001 - a traceback would end with 1
        code = _failed(error)
    return _flushed(code)


def _failed(error: Exception) -> int:
    """Say in a sentence what kept the command from a verdict; the traceback where DOCTOR_TRACEBACK is set."""
    if os.environ.get("DOCTOR_TRACEBACK"):
        import traceback

        traceback.print_exception(error)
    if isinstance(error, OSError) and error.filename is None and error.errno in _UNWRITABLE:
        _discard(sys.stdout)
        if error.errno == errno.EPIPE:
            return 0  # the reader has left
        _say(f"standard output can't be written: {error.strerror}")
        return UNUSABLE
    _say(f"{_reason(error)}; nothing was concluded (DOCTOR_TRACEBACK=1 shows the traceback)")
    if _is_exhausted(error):
        os._exit(INCONCLUSIVE)  # without memory the interpreter can't end in an orderly way: threads abort it
    return INCONCLUSIVE


_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE, errno.EBADF)
"""What a stream that is written to can answer. Errors of files name the file."""


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
    """``code``, or 2 where what was printed can't be written. The interpreter would try again at its end, and end with
    120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError) as error:
            _discard(stream)
            if stream is sys.stdout and not isinstance(error, BrokenPipeError) and code <= INCONCLUSIVE:
                _say(f"standard output can't be written: {getattr(error, 'strerror', None) or error}")
                code = UNUSABLE
    return code


def _discard(stream: "TextIO") -> None:
    """Let what is still buffered, and what follows, go nowhere."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    except (OSError, ValueError):
        return


def _say(text: str) -> None:
    """One line on standard error, which may be as broken as the rest."""
    try:
        from doctor.core.masking import mask_text
        from doctor.report.formatting import spelt_out

        print(f"doctor: {spelt_out(mask_text(' '.join(text.split())))}", file=sys.stderr, flush=True)  # noqa: T201
    except (OSError, ValueError):
        return
    except MemoryError:
        os.write(2, b"doctor: not enough memory; nothing was concluded\n")


def _command() -> int:
    import gc
    import signal
    import threading

    # The process ends in a moment and what it holds has no cycles: looking for some is a quarter of a large job's time.
    gc.disable()
    # An orderly end, so that children of collectors are ended too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    # What a thread was to bring is missed where it is waited for.
    threading.excepthook = lambda broken: _say(f"a thread ended early: {_reason(broken.exc_value or MemoryError())}")
    import click

    from doctor.cli.main import app
    from doctor.core.errors import UnusableError

    try:
        return app.main(prog_name="doctor", standalone_mode=False) or 0
    except click.Abort:
        return INTERRUPTED
    except click.ClickException as error:
        _show_usage(error)
    except UnusableError as error:
        _say(str(error))
    return UNUSABLE


def _show_usage(error: "click.ClickException") -> None:
    """What click shows of a usage error. A shell pattern may have put a hostile file name into it."""
    from doctor.core.masking import mask_text
    from doctor.report.formatting import spelt_out

    text = io.StringIO()
    error.show(text)
    sys.stderr.write(spelt_out(mask_text(text.getvalue())))


def _ready_streams() -> None:
    """Streams that are there and that any text can be written to."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            # Closed by the caller: else the next file that is opened would be taken for it.
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), "w" if descriptor else "r"))
    for stream in (sys.stdout, sys.stderr):
        # A terminal that can't show a sign gets a question mark, not a UnicodeEncodeError.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


if __name__ == "__main__":
    main()
