"""Where a command's text goes: standard output, or a file that is written whole or not at all; a word beside it, to
standard error."""

from __future__ import annotations

import io
import os
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from doctor.core.errors import UnusableError
from doctor.core.files.atomic_write import replace_whole
from doctor.core.files.own_folder import OwnFolder
from doctor.core.files.trusted_owners import TrustedOwners, UntrustedPath, user_in_words

if TYPE_CHECKING:
    from doctor.core.job import Job
    from doctor.core.report_document import Report
    from doctor.report.multi_run import JudgedRuns


def deliver(report: Report, form: str, output: Path | None, *, quiet: bool, verbose: bool, job: Job) -> None:
    """Write the report. ``form``: one of :data:`doctor.cli.options.FORMATS`."""
    if form == "html":
        from doctor.report.html.document import render_html

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


def deliver_several(judged: JudgedRuns, form: str, output: Path | None, *, quiet: bool, verbose: bool) -> None:
    """Write the reports on several runs."""
    if form == "text":
        from doctor.report.terminal import draw_several, make_console

        console = make_console(sys.stdout if output is None else io.StringIO())
        write(draw_several(judged, console, verbose=verbose, quiet=quiet), output)
    else:
        from doctor.report.multi_run import SEVERAL_FORMATS

        write(SEVERAL_FORMATS[form](judged), output)


def write(text: str, output: Path | None) -> None:
    """Write to stdout, or to a file whole or not at all.

    Raises:
        UnusableError: it can't be written.
    """
    if output is None:
        _print(text)
        return
    try:
        _replace(text.encode("utf-8", "replace"), output, 0o666)
    except OSError as error:
        raise UnusableError(f"{output} can't be written: {error.strerror or error}") from None


def keep_capture(data: bytes, output: Path | None, name: str | None, group: int | None) -> None:
    """Write a capture to stdout, or to a file that only this user, or the ``group``, may read. With a ``name`` it goes
    into the folder ``output`` under that name, of which links are not followed.

    Raises:
        UnusableError: it can't be written.
    """
    owners = TrustedOwners.here(group)
    if output is None:
        _print(data.decode())
        return
    try:
        if name is not None:
            OwnFolder(output, owners=owners).write(name, data)
        else:
            _replace(data, output, owners.file_mode)
    except UntrustedPath as refused:
        raise UnusableError(str(refused)) from None
    except OSError as error:
        where = output if name is None else output / name
        raise UnusableError(f"{where} can't be written: {error.strerror or error}") from None


def _print(text: str) -> None:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        # What is still buffered must not raise again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):  # the reader (head, less) has left, and the verdict stands
            raise UnusableError(f"standard output can't be written: {error.strerror or error}") from None


def _replace(data: bytes, output: Path, mode: int) -> None:
    """Write a file that the user named, whole or not at all; one that is there keeps its permissions. ``mode``: of a
    new one, as far as the umask leaves it. A link of the user or root is followed; any other one may
    have been planted, in a folder that others may write to, to have a file of the user replaced."""
    seen = output.lstat() if output.is_symlink() else None
    if seen is not None and seen.st_uid not in (0, os.geteuid()):
        raise UntrustedPath(
            f"{output} is a symbolic link of {user_in_words(seen.st_uid)}: remove it, or use another name"
        )
    if output.exists() and not output.is_file():
        # /dev/stdout, a pipe, a terminal. A name of a pipe leads to no path: it is opened by the name that was given.
        output.write_bytes(data)
        return
    output = Path(os.path.realpath(output))  # what a link points to is written, not the link
    umask = os.umask(0)
    os.umask(umask)
    replace_whole(output, data, stat.S_IMODE(output.stat().st_mode) & 0o777 if output.exists() else mode & ~umask)


def print_notice(text: str) -> None:
    """One line on stderr; a name in it, of a host or an address, must not steer the reader's terminal."""
    from doctor.core.masking import mask_text
    from doctor.report.formatting import spelt_out

    click.echo(f"doctor: {spelt_out(mask_text(' '.join(text.split())))}", err=True)
