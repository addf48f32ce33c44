"""``doctor lint``: options into what is asked, findings onto paper."""

from __future__ import annotations

import io
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from doctor.cli.options import (
    PATH,
    fail_on_option,
    format_option,
    ignore_option,
    output_option,
    plugin_option,
    print_notes,
    quiet_option,
    redact_option,
    select_option,
    settings_of,
    settings_options,
    strict_option,
    verbose_option,
    words,
)
from doctor.cli.output import write
from doctor.core.decoding import prepared

if TYPE_CHECKING:
    from collections.abc import Sequence

    from doctor.core.report_document import FailOn, Report
    from doctor.lint.engine.file_check import FileResult
    from doctor.lint.engine.runner import LintRequest
    from doctor.lint.fix.fixer import FixOutcome
    from doctor.report.lint.sarif import Fixes


@click.command("lint")
@click.argument("paths", nargs=-1, required=True, type=PATH)
@format_option("text", "json", "github", "sarif", "markdown", "junit", "html")
@output_option
@select_option
@ignore_option
@fail_on_option
@strict_option
@settings_options
@plugin_option
@redact_option
@click.option("--fix", is_flag=True, help="Mend what can be mended for certain, then judge again (needs LibCST).")
@click.option("--diff", is_flag=True, help="Print what --fix would change, and change nothing.")
@click.option("--lightning", metavar="RELEASE", help="The Lightning that scripts will meet (default: installed).")
@click.option("--cores", type=click.IntRange(1, 100_000), help="Cores of the machine on which scripts will run.")
@quiet_option
@verbose_option
def command(
    paths: tuple[Path, ...],
    form: str,
    output: Path | None,
    select: str,
    ignore: str,
    fail_on: FailOn | None,
    strict: bool,
    plugins: tuple[Path, ...],
    redact: bool,
    fix: bool,
    diff: bool,
    lightning: str | None,
    cores: int | None,
    quiet: bool,
    verbose: bool,
) -> None:
    """Tell what in training scripts and launch files hangs, diverges or wastes memory on several ranks.

    PATHS are files and folders: Python, notebooks, shell scripts for SLURM and torchrun, YAML and JSON of Kubernetes,
    Accelerate and DeepSpeed; `-` is standard input. They are read and parsed, and nothing in them is imported or run.
    A finding is accepted by `# doctor: ignore[ID] reason` on its line or alone on the line above.
    """
    from doctor.core.files.spooled_streams import spooled_paths
    from doctor.lint.engine.discovery import ending_of
    from doctor.lint.engine.request import lint_request
    from doctor.lint.engine.runner import build_report, lint_paths
    from doctor.lint.fix.fixer import replacements_for

    if (fix and diff) or (diff and redact):
        raise click.UsageError(f"--diff and {'--fix' if fix else '--redact'} exclude each other.")
    started = time.time()
    settings = settings_of(select, ignore, fail_on, plugins, None)
    print_notes(settings)
    with redirect_stdout(sys.stderr), spooled_paths(paths, ending_of) as files:  # guests may print
        asked = lint_request(settings, typed=words(select), lightning=lightning, processors=cores, strict=strict)
        verdicts = lint_paths(files, asked)
        patch = _patch(verdicts, asked) if diff else None
        if fix:
            verdicts = _mended(verdicts, asked)
        report = build_report(verdicts, asked, started=started)
        fixes = replacements_for(verdicts, asked) if form == "sarif" and not redact and not diff else {}
    if patch is not None:
        write(patch, output)
    else:
        _deliver(_redacted(report) if redact else report, form, output, asked, fixes, quiet=quiet, verbose=verbose)
    raise SystemExit(report.exit_code)


def _patch(verdicts: Sequence[FileResult], asked: LintRequest) -> str:
    from doctor.lint.fix.fixer import patches_for

    found = patches_for(verdicts, asked)
    _print_notes(found, "would be")
    return "".join(found.patches)


def _mended(verdicts: Sequence[FileResult], asked: LintRequest) -> list[FileResult]:
    from doctor.lint.fix.fixer import apply_fixes

    current, found = apply_fixes(verdicts, asked)
    _print_notes(found, "were" if found.count != 1 else "was")
    return current


def _print_notes(found: FixOutcome, verb: str) -> None:
    """What was mended, and what was left, on stderr."""
    from doctor.report.formatting import some, spelt_out

    for left in found.left:
        click.echo(f"doctor: not mended: {spelt_out(left)}", err=True)
    things = "finding" if found.count == 1 else "findings"
    where = f" in {spelt_out(some(found.files))}" if found.files else ""
    click.echo(f"doctor: {found.count} {things} {verb} mended{where}", err=True)


def _redacted(report: Report) -> Report:
    """With stand-ins for users, hosts, addresses and folders, in the lines of code, too."""
    import msgspec

    from doctor.core.redact.placeholders import redact

    document: dict[str, Any] = msgspec.to_builtins(report)
    return msgspec.convert(redact(document, paths=True), prepared(type(report)))


def _deliver(
    report: Report,
    form: str,
    output: Path | None,
    asked: LintRequest,
    fixes: Fixes,
    *,
    quiet: bool,
    verbose: bool,
) -> None:
    if form == "text":
        from doctor.report.lint.terminal import draw_lint
        from doctor.report.terminal import make_console

        console = make_console(sys.stdout if output is None else io.StringIO())
        write(draw_lint(report, console, verbose=verbose, quiet=quiet), output)
    elif form == "sarif":
        from doctor.report.lint.sarif import render_sarif

        write(render_sarif(report, asked.book.rules, fixes), output)
    elif form == "html":
        from doctor.report.html.document import render_html

        write(render_html(report), output)
    else:
        from doctor.report import MACHINE_FORMATS

        text = MACHINE_FORMATS[form](report)
        write(text if text.endswith("\n") else text + "\n", output)
