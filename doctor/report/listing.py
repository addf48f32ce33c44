"""The list of checks, for people and for programs."""

from __future__ import annotations

import io
from typing import IO, Any

import msgspec
from rich.table import Table

from doctor.catalog import Catalog
from doctor.checking import Check
from doctor.report.terminal import make_console
from doctor.report.words import spelt_out


def render_listing(catalog: Catalog, form: str, stream: IO[str]) -> str:
    """All checks as ``text`` (as wide as ``stream``) or ``json`` (schema 1)."""
    if form == "json":
        document = {"schema": 1, "checks": [_describe(check) for check in catalog.checks]}
        return msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n"
    paper = io.StringIO()
    console = make_console(paper, width=make_console(stream).width)
    console.print(_table(catalog))
    for broken in catalog.broken:
        console.print(spelt_out(f"crash: {broken.name} ({broken.origin}) failed to load: {broken.reason}"))
    return paper.getvalue()


def _describe(check: Check) -> dict[str, Any]:
    return {
        "id": check.id,
        "name": check.name,
        "family": check.family,
        "severity": check.severity.value,
        "scope": check.scope.value,
        "when": check.when,
        "needs": [section.key for section in check.needs],
        "origin": check.origin,
    }


def _table(catalog: Catalog) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("id", "name", "family", "severity", "scope", "when", "needs", "origin"):
        table.add_column(heading, overflow="fold", no_wrap=heading in ("id", "severity"))
    for check in catalog.checks:
        row = _describe(check)
        cells = (", ".join(value) if isinstance(value, list) else value for value in row.values())
        table.add_row(*map(spelt_out, cells))
    return table
