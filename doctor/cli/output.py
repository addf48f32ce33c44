"""Writes a command's report to standard output or, atomically, to a file; and its notices to standard error."""

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
    from collections.abc import Callable

    from doctor.cli.options import CommonOptions
    from doctor.core.job import Job
    from doctor.core.report_document import Report
    from doctor.report.multi_run import JudgedRuns


def write_report(report: Report, job: Job, options: CommonOptions) -> None:
    """Write the report in the requested format."""
    if options.form == "text":
        from doctor.report.terminal import draw_report

        write_drawn(draw_report, report, options)
    else:
        write(rendered(report, options.form, job), options.output)


def write_reports(judged: JudgedRuns, options: CommonOptions) -> None:
    """Write the reports on several runs in the requested format."""
    if options.form == "text":
        from doctor.report.terminal import draw_several

        write_drawn(draw_several, judged, options)
    else:
        from doctor.report.multi_run import render_several

        write(render_several(judged, options.form), options.output)


def write_drawn(draw: Callable[..., str], document: object, options: CommonOptions) -> None:
    """Write ``document`` as text, drawn as wide as the terminal, if the output is one."""
    from doctor.report.terminal import make_console

    console = make_console(sys.stdout if options.output is None else io.StringIO())
    write(draw(document, console, verbose=options.verbose, quiet=options.quiet), options.output)


def rendered(report: Report, form: str, job: Job | None = None) -> str:
    """Return the report in a format other than text. ``job``: the facts, which HTML and Markdown show, too."""
    if form == "html":
        from doctor.report.html.document import render_html

        return render_html(report, job)
    if form == "markdown":
        from doctor.report.markdown import render_markdown

        return render_markdown(report, job)
    from doctor.report.machine_formats import MACHINE_FORMATS

    text = MACHINE_FORMATS[form](report)
    return text if text.endswith("\n") else text + "\n"


def write(text: str, output: Path | None) -> None:
    """Write to stdout or, atomically, to a file; raises ``UnusableError`` if it is not writable."""
    if output is None:
        _print(text)
        return
    try:
        _replace(text.encode("utf-8", "replace"), output, 0o666)
    except OSError as error:
        raise UnusableError(f"cannot write {output}: {error.strerror or error}") from None


def keep_capture(data: bytes, output: Path | None, name: str | None, group: int | None) -> None:
    """Write a capture to stdout or to a file that only this user, or the ``group``, may read.

    With a ``name``, ``output`` is the folder in which the file of that name is written; links are not followed.
    Raises as :func:`write`."""
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
        raise UnusableError(f"cannot write {where}: {error.strerror or error}") from None


def _print(text: str) -> None:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        # What is still buffered must not raise again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):  # the reader (head, less) has exited; the exit code still counts
            raise UnusableError(f"cannot write to standard output: {error.strerror or error}") from None


def _replace(data: bytes, output: Path, mode: int) -> None:
    """Write a file that the user named, atomically; an existing one keeps its permissions, a new one gets ``mode``
    less the umask. Only links of the user or root are followed: in a folder that others may write to, any other one
    may have been planted to have a file of the user replaced."""
    seen = output.lstat() if output.is_symlink() else None
    if seen is not None and seen.st_uid not in (0, os.geteuid()):
        owner = user_in_words(seen.st_uid)
        raise UntrustedPath(f"{output} is a symbolic link of {owner}: remove it, or use another name")
    if output.exists() and not output.is_file():
        # /dev/stdout, a pipe, a terminal. The real path of a pipe does not exist, so the name itself is opened.
        output.write_bytes(data)
        return
    output = Path(os.path.realpath(output))  # write the target of a link, not the link
    umask = os.umask(0)
    os.umask(umask)
    replace_whole(output, data, stat.S_IMODE(output.stat().st_mode) & 0o777 if output.exists() else mode & ~umask)


def print_notice(text: str) -> None:
    """Print one line on stderr; control characters in it (of a host name, say) are escaped."""
    from doctor.core.masking import mask_text
    from doctor.report.formatting import spelt_out

    click.echo(f"doctor: {spelt_out(mask_text(' '.join(text.split())))}", err=True)
