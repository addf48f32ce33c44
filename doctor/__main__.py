"""The command ``doctor``: usage, and the few ways in which a command ends early."""

from __future__ import annotations

import io
import os
import sys


def main() -> None:
    """Run the command line and leave with the exit code of the design: 0, 1, 2 or 3; 130 when interrupted."""
    if sys.argv[1:] == ["--version"]:
        # Answered before the command line is built: scripts ask for it often.
        from doctor.version import __version__

        print(f"rankdoctor {__version__}")  # noqa: T201
        return
    from doctor.catalog import UnusableError
    from doctor.cli import app

    for stream in (sys.stdout, sys.stderr):
        # A terminal that can't show a sign gets a question mark, not a UnicodeEncodeError.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")

    try:
        app()
    except UnusableError as error:
        print(f"doctor: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(2)
    except BrokenPipeError:
        # The reader (head, less) has left; what is still buffered must not raise again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


if __name__ == "__main__":
    main()
