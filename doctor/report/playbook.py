"""The pages of ``doctor explain``: read from files without loading any check, or made from a plugin check's docstring.

``python -m doctor.report.playbook`` rewrites the heads of all pages from the check and rule objects; a test verifies
that they match. It writes the index of the checks, too (:mod:`doctor.core.check_registry`).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from doctor.core.check import FAMILIES, Check, State
from doctor.core.check_registry import playbook_directory
from doctor.core.errors import UnusableError

if TYPE_CHECKING:
    from doctor.lint.engine.rule import Rule

_HEAD_END = "<!-- the lines above are made from the check by `python -m doctor.report.playbook` -->"
STAGES = {"P": "before a run", "R": "during training", "M": "post-mortem", "L": "by `doctor lint`"}
_HEAD = re.compile(
    r"# (?P<id>[A-Z]+\d{3}) (?P<name>[a-z0-9-]+)\n{1,9}(?P<title>[^\n]+)\n{1,9}.*?severity: (?P<severity>\w+)",
    re.DOTALL,
)
_ID = re.compile(r"[A-Z]+\d{3}")
_PREVIEW = "state: preview"
_INFOS = "its infos: preview"
_LIMIT = re.compile(r"`(?P<name>[A-Z]+\d{3}\.\w+) = (?P<value>[^`]+)`")


class PlaybookPage(msgspec.Struct, frozen=True):
    """One page; ``markdown``: all of it. ``limits``: defaults of the thresholds, by their names in settings.
    ``state``: ``stable`` or ``preview``."""

    id: str
    name: str
    family: str
    severity: str
    title: str
    markdown: str
    limits: dict[str, float] = {}
    state: State = "stable"


def find_page(word: str, more: Iterable[PlaybookPage] = ()) -> PlaybookPage:
    """Return the page of an id or a name, in the playbook or among ``more``; ``UnusableError`` names similar ones."""
    from doctor.core.settings import suggestion

    named = playbook_directory() / f"{word.upper()}.md"
    if _ID.fullmatch(word.upper()) and named.is_file():  # reading all pages takes long
        return _read(named)
    pages = [*all_pages(), *more]
    for page in pages:
        if word.upper() == page.id or word.lower() == page.name:
            return page
    near = suggestion(word, [name for page in pages for name in (page.id, page.name)])
    raise UnusableError(f"unknown check {word!r}{near or '.'} Run 'doctor list' to see all checks")


def all_pages() -> Iterator[PlaybookPage]:
    """Return every page, by id."""
    for path in sorted(playbook_directory().glob("*.md")):
        yield _read(path)


def _read(path: Path) -> PlaybookPage:
    text = path.read_text(encoding="utf-8")
    found = _HEAD.match(text)
    if found is None:
        raise UnusableError(f"{path} is not a playbook page: it has no head")
    family = FAMILIES.get(found["id"].rstrip("0123456789"), "")
    head = text.partition(_HEAD_END)[0]
    limits = {limit["name"]: float(limit["value"]) for limit in _LIMIT.finditer(head)}
    state: State = "preview" if _PREVIEW in head else "stable"
    whole = text.replace(_HEAD_END + "\n", "")
    return PlaybookPage(found["id"], found["name"], family, found["severity"], found["title"], whole, limits, state)


def page_of(check: Check | Rule) -> PlaybookPage:
    """Return the page of a plugin's check or rule, from its docstring."""
    title = title_of(check)
    parts = {"Impact": check.effect, "Fix": check.fix, "From": check.origin}
    text = _facts(check) + "".join(f"\n## {name}\n\n{words}\n" for name, words in parts.items() if words)
    return PlaybookPage(
        check.id, check.name, check.family, check.severity.value, title, text, limits_of(check), check.state
    )


def limits_of(check: Check | Rule) -> dict[str, float]:
    """Return the defaults of its thresholds, by their names in settings."""
    limits = check.limits if isinstance(check, Check) else {}
    return {f"{check.id}.{name}": value for name, value in limits.items()}


def head_of(check: Check | Rule) -> str:
    """Return the first lines of the page of a check or a rule."""
    return f"{_facts(check)}\n{_HEAD_END}\n"


def _facts(check: Check | Rule) -> str:
    stages = ", ".join(STAGES[stage] for stage in check.when)
    scope = check.scope.value if isinstance(check, Check) else "file"
    facts = [f"severity: {check.severity.value}", f"family: {check.family}", f"scope: {scope}"]
    facts += [_PREVIEW] if check.state == "preview" else []
    facts += [_INFOS] if not isinstance(check, Check) and check.preview_infos else []
    title = f"{title_of(check)}\n\n" if title_of(check) else ""
    lines = [f"# {check.id} {check.name}\n\n{title}{' · '.join(facts)} · detected: {stages}\n"]
    limits = [f"`{name} = {value!r}`" for name, value in limits_of(check).items()]
    return "\n".join([*lines, *([f"limits: {', '.join(limits)}\n"] if limits else [])])


def title_of(check: Check | Rule) -> str:
    """Return what a check or a rule finds out, as the first sentence of its page."""
    question = check.question.removeprefix("Ask ").rstrip(".")
    return f"{question[:1].upper()}{question[1:]}." if question else ""


def with_head(check: Check | Rule, text: str) -> str:
    """Return the text of a page with a new head."""
    _, found, body = text.partition(_HEAD_END + "\n")
    return head_of(check) + "\n" + (body if found else text).lstrip("\n")


def owners_of_pages() -> Iterator[Check | Rule]:
    """Return the built-in checks, and the rules that do not share the id of a check."""
    from doctor.core.check_registry import RULE_FAMILY, builtin_checks
    from doctor.lint.engine.registry import load_rules

    yield from builtin_checks()
    yield from (rule for rule in load_rules(plugins=False).rules if rule.family == RULE_FAMILY)


def write_heads() -> None:
    """Rewrite the heads of all pages of the built-in checks and rules, and name the pages that do not exist."""
    for check in owners_of_pages():
        path = playbook_directory() / f"{check.id}.md"
        if path.is_file():
            path.write_text(with_head(check, path.read_text(encoding="utf-8")), encoding="utf-8")
        else:
            sys.stderr.write(f"missing: playbooks/{path.name}\n")


def write_index() -> None:
    """Rewrite the index of the built-in checks."""
    from doctor.core.check_registry import builtin_checks, index_path, index_text

    index_path().write_bytes(index_text(builtin_checks()))


if __name__ == "__main__":
    write_heads()
    write_index()
