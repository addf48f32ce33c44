"""Parts of an HTML page: its own files, its content security policy, and pages of the playbook."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from doctor.core.errors import UnusableError
from doctor.report.formatting import INLINE_CODE, spelt_out

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markupsafe import Markup

PAGE = Path(__file__).parent / "page"
"""The folder of templates, styles and scripts."""


@cache
def asset(name: str) -> Markup:
    """Return a file of :data:`PAGE`."""
    return as_markup((PAGE / name).read_text(encoding="utf-8"))


def as_markup(text: str) -> Markup:
    """Mark text of this package as safe markup."""
    from markupsafe import Markup

    return Markup(text)  # noqa: S704 - the package's own files and templates, pages of the playbook


def policy(scripts: Iterable[str]) -> str:
    """Return the policy of a page that may only run these scripts and use inline styles, without network access."""
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    sources = f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:"
    return f"{sources}; base-uri 'none'; form-action 'none'"


def prose(text: str) -> Markup:
    """Return a sentence with inline code as ``<code>``."""
    from markupsafe import Markup, escape

    parts = (escape(spelt_out(part)) for part in INLINE_CODE.split(text))
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if position % 2 else part for position, part in enumerate(parts)
    )


@cache
def playbook(check_id: str) -> Markup | None:
    """Return the page of a check without its head, or ``None`` for a plugin's check."""
    from doctor.report.playbook import find_page

    try:
        page = find_page(check_id)
    except UnusableError:
        return None
    _, found, body = page.markdown.partition("\n## ")
    return as_markup(_reader().render(found.lstrip("\n") + body))


@cache
def _reader() -> MarkdownIt:
    from markdown_it import MarkdownIt

    reader = MarkdownIt("commonmark", {"html": False}).enable("table")
    reader.core.ruler.push("fit_in", _fit_in)
    return reader


def _fit_in(state: Any) -> None:
    """Lower headings below those of the report, and set the scope of table heads."""
    for token in state.tokens:
        if token.type == "th_open":
            token.attrSet("scope", "col")
        if token.type in ("heading_open", "heading_close"):
            token.tag = f"h{min(6, int(token.tag[1]) + 2)}"
