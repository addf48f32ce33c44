"""``doctor lint``: checks training scripts and launch files, and fixes them on request."""

from __future__ import annotations

import sys
import time
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from doctor.cli.options import (
    PATH,
    CommonOptions,
    detail_options,
    fail_on_option,
    format_option,
    ignore_option,
    output_option,
    plugin_option,
    print_notes,
    redact_option,
    select_option,
    settings_options,
    strict_option,
    with_common_options,
)
from doctor.cli.output import rendered, write, write_drawn
from doctor.core.decoding import prepared
from doctor.core.text import words

if TYPE_CHECKING:
    from doctor.core.report_document import Report
    from doctor.lint.engine.runner import LintRequest
    from doctor.lint.fix.fixer import FixOutcome
    from doctor.report.lint.sarif import Fixes


@click.command("lint", short_help="Find bugs in training scripts and launch files.")
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
@click.option("--fix", is_flag=True, help="Apply safe fixes, then re-check (needs LibCST).")
@click.option("--diff", is_flag=True, help="Print what --fix would change, without changing it.")
@click.option(
    "--lightning",
    metavar="RELEASE",
    help="Lightning release the scripts will run with (default: the project's requirement, else the installed one).",
)
@click.option(
    "--cores",
    type=click.IntRange(1, 100_000),
    metavar="N",
    help="CPU cores of the machine on which the scripts will run.",
)
@click.option("--preview", is_flag=True, help="Report findings that are in preview, too.")
@click.option("--tests", is_flag=True, help="Report findings in test files, too.")
@click.option("--explain-flow", is_flag=True, help="Show the branches and calls that lead to findings on collectives.")
@detail_options
@with_common_options
def command(
    options: CommonOptions,
    paths: tuple[Path, ...],
    fix: bool,
    diff: bool,
    lightning: str | None,
    cores: int | None,
    preview: bool,
    tests: bool,
    explain_flow: bool,
) -> None:
    """Find code that hangs, diverges or wastes memory on several ranks.

    PATHS are files and folders: Python, notebooks, shell scripts for SLURM and torchrun, YAML and JSON of Kubernetes,
    Accelerate and DeepSpeed; `-` is standard input. They are parsed; nothing in them is imported or run. To accept a
    finding, write `# doctor: ignore[ID] reason` on its line or on the line above.

    Example: doctor lint train.py slurm/
    """
    from doctor.core.files.spooled_streams import spooled_paths
    from doctor.lint.engine.discovery import ending_of
    from doctor.lint.engine.request import lint_request
    from doctor.lint.engine.runner import build_report, lint_paths
    from doctor.lint.fix.fixer import apply_fixes, patches_for, replacements_for

    if (fix and diff) or (diff and options.redact):
        raise click.UsageError(f"--diff and {'--fix' if fix else '--redact'} exclude each other.")
    started = time.time()
    settings = options.settings(preview=preview, tests=tests)
    print_notes(settings)
    with redirect_stdout(sys.stderr), spooled_paths(paths, ending_of) as files:  # plugins may print
        request = lint_request(
            settings, typed=words(options.select), lightning=lightning, processors=cores, strict=options.strict
        )
        results = lint_paths(files, request)
        if diff:
            patches = patches_for(results, request)
            _print_outcome(patches, "would be")
        elif fix:
            results, outcome = apply_fixes(results, request)
            _print_outcome(outcome, "were" if outcome.count != 1 else "was")
        report = build_report(results, request, started=started)
        with_fixes = options.form == "sarif" and not options.redact and not diff
        fixes = replacements_for(results, request) if with_fixes else {}
    if diff:
        write("".join(patches.patches), options.output)
    else:
        _write_report(_redacted(report) if options.redact else report, options, request, fixes, flow=explain_flow)
    raise SystemExit(report.exit_code)


def _print_outcome(outcome: FixOutcome, verb: str) -> None:
    from doctor.report.formatting import some, spelt_out

    for left in outcome.left:
        click.echo(f"doctor: not fixed: {spelt_out(left)}", err=True)
    things = "finding" if outcome.count == 1 else "findings"
    where = f" in {spelt_out(some(outcome.files))}" if outcome.files else ""
    click.echo(f"doctor: {outcome.count} {things} {verb} fixed{where}", err=True)


def _redacted(report: Report) -> Report:
    """Replace users, hosts, addresses and folders with placeholders, in quoted lines of code, too."""
    import msgspec

    from doctor.core.redact.placeholders import redact

    document: dict[str, Any] = msgspec.to_builtins(report)
    return msgspec.convert(redact(document, paths=True), prepared(type(report)))


def _write_report(report: Report, options: CommonOptions, request: LintRequest, fixes: Fixes, *, flow: bool) -> None:
    if options.form == "text":
        from doctor.report.lint.terminal import draw_lint

        write_drawn(partial(draw_lint, flow=flow), report, options)
    elif options.form == "sarif":
        from doctor.report.lint.sarif import render_sarif

        write(render_sarif(report, request.book.rules, fixes), options.output)
    else:
        write(rendered(report, options.form), options.output)
