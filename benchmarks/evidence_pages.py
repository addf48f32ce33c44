"""Puts measured tables and samples between their marks in README.md and in the pages of docs/."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def add_part(parser: ArgumentParser, what: str) -> None:
    """Add the option that tests give: ``what`` is measured in a few seconds, and no file is written."""
    parser.add_argument("--part", action="store_true", help=f"measure only {what}; keep and write nothing")


def pages() -> Iterator[Path]:
    """README.md and the pages of docs/."""
    yield ROOT / "README.md"
    yield from sorted((ROOT / "docs").rglob("*.md"))


def write_between(name: str, text: str) -> None:
    """Replace what stands between ``<!-- name: begin -->`` and ``<!-- name: end -->`` in the page that has these marks.

    Raises:
        ValueError: no page, or more than one, has them.
    """
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    found = [page for page in pages() if begin in page.read_text(encoding="utf-8")]
    if len(found) != 1:
        raise ValueError(f"{len(found)} pages have marks called {name}")
    (page,) = found
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    _, closed, after = rest.partition(end)
    if not closed:
        raise ValueError(f"the mark {end} is missing in {page.relative_to(ROOT)}")
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


def word_of(mark: bool | None) -> str:
    """A mark in a table; ``None`` where there is nothing to say."""
    return {True: "yes", False: "**no**", None: ""}[mark]


def folded(title: str, text: str) -> str:
    """Markdown that is shown when its title is clicked."""
    return f"<details markdown><summary>{title}</summary>\n\n{text}\n\n</details>"
