"""Renders the list of checks and rules."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import IO, Any

import msgspec

from doctor.core.check import Check
from doctor.core.check_registry import CheckRegistry
from doctor.lint.engine.registry import Rulebook
from doctor.lint.engine.rule import Rule
from doctor.report.formatting import as_json, spelt_out
from doctor.report.playbook import STAGES, limits_of, title_of
from doctor.report.rich_names import Table, Text
from doctor.report.terminal import make_console

_LEGEND = ", ".join(f"{letter} {STAGES[letter]}" for letter in "PRM")


def render_listing(registry: CheckRegistry, book: Rulebook, form: str, stream: IO[str]) -> str:
    """Return all checks and rules as ``text`` (as wide as ``stream``) or ``json`` (schema 1).

    Rules for launch files have the ids of the checks that they foreshadow."""
    checks, rules = list(map(_described, registry.checks)), list(map(_described, book.rules))
    broken = tuple(dict.fromkeys((*registry.broken, *book.broken)))
    if form == "json":
        described = [{**row, "limits": limits_of(check)} for row, check in zip(checks, registry.checks, strict=True)]
        lost = {"not_loaded": list(map(msgspec.structs.asdict, broken))} if broken else {}
        return as_json({"schema": 1, "checks": described, "rules": rules, **lost}) + "\n"
    console = make_console(io.StringIO(), width=make_console(stream).width)
    with console.capture() as paper:
        if checks:
            console.print(f"when: {_LEGEND}\n", style="dim")
            console.print(_table(registry.checks, "when"))
        if limits := [f'"{name}" = {value!r}' for check in registry.checks for name, value in limits_of(check).items()]:
            console.print("\nLimits of checks, for doctor.toml", style="bold")
            console.print("\n".join(["[limits]", *limits]), markup=False)
        if rules:
            console.print("\nRules of doctor lint", style="bold")
            console.print(_table(book.rules, "reads"))
        for one in broken:
            console.print(spelt_out(f"crash: {one.name} ({one.origin}) failed to load: {one.reason}"))
    return "".join(f"{line.rstrip()}\n" for line in paper.get().splitlines())


def _reads(rule: Rule) -> str:
    return "comments" if rule.reads is object else rule.reads.__name__.lower()


def _described(one: Check | Rule) -> dict[str, Any]:
    own: dict[str, Any]
    if isinstance(one, Check):
        own = {"scope": one.scope.value, "when": one.when, "needs": [section.key for section in one.needs]}
    else:
        own = {"reads": _reads(one), "foreshadows": list(one.foreshadows)}
    head = {"id": one.id, "name": one.name, "family": one.family, "severity": one.severity.value}
    head["title"] = title_of(one)
    head["state"] = one.state
    return {**head, **own, "origin": one.origin}


def _table(checks: Iterable[Check | Rule], marks: str) -> Table:
    """Return a row per check. ``marks``: the heading of the letters of its stages, or of what a rule reads."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("id", "severity", marks, "title"):
        table.add_column(heading, overflow="fold", no_wrap=heading != "title")
    family = ""
    for check in checks:
        if check.family != family:
            family = check.family
            table.add_row(Text(spelt_out(family), style="bold"))
        title = f"{check.name}: {title_of(check)}".rstrip(": ")
        origin = "" if check.origin == "built-in" else f" ({check.origin})"
        origin += " (preview)" if check.state == "preview" else ""
        origin += " (infos: preview)" if isinstance(check, Rule) and check.preview_infos else ""
        mark = check.when if isinstance(check, Check) else _reads(check)
        table.add_row(*map(spelt_out, (check.id, check.severity.value, mark, title + origin)))
    return table
