"""What a page is put together from: its own files, the policy that lets nothing else run, data that end no script, and
pages of the playbook as HTML."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from doctor.core.errors import UnusableError
from doctor.report.formatting import spelt_out

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markupsafe import Markup

PAGE = Path(__file__).parent / "page"
"""Templates, style and scripts; the library of charts beside them."""


@cache
def asset(name: str) -> Markup:
    """A file of the page itself."""
    return as_markup((PAGE / name).read_text(encoding="utf-8"))


def as_markup(text: str) -> Markup:
    """``text`` as markup: only for what this package made itself."""
    from markupsafe import Markup

    return Markup(text)  # noqa: S704 - the package's own files, JSON without brackets, pages of the playbook


def policy(scripts: Iterable[str]) -> str:
    """What the page may do: run these scripts, be styled, and nothing else; it can't reach any network."""
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


_IN_SCRIPT = str.maketrans({sign: f"\\u{ord(sign):04x}" for sign in "<>&\u2028\u2029"})


def as_json(data: Mapping[str, Any]) -> Markup:
    """JSON that no HTML parser takes for anything else."""
    return as_markup(json.dumps(data, ensure_ascii=False, separators=(",", ":")).translate(_IN_SCRIPT))


_CODE = re.compile(r"`([^`]+)`")


def prose(text: str) -> Markup:
    """A sentence with its commands as code."""
    from markupsafe import Markup, escape

    parts = (escape(spelt_out(part)) for part in _CODE.split(text))
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if position % 2 else part for position, part in enumerate(parts)
    )


@cache
def playbook(check_id: str) -> Markup | None:
    """The page of a check without its head, or ``None`` for a guest's check."""
    from doctor.report.playbook import find_page

    try:
        page = find_page(check_id)
    except UnusableError:
        return None
    _, found, body = page.markdown.partition("\n## ")
    return as_markup(_reader().render(found.lstrip("\n") + body))


@cache
def _reader() -> MarkdownIt:
    """Markdown to HTML, raw HTML disabled."""
    from markdown_it import MarkdownIt

    reader = MarkdownIt("commonmark", {"html": False}).enable("table")
    reader.core.ruler.push("fit_in", _fit_in)
    return reader


def _fit_in(state: Any) -> None:
    """Headings below those of the report, and heads of tables that say what they head."""
    for token in state.tokens:
        if token.type == "th_open":
            token.attrSet("scope", "col")
        if token.type in ("heading_open", "heading_close"):
            token.tag = f"h{min(6, int(token.tag[1]) + 2)}"
