"""Renders the list of checks and rules."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import IO, Any

from doctor.core.check import Check
from doctor.core.check_registry import CheckRegistry
from doctor.lint.engine.registry import Rulebook
from doctor.lint.engine.rule import Rule
from doctor.report.formatting import as_json, spelt_out
from doctor.report.playbook import limits_of
from doctor.report.rich_names import Table
from doctor.report.terminal import make_console

_OF_CHECKS = ("id", "name", "family", "severity", "scope", "when", "needs", "origin")
_OF_RULES = ("id", "name", "family", "severity", "reads", "foreshadows", "origin")


def render_listing(catalog: CheckRegistry, book: Rulebook, form: str, stream: IO[str]) -> str:
    """Return all checks and rules as ``text`` (as wide as ``stream``) or ``json`` (schema 1).

    Rules for launch files have the ids of the checks that they foreshadow."""
    checks = [_describe_check(check) for check in catalog.checks]
    told = [{**row, "limits": limits_of(check)} for row, check in zip(checks, catalog.checks, strict=True)]
    rules = [_describe_rule(rule) for rule in book.rules]
    if form == "json":
        document = {"schema": 1, "checks": told, "rules": rules}
        return as_json(document) + "\n"
    console = make_console(io.StringIO(), width=make_console(stream).width)
    with console.capture() as paper:
        if checks:
            console.print(_table(_OF_CHECKS, checks))
        if limits := [f'"{name}" = {value!r}' for check in catalog.checks for name, value in limits_of(check).items()]:
            console.print("\nLimits of checks, for doctor.toml", style="bold")
            console.print("\n".join(["[limits]", *limits]), markup=False)
        if rules:
            console.print("\nRules of doctor lint", style="bold")
            console.print(_table(_OF_RULES, rules))
        for broken in dict.fromkeys((*catalog.broken, *book.broken)):
            console.print(spelt_out(f"crash: {broken.name} ({broken.origin}) failed to load: {broken.reason}"))
    return paper.get()


def _describe_check(check: Check) -> dict[str, Any]:
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


def _describe_rule(rule: Rule) -> dict[str, Any]:
    return {
        "id": rule.id,
        "name": rule.name,
        "family": rule.family,
        "severity": rule.severity.value,
        "reads": "comments" if rule.reads is object else rule.reads.__name__.lower(),
        "foreshadows": list(rule.foreshadows),
        "origin": rule.origin,
    }


def _table(headings: Iterable[str], rows: Iterable[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(heading, overflow="fold", no_wrap=heading in ("id", "severity"))
    for row in rows:
        cells = (", ".join(value) if isinstance(value, list) else value for value in row.values())
        table.add_row(*map(spelt_out, cells))
    return table
