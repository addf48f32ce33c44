"""Where a command's text goes: standard output, or a file that is written whole or not at all; a word beside it, to
standard error."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from doctor.errors import UnusableError
from doctor.writing import replace_whole

if TYPE_CHECKING:
    from doctor.job import Job
    from doctor.result import Report


def deliver(report: Report, form: str, output: Path | None, *, quiet: bool, verbose: bool, job: Job) -> None:
    """Write the report. ``form``: one of :data:`doctor.cli_options.FORMATS`."""
    if form == "html":
        from doctor.report.html import render_html

        write(render_html(report, job), output)
    elif form == "markdown":
        from doctor.report.markdown import render_markdown

        write(render_markdown(report, job), output)
    elif form != "text":
        from doctor.report import MACHINE_FORMATS

        text = MACHINE_FORMATS[form](report)
        write(text if text.endswith("\n") else text + "\n", output)
    else:
        from doctor.report.terminal import draw_report, make_console

        console = make_console(sys.stdout if output is None else io.StringIO())
        write(draw_report(report, console, verbose=verbose, quiet=quiet), output)


def write(text: str, output: Path | None) -> None:
    """Write to stdout, or to a file whole or not at all.

    Raises:
        UnusableError: it can't be written.
    """
    if output is None:
        _print(text)
        return
    try:
        _write_atomically(text, output)
    except OSError as error:
        raise UnusableError(f"{output} can't be written: {error.strerror or error}") from None


def _print(text: str) -> None:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        # What is still buffered must not raise again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):  # the reader (head, less) has left, and the verdict stands
            raise UnusableError(f"standard output can't be written: {error.strerror or error}") from None


def _write_atomically(text: str, output: Path) -> None:
    output = Path(os.path.realpath(output))  # what a link points to is written, not the link
    if output.exists() and not output.is_file():
        output.write_text(text, encoding="utf-8", errors="replace")  # /dev/stdout, a pipe
        return
    umask = os.umask(0)
    os.umask(umask)
    replace_whole(output, text.encode("utf-8", "replace"), 0o666 & ~umask)


def tell(text: str) -> None:
    """One line on stderr; a name in it, of a host or an address, must not steer the reader's terminal."""
    from doctor.report.words import spelt_out

    click.echo(f"doctor: {spelt_out(' '.join(text.split()))}", err=True)
