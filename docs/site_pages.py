"""Pages of the site that are generated from the package: checks and rules, limits, metrics, help of commands, schemas.

A hook of MkDocs. It also adapts links that are relative to the repository in files that pages include.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import click
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from doctor.cli.main import app
from doctor.core.check import FAMILIES
from doctor.core.check_registry import RULE_FAMILY
from doctor.monitor.sinks.prometheus import GAUGES
from doctor.monitor.sinks.report_metrics import REPORT_GAUGES
from doctor.report.playbook import PlaybookPage, all_pages
from doctor.version import PACKAGE

ROOT = Path(__file__).resolve().parents[1]
FAMILY_TITLES = {
    "launch": "Launch environment",
    "network": "Names, interfaces and network",
    "nccl": "NCCL settings",
    "devices": "GPUs",
    "memory": "Memory",
    "data": "Data loading",
    "progress": "Progress, hangs and failures",
    "host": "Host limits and storage",
    "software": "Software releases",
    RULE_FAMILY: "Code (doctor lint)",
}
WIDTH = 80
"""Columns of the help of commands."""
_INCLUDE = re.compile(r'^--8<-- "(?P<path>[^":]+)(?::(?P<section>[\w-]+))?"$', re.MULTILINE)
_LINK = re.compile(r"(?<!!)\[(?P<text>[^\]\n]*)\]\((?P<path>(?!https?:|#|mailto:)[^)\s#]+)(?P<anchor>#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    for page in all_pages():
        files.append(File.generated(config, f"reference/checks/{page.id}.md", content=_check_page(page)))
    files.append(File.generated(config, "reference/checks/index.md", content=_check_index()))
    files.append(File.generated(config, "reference/limits.md", content=_limits()))
    files.append(File.generated(config, "reference/metrics.md", content=_metrics()))
    files.append(File.generated(config, "reference/cli.md", content=_commands()))
    for path in sorted(Path(PACKAGE, "schemas").glob("*.json")):
        files.append(File.generated(config, f"reference/schemas/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Insert sections of other files, and adapt links that lead out of the site."""
    here = ROOT / "docs" / page.file.src_uri
    text = _linked(markdown, here.parent, here.parent)
    return _INCLUDE.sub(lambda found: _included(found["path"], found["section"], here.parent), text)


def _included(path: str, section: str | None, folder: Path) -> str:
    text = (ROOT / path).read_text(encoding="utf-8")
    if section:
        _, begun, rest = text.partition(f"<!-- --8<-- [start:{section}] -->\n")
        text, ended, _ = rest.partition(f"<!-- --8<-- [end:{section}] -->")
        if not begun or not ended:
            raise ValueError(f"{path} has no section {section}")
    else:
        text = re.sub(r"\A# .*\n", "", text)
    return _linked(text, (ROOT / path).parent, folder)


def _linked(text: str, source: Path, folder: Path) -> str:
    """Rewrite links of a text in ``source`` for a page in ``folder``. What is not part of the site is named instead."""

    def target(found: re.Match[str]) -> str:
        path = (source / found["path"]).resolve()
        if not path.exists():
            return found[0]  # a generated page, or a broken link that the strict build reports
        if path.is_relative_to(ROOT / "docs") and path.suffix == ".md":
            relative = os.path.relpath(path, folder).replace(os.sep, "/")
            return f"[{found['text']}]({relative}{found['anchor'] or ''})"
        name = path.relative_to(ROOT).as_posix()
        return f"`{name}`" if found["text"].strip("`") in (name, path.name) else f"{found['text']} (`{name}`)"

    return _LINK.sub(target, text)


def _check_page(page: PlaybookPage) -> str:
    return page.markdown + "\n[All checks and rules](index.md)\n"


def _check_index() -> str:
    by_family: defaultdict[str, list[PlaybookPage]] = defaultdict(list)
    for page in all_pages():
        by_family[page.family or RULE_FAMILY].append(page)
    families = [name for name in (*FAMILIES.values(), RULE_FAMILY) if name in by_family]
    return "\n".join(
        [
            "# Checks and rules\n",
            "One id stands for one fault, before, during and after a run. `doctor explain ID` prints the same pages "
            "offline. A check marked *preview* may still change ([versioning](../versioning.md)).\n",
            '<div class="check-filter" hidden><label>Filter <input type="search" placeholder="port, MEM, error …">'
            "</label></div>\n",
            *(line for family in dict.fromkeys(families) for line in _family_table(family, by_family[family])),
        ]
    )


def _family_table(family: str, pages: Iterable[PlaybookPage]) -> Iterator[str]:
    yield f"## {FAMILY_TITLES.get(family, family)}\n"
    yield "| Id | Name | Asks | Severity |"
    yield "| --- | --- | --- | --- |"
    for page in pages:
        title = page.title.replace("|", "\\|")
        name = f"{page.name} (preview)" if page.state == "preview" else page.name
        yield f"| [{page.id}]({page.id}.md) | {name} | {title} | {page.severity} |"
    yield ""


def _limits() -> str:
    rows = [
        f"| `{name}` | {value:g} | [{page.id}](checks/{page.id}.md) {page.name} |"
        for page in all_pages()
        for name, value in page.limits.items()
    ]
    return "\n".join(
        [
            "# Limits\n",
            "Thresholds of checks. Change one in the table `[limits]` of the [settings](settings.md).\n",
            "| Limit | Default | Check |",
            "| --- | --- | --- |",
            *rows,
        ]
    )


def _metrics() -> str:
    rows = [f"| `{gauge.name}` | {gauge.meaning} |" for gauge in GAUGES]
    return "\n".join(
        [
            "# Metrics\n",
            "Gauges that the callback serves with `prometheus_port=`, with the labels `rank` and `host`. See "
            "[Prometheus and Grafana](../how-to/prometheus-and-grafana.md).\n",
            "| Metric | Meaning |",
            "| --- | --- |",
            *rows,
            "\n## Of the whole job\n",
            "The rank that evaluates the run serves these, with the labels of the last column. Lost time and scaling "
            "efficiency: see [What waiting cost](../how-to/what-waiting-cost.md).\n",
            "| Metric | Meaning | Labels |",
            "| --- | --- | --- |",
            *(f"| `{one.name}` | {one.meaning} | {', '.join(one.labels)} |" for one in REPORT_GAUGES),
        ]
    )


def _commands() -> str:
    # As on the command line, but for the width: the subcommands inherit the names of the option --help.
    settings = {**app.context_settings, "terminal_width": WIDTH, "max_content_width": WIDTH}
    parent = click.Context(app, info_name="doctor", **settings)
    found = [(name, command) for name in app.list_commands(parent) if (command := app.get_command(parent, name))]
    parts = [_help("doctor", app.get_help(parent))]
    for name, command in found:
        context = click.Context(command, info_name=name, parent=parent, terminal_width=WIDTH, max_content_width=WIDTH)
        parts.append(_help(f"doctor {name}", command.get_help(context)))
    head = ["# Command line\n", "`doctor` and `rankdoctor` are the same command.\n", _COMPLETION]
    return "\n".join([*head, *parts])


_COMPLETION = """\
Bash, zsh and fish complete commands, options, ids, families, profiles and files after one of these lines in the start
file of the shell:

```bash
eval "$(_DOCTOR_COMPLETE=bash_source doctor)"
eval "$(_DOCTOR_COMPLETE=zsh_source doctor)"
_DOCTOR_COMPLETE=fish_source doctor | source
```
"""


def _help(name: str, text: str) -> str:
    return f"## {name}\n\n```text\n{text}\n```\n"
