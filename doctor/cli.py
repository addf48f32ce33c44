"""The command line: options into settings, settings into a session, its report onto paper."""

from __future__ import annotations

import io
import os
import sys
import tempfile
import time
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from doctor.catalog import UnusableError
from doctor.version import __version__

if TYPE_CHECKING:
    from doctor.catalog import Catalog
    from doctor.job import Job
    from doctor.result import Report
    from doctor.settings import Settings

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="The doctor for distributed PyTorch training: which rank, host, device or setting is to blame.",
)


class Format(str, Enum):
    """How a report is written."""

    TEXT = "text"
    JSON = "json"
    MARKDOWN = "markdown"
    JUNIT = "junit"
    GITHUB = "github"


class TableFormat(str, Enum):
    """How a list is written."""

    TEXT = "text"
    JSON = "json"


class PageFormat(str, Enum):
    """How a difference is written."""

    TEXT = "text"
    JSON = "json"
    MARKDOWN = "markdown"


class Threshold(str, Enum):
    """From which severity on a finding makes the exit code 1."""

    ERROR = "error"
    WARNING = "warning"
    NEVER = "never"


class Probe(str, Enum):
    """Which active measurements are made."""

    NONE = "none"


FormatOption = Annotated[Format, typer.Option("--format", help="How the report is written.")]
OutputOption = Annotated[Path | None, typer.Option("-o", "--output", help="Write it to this file, not to stdout.")]
SelectOption = Annotated[str, typer.Option(help="Only these checks: ids, families or ALL, comma-separated.")]
IgnoreOption = Annotated[str, typer.Option(help="Findings of these checks do not count; they stay visible.")]
FailOnOption = Annotated[
    Threshold | None, typer.Option(help="Exit 1 for findings from this severity on (default: error).")
]
PluginOption = Annotated[list[Path] | None, typer.Option(help="A Python file with further checks; may be repeated.")]
TimeoutOption = Annotated[
    float | None, typer.Option(min=0.1, max=3600.0, help="Seconds that no collector may exceed (default: 30).")
]
RedactOption = Annotated[bool, typer.Option("--redact", help="Stand-ins for users, hosts, paths and addresses.")]
QuietOption = Annotated[bool, typer.Option("-q", "--quiet", help="Only findings and the verdict.")]
VerboseOption = Annotated[bool, typer.Option("-v", "--verbose", help="Every check on a line of its own.")]
StrictOption = Annotated[bool, typer.Option(help="A check that could not be judged makes the verdict inconclusive.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rankdoctor {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the release.")
    ] = False,
) -> None:
    pass


@app.command()
def check(
    format_: FormatOption = Format.TEXT,
    output: OutputOption = None,
    select: SelectOption = "",
    ignore: IgnoreOption = "",
    fail_on: FailOnOption = None,
    timeout: TimeoutOption = None,
    probe: Annotated[Probe, typer.Option(help="Active measurements; this release makes none.")] = Probe.NONE,
    strict: StrictOption = False,
    plugin: PluginOption = None,
    redact: RedactOption = False,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Tell what is wrong with this host, this process environment and these GPUs, before the run."""
    from doctor.session import judge

    started = time.time()
    settings = _settings(select, ignore, fail_on, plugin, timeout)
    catalog = _checks(settings)
    job = _collect(settings)
    report = judge(_redacted(job) if redact else job, catalog, settings, strict=strict, started=started)
    _deliver(report, format_, output, quiet=quiet, verbose=verbose)


@app.command()
def capture(
    output: OutputOption = None,
    timeout: TimeoutOption = None,
    redact: RedactOption = False,
) -> None:
    """Write the facts alone as JSON, without secrets, to be judged later or elsewhere.

    A folder given with -o gets one file a rank.
    """
    from doctor.capture import encode_document, to_document
    from doctor.session import breakages

    job = _collect(_settings("", "", None, None, timeout))
    document = to_document(job)
    if redact:
        document = _redact_document(document)
    if output is not None and output.is_dir():
        output = output / f"rank-{job.ranks[0].number}.json"
    _write(encode_document(document).decode(), output)
    if breakages(job):
        for broken in breakages(job):
            typer.echo(f"doctor: {broken.reason}", err=True)
        raise typer.Exit(3)


@app.command()
def diagnose(
    paths: Annotated[list[Path], typer.Argument(help="Captures, or folders of them.")],
    format_: FormatOption = Format.TEXT,
    output: OutputOption = None,
    select: SelectOption = "",
    ignore: IgnoreOption = "",
    fail_on: FailOnOption = None,
    strict: StrictOption = False,
    plugin: PluginOption = None,
    redact: RedactOption = False,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Judge captures, of one rank or many, on any machine."""
    from doctor.capture import merge_captures
    from doctor.inputs import read_inputs
    from doctor.session import judge

    started = time.time()
    settings = _settings(select, ignore, fail_on, plugin, None)
    catalog = _checks(settings)
    inputs = read_inputs(paths)
    job = merge_captures(inputs.captures)
    report = judge(
        _redacted(job) if redact else job,
        catalog,
        settings,
        strict=strict,
        must_be_complete=False,
        inputs=inputs.files,
        started=started,
    )
    _deliver(report, format_, output, quiet=quiet, verbose=verbose)


@app.command()
def diff(
    before: Annotated[Path, typer.Argument(help="The capture of the run that worked.")],
    after: Annotated[Path, typer.Argument(help="The capture of the run that did not.")],
    format_: Annotated[PageFormat, typer.Option("--format", help="How it is written.")] = PageFormat.TEXT,
    output: OutputOption = None,
) -> None:
    """Tell what changed between two captures, the likeliest causes first. Exit 1 where anything did."""
    from doctor.capture import merge_captures
    from doctor.diff import compare
    from doctor.inputs import read_inputs
    from doctor.report.difference import render_difference

    jobs = [merge_captures(read_inputs([path]).captures) for path in (before, after)]
    differences = compare(*jobs)
    _write(render_difference(differences, str(before), str(after), format_.value), output)
    raise typer.Exit(1 if differences else 0)


@app.command()
def explain(
    word: Annotated[str, typer.Argument(metavar="ID", help="An id such as NET007, or a name.")],
    format_: Annotated[TableFormat, typer.Option("--format", help="How it is written.")] = TableFormat.TEXT,
    output: OutputOption = None,
) -> None:
    """Print the playbook of a check: what you see, how to confirm it, how to fix it, why it happens."""
    import msgspec

    from doctor.playbook import find_page

    page = find_page(word)
    if format_ is TableFormat.JSON:
        _write(msgspec.json.format(msgspec.json.encode(page), indent=2).decode() + "\n", output)
    elif output is not None or not sys.stdout.isatty():
        _write(page.markdown, output)
    else:
        from rich.console import Console
        from rich.markdown import Markdown

        Console().print(Markdown(page.markdown))


@app.command("list")
def list_(
    format_: Annotated[TableFormat, typer.Option("--format", help="How it is written.")] = TableFormat.TEXT,
    output: OutputOption = None,
    select: SelectOption = "",
    plugin: PluginOption = None,
) -> None:
    """List every check with its family, severity, needs and origin."""
    from doctor.report.listing import render_listing

    catalog = _checks(_settings(select, "", None, plugin, None))
    _write(render_listing(catalog, format_.value, sys.stdout), output)


def _settings(
    select: str, ignore: str, fail_on: Threshold | None, plugins: list[Path] | None, timeout: float | None
) -> Settings:
    from doctor.session import with_command_line
    from doctor.settings import read_settings

    return with_command_line(
        read_settings(Path.cwd()),
        select=_words(select),
        ignore=_words(ignore),
        fail_on=fail_on.value if fail_on else None,
        plugins=plugins or [],
        timeout=timeout,
    )


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _checks(settings: Settings) -> Catalog:
    from doctor.session import load_checks

    return load_checks(settings)


def _collect(settings: Settings) -> Job:
    from doctor.session import collect

    return collect(settings, announce=lambda text: typer.echo(f"doctor: {text}", err=True))


def _redact_document(document: dict[str, Any]) -> dict[str, Any]:
    from doctor.redaction import redact

    return redact(document)


def _redacted(job: Job) -> Job:
    """The job with stand-ins, made before it is judged, so that no word of a finding can hold what they stand for."""
    from doctor.capture import from_document, to_document

    return from_document(_redact_document(to_document(job)))


def _deliver(report: Report, format_: Format, output: Path | None, *, quiet: bool, verbose: bool) -> None:
    """Write the report and leave with its exit code."""
    if format_ is not Format.TEXT:
        from doctor.report import MACHINE_FORMATS

        text = MACHINE_FORMATS[format_.value](report)
        _write(text if text.endswith("\n") else text + "\n", output)
    else:
        from doctor.report.terminal import make_console, print_report

        stream = sys.stdout if output is None else io.StringIO()
        print_report(report, make_console(stream), verbose=verbose, quiet=quiet)
        if isinstance(stream, io.StringIO):
            _write(stream.getvalue(), output)
    raise typer.Exit(report.exit_code)


def _write(text: str, output: Path | None) -> None:
    """Write to stdout, or to a file whole or not at all.

    Raises:
        UnusableError: the file can't be written.
    """
    if output is None:
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    try:
        _write_atomically(text, output)
    except OSError as error:
        raise UnusableError(f"{output} can't be written: {error.strerror or error}") from None


def _write_atomically(text: str, output: Path) -> None:
    if output.exists() and not output.is_file():
        output.write_text(text, encoding="utf-8")  # /dev/stdout, a pipe
        return
    descriptor, name = tempfile.mkstemp(dir=output.parent, prefix=f".{output.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
        umask = os.umask(0)
        os.umask(umask)
        Path(name).chmod(0o666 & ~umask)
        Path(name).replace(output)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise
