"""The pages of ``doctor explain``: read from the wheel, or from the checkout, without loading any check or rule.

``python -m doctor.playbook`` writes the heads of all pages anew from the check and rule objects; a test sees to it
that they are in step.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from doctor.checking import FAMILIES, Check
from doctor.errors import UnusableError

if TYPE_CHECKING:
    from doctor.lint.rule import Rule

_HEAD_END = "<!-- the lines above are made from the check by `python -m doctor.playbook` -->"
_DOORS = {"P": "before the run", "R": "while it runs", "M": "after it", "L": "in the file, by `doctor lint`"}
_HEAD = re.compile(
    r"# (?P<id>[A-Z]+\d{3}) (?P<name>[a-z0-9-]+)\n+(?P<title>[^\n]+)\n+.*?severity: (?P<severity>\w+)", re.DOTALL
)


class Page(msgspec.Struct, frozen=True):
    """One page; ``markdown`` is the whole of it."""

    id: str
    name: str
    family: str
    severity: str
    title: str
    markdown: str


def playbook_directory() -> Path:
    """Where the pages are: data of the installed package, else the checkout's own folder."""
    installed = Path(__file__).parent / "_playbooks"
    return installed if installed.is_dir() else Path(__file__).resolve().parent.parent / "playbooks"


def find_page(word: str) -> Page:
    """The page of an id or a name.

    Raises:
        UnusableError: there is none; with near names.
    """
    pages = list(all_pages())
    for page in pages:
        if word.upper() == page.id or word.lower() == page.name:
            return page
    known = [name for page in pages for name in (page.id, page.name)]
    near = difflib.get_close_matches(word.upper(), known, n=3, cutoff=0.5)
    near = near or difflib.get_close_matches(word.lower(), known, n=3, cutoff=0.4)
    raise UnusableError(f"no page is called {word}" + (f"; near: {', '.join(near)}" if near else ""))


def all_pages() -> Iterator[Page]:
    """Every page, by id."""
    for path in sorted(playbook_directory().glob("*.md")):
        yield _read(path)


def _read(path: Path) -> Page:
    text = path.read_text(encoding="utf-8")
    found = _HEAD.match(text)
    if found is None:
        raise UnusableError(f"the page {path} has no head")
    family = FAMILIES.get(found["id"].rstrip("0123456789"), "")
    return Page(
        found["id"], found["name"], family, found["severity"], found["title"], text.replace(_HEAD_END + "\n", "")
    )


def head_of(check: Check | Rule) -> str:
    """The first lines of the page of a check or a rule."""
    question = check.question.removeprefix("Ask ").rstrip(".")
    doors = ", ".join(_DOORS[door] for door in check.when)
    scope = check.scope.value if isinstance(check, Check) else "file"
    facts = [f"severity: {check.severity.value}", f"family: {check.family}", f"speaks of: {scope}"]
    lines = [f"# {check.id} {check.name}", "", f"{question[:1].upper()}{question[1:]}.", ""]
    lines += [f"{' · '.join(facts)} · can be seen: {doors}", "", _HEAD_END, ""]
    return "\n".join(lines)


def with_head(check: Check | Rule, text: str) -> str:
    """``text`` of a page with its head made anew."""
    _, found, body = text.partition(_HEAD_END + "\n")
    return head_of(check) + "\n" + (body if found else text).lstrip("\n")


def owners_of_pages() -> Iterator[Check | Rule]:
    """The built-in checks, and the rules that bear no id of a check."""
    from doctor.catalog import builtin_checks
    from doctor.lint.ignoring import IGNORE_IN_VAIN
    from doctor.lint.rules import OWN_FAMILY, builtin_rules

    yield from builtin_checks()
    yield IGNORE_IN_VAIN
    yield from (rule for rule in builtin_rules() if rule.family == OWN_FAMILY)


def write_heads() -> None:
    """Write the heads of all pages of the built-in checks and rules anew."""
    for check in owners_of_pages():
        path = playbook_directory() / f"{check.id}.md"
        if path.is_file():
            path.write_text(with_head(check, path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    write_heads()
