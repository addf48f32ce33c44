"""Puts measured tables between their marks in README.md and in the pages of docs/."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def write_between(name: str, text: str, page: str = "README.md") -> None:
    """Replace what stands between ``<!-- name: begin -->`` and ``<!-- name: end -->`` in a page.

    Raises:
        ValueError: the marks are not there.
    """
    path = ROOT / page
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, found, rest = path.read_text(encoding="utf-8").partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"{page} has no marks called {name}")
    path.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


def word_of(mark: bool | None) -> str:
    """A mark in a table; ``None`` where there is nothing to say."""
    return {True: "yes", False: "**no**", None: ""}[mark]


def folded(title: str, text: str) -> str:
    """Markdown that is shown when its title is clicked."""
    return f"<details><summary>{title}</summary>\n\n{text}\n\n</details>"
