"""Renders what changed between two captures, runs or reports."""

from __future__ import annotations

from collections.abc import Sequence

from doctor.core.diff.captures import Difference
from doctor.core.text import ranges
from doctor.report.formatting import as_json, markdown_table, spelt_out


def render_difference(differences: Sequence[Difference], before: str, after: str, form: str) -> str:
    """Return the differences as ``text``, ``json`` (schema 1) or ``markdown``."""
    if form == "json":
        document = {"schema": 1, "kind": "diff", "before": before, "after": after, "differences": list(differences)}
        return as_json(document) + "\n"
    if not differences:
        return spelt_out(f"no difference between {before} and {after}") + "\n"
    if form == "markdown":
        head = ("likelihood", "fact", before, after, "ranks")
        rows = (
            (one.weight, f"{one.section} {one.path}", _shown(one.before), _shown(one.after), ranges(one.ranks))
            for one in differences
        )
        lines = list(markdown_table(head, rows))
    else:
        lines = _text(differences, before, after)
    return "\n".join(map(spelt_out, lines)) + "\n"


def _text(differences: Sequence[Difference], before: str, after: str) -> list[str]:
    count = "1 difference" if len(differences) == 1 else f"{len(differences)} differences"
    lines = [f"{count}, from {before} to {after}"]
    weight = ""
    for one in differences:
        if one.weight != weight:
            weight = one.weight
            lines += ["", f"{weight} likelihood"]
        word = "rank" if len(one.ranks) == 1 else "ranks"
        lines.append(f"  {one.section} {one.path}  ({word} {ranges(one.ranks)})")
        lines += [f"    - {_shown(one.before)}", f"    + {_shown(one.after)}"]
    return lines


def _shown(value: object) -> str:
    if value is None:
        return "(not there)"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
