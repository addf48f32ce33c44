"""``doctor explain``: the playbook page of a check, or the checks that a family or an error message is about."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from typing import TYPE_CHECKING

import click

from doctor.cli.completion import complete_check
from doctor.cli.options import (
    CommonOptions,
    format_option,
    output_option,
    plugin_option,
    print_notes,
    settings_options,
    with_common_options,
)
from doctor.cli.output import write
from doctor.core.errors import UnusableError

if TYPE_CHECKING:
    from doctor.core.check import Check
    from doctor.lint.engine.rule import Rule
    from doctor.report.playbook import PlaybookPage

_NO_PAGE = "no check is about {!r}. 'doctor diagnose FILE' reads whole logs, 'doctor list' shows all checks"


@click.command("explain", short_help="Explain a check, or find checks by family or error message.")
@click.argument("words", nargs=-1, required=True, metavar="ID|NAME|FAMILY|TEXT...", shell_complete=complete_check)
@format_option("text", "json")
@output_option
@settings_options
@plugin_option
@with_common_options
def command(options: CommonOptions, words: tuple[str, ...]) -> None:
    """Explain a check: what you see, how to fix it, and why it happens.

    ID and NAME are those of a check or lint rule (NET007, interface-unmatched). A FAMILY (NET or network) lists its
    checks. Other TEXT, such as an error message, lists the checks whose title or symptoms match it best.

    Examples: doctor explain NET007, doctor explain "Duplicate GPU detected"
    """
    from doctor.report.formatting import as_json
    from doctor.report.playbook_search import listed, search

    try:
        pages = [_page(word, options) for word in words]
    except UnusableError as unknown:
        text = " ".join(words)
        found = search(text, _reported_by(text, options))
        if not found:
            raise unknown if len(text.split()) == 1 else UnusableError(_NO_PAGE.format(text)) from None
        rows = [{"id": page.id, "name": page.name, "title": page.title} for page in found]
        write(as_json(rows) + "\n" if options.form == "json" else listed(found, sys.stdout), options.output)
        return
    if options.form == "json":
        write(as_json(pages[0] if len(pages) == 1 else pages) + "\n", options.output)
    elif options.output is not None or not sys.stdout.isatty():
        write("\n".join(page.markdown for page in pages), options.output)
    else:
        from doctor.report.rich_names import from_markdown
        from doctor.report.terminal import make_console

        console = make_console(sys.stdout)
        with console.capture() as paper:
            for page in pages:
                console.print(from_markdown(page.markdown))
        write(paper.get(), None)


def _reported_by(text: str, options: CommonOptions) -> list[str]:
    """Return the ids of the checks with findings in a log that consists of ``text``."""
    import tempfile
    from pathlib import Path

    from doctor.core.check_registry import load_registry
    from doctor.postmortem.run_reader import read_runs
    from doctor.report.formatting import UNEXPLAINED
    from doctor.session import judge

    with tempfile.TemporaryDirectory(prefix="rankdoctor-") as folder:
        log = Path(folder, "job.log")
        log.write_text(text + "\n", encoding="utf-8", errors="replace")
        jobs = [run.job for run in read_runs([log])]
    registry = load_registry(plugins=False)
    reports = (judge(job, registry, options.settings(), must_be_complete=False) for job in jobs)
    results = [result for report in reports for result in report.results]
    return [result.id for result in results if result.findings and result.id != UNEXPLAINED]


def _page(word: str, options: CommonOptions) -> PlaybookPage:
    """Return the page of the playbook, or else that of a plugin's check or rule; plugins are loaded only then."""
    from doctor.report.playbook import find_page, page_of
    from doctor.report.playbook_search import is_family

    try:
        return find_page(word)
    except UnusableError:
        if is_family(word):
            raise
    from doctor.core.check_registry import load_registry
    from doctor.lint.engine.registry import load_rules

    settings = options.settings()
    print_notes(settings)
    with redirect_stdout(sys.stderr):  # plugins may print
        found: list[Check | Rule] = [*load_registry(settings.plugins).checks, *load_rules(settings.plugins).rules]
    return find_page(word, [page_of(one) for one in found if one.origin != "built-in"])
