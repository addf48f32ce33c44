"""Finds pages of the playbook by family, or by the text of an error message."""

from __future__ import annotations

import io
import math
import re
from collections import Counter
from collections.abc import Collection
from itertools import pairwise
from typing import IO

from doctor.core.check import FAMILIES
from doctor.report.formatting import spelt_out
from doctor.report.playbook import PlaybookPage, all_pages
from doctor.report.rich_names import Table
from doctor.report.terminal import make_console

MOST_PAGES = 6
"""Pages that a search returns."""
LEAST_SHARE = 0.6
"""Share of a text's words, weighted by rarity, that a page must contain."""
_WORD = re.compile(r"[a-z_][a-z0-9_]{2,}")
_SYMPTOMS = re.compile(r"## What you see\n(.*?)(?=\n## |\Z)", re.DOTALL)
_TITLE_WEIGHT = 1.5
"""Weight of a word in a page's title; in its symptoms it is 1."""


def is_family(word: str) -> bool:
    """Whether ``word`` is a family (``network``) or the prefix of its ids (``NET``)."""
    return word.upper() in FAMILIES or word.lower() in FAMILIES.values()


def search(text: str, first: Collection[str] = ()) -> list[PlaybookPage]:
    """Return the pages of a family by id, or else those whose title or symptoms match ``text``, the best first.

    ``first``: ids of pages that precede all others."""
    pages = list(all_pages())
    if is_family(text):
        return [page for page in pages if text.lower() in (page.family, page.id.rstrip("0123456789").lower())]
    wanted = set(_WORD.findall(text.lower()))
    titles = [_words(f"{page.name} {page.title}") for page in pages]
    symptoms = [_words("".join(_SYMPTOMS.findall(page.markdown))) for page in pages]
    counts = Counter(word for one, other in zip(titles, symptoms, strict=True) for word in one | other)
    # A word of no page still counts as a word that a page lacks.
    weights = {word: math.log(1 + len(pages) / (1 + counts[word])) for word in wanted}
    least = LEAST_SHARE * sum(weights.values())
    phrases = _phrases(text)
    scored = []
    for page, title, symptom in zip(pages, titles, symptoms, strict=True):
        found = wanted & (title | symptom)
        if not wanted or sum(weights[word] for word in found) < least:
            continue
        score = sum(weights[word] * (_TITLE_WEIGHT if word in title else 1.0) for word in found)
        score += sum(weights[one] + weights[other] for one, other in phrases & _phrases(page.markdown))
        scored.append((score, page))
    best = [page for _, page in sorted(scored, key=lambda one: (-one[0], one[1].id))]
    named = [page for page in pages if page.id in first]
    return [*named, *(page for page in best if page not in named)][:MOST_PAGES]


def _phrases(text: str) -> set[tuple[str, str]]:
    """Return the pairs of adjacent words."""
    return set(pairwise(_WORD.findall(text.lower())))


def _words(text: str) -> set[str]:
    return set(_WORD.findall(text.lower().replace("-", " "))) | set(_WORD.findall(text.lower()))


def listed(pages: list[PlaybookPage], stream: IO[str]) -> str:
    """Return a line per page: its id, name and title, as wide as ``stream``."""
    console = make_console(io.StringIO(), width=make_console(stream).width)
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for page in pages:
        table.add_row(page.id, spelt_out(f"{page.name}: {page.title}"))
    with console.capture() as paper:
        console.print(table)
    lines = [line.rstrip() for line in paper.get().splitlines()]
    return "\n".join(
        [*lines, "", "Run 'doctor explain ID' for one of them. 'doctor diagnose FILE' reads whole logs.", ""]
    )
