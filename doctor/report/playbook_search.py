"""Finds pages of the playbook by family, or by the text of an error message."""

from __future__ import annotations

import io
import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection
from itertools import pairwise
from typing import IO, NamedTuple

from doctor.core.check import FAMILIES
from doctor.core.check_registry import RULE_FAMILY
from doctor.knowledge.log_patterns import known_patterns
from doctor.report.formatting import spelt_out
from doctor.report.playbook import PlaybookPage, all_pages
from doctor.report.rich_names import Table
from doctor.report.terminal import make_console

ANY_EXCEPTION = "RUN004"
"""The check that reports every exception: pages that know its very message precede it."""
MOST_PAGES = 6
"""Pages that a search returns."""
LEAST_SHARE = 0.6
"""Share of a text's words, weighted by rarity, that a page must contain."""
LEAST_SHARE_OF_ANY = 0.4
"""The same if no page contains more, of texts of several words: a single one may be a misspelled name."""
_WORD = re.compile(r"[a-z_][a-z0-9_]{2,}")
_ENDING = re.compile(r"(?<=\w{4})(?:ing|ed|es|[esd])$")
_SYMPTOMS = re.compile(r"## What you see\n(.*?)(?=\n## |\Z)", re.DOTALL)
_TITLE_WEIGHT = 1.5
"""Weight of a word in a page's title; in its symptoms it is 1."""


def is_family(word: str) -> bool:
    """Whether ``word`` is a family (``network``) or the prefix of its ids (``NET``)."""
    return word.upper() in FAMILIES or word.lower() in FAMILIES.values()


def search(text: str, first: Collection[str] = ()) -> list[PlaybookPage]:
    """Return the pages of a family by id, or else those whose title or symptoms match ``text``, the best first.

    Symptoms are what a page says that users see, and the examples of the log patterns of its check. Pages with a line
    that contains the words of ``text`` in their order precede others, and of these, checks precede rules: a message
    comes from a run. ``first``: ids of pages that precede all others, but for the check of any exception.
    """
    pages = list(all_pages())
    if is_family(text):
        return [page for page in pages if text.lower() in (page.family, page.id.rstrip("0123456789").lower())]
    matches = _matches(text, pages)
    is_strict = len(text.split()) == 1 or any(one.share >= LEAST_SHARE for one in matches)
    least = LEAST_SHARE if is_strict else LEAST_SHARE_OF_ANY
    ordered = sorted((one for one in matches if one.share >= least), key=_Match.place)
    exact = [one.page for one in ordered if one.lines]
    named = [page for page in pages if page.id in first]
    specific = [page for page in named if page.id != ANY_EXCEPTION]
    found = {page.id: page for page in (*specific, *exact, *named, *(one.page for one in ordered))}
    return list(found.values())[:MOST_PAGES]


class _Match(NamedTuple):
    """How well a page matches a text.

    ``lines``: how many of its lines contain the words in their order; ``share``: of the words, weighted by rarity, that
    the page contains; ``score``: the same with more for titles and for words that are adjacent."""

    page: PlaybookPage
    lines: int
    share: float
    score: float

    def place(self) -> tuple[bool, bool, int, float, str]:
        """Return the key that sorts the best first."""
        is_rule = self.page.family in ("", RULE_FAMILY)
        return not self.lines, self.lines > 0 and is_rule, -self.lines, -self.score, self.page.id


class _Symptoms(NamedTuple):
    """Words that users see; ``phrases``: pairs of adjacent ones; ``lines``: the words of each line in their order."""

    words: set[str]
    phrases: set[tuple[str, str]]
    lines: str


def _matches(text: str, pages: list[PlaybookPage]) -> list[_Match]:
    """Return how well each page matches; nothing for a text without words."""
    wanted = _sequence(text)
    titles = [_words(f"{page.name} {page.title}") for page in pages]
    symptoms = list(map(_symptoms_of, pages, _examples(pages)))
    counts = Counter(word for one, other in zip(titles, symptoms, strict=True) for word in one | other.words)
    # A word of no page still counts as a word that a page lacks.
    weights = {word: math.log(1 + len(pages) / (1 + counts[word])) for word in wanted}
    phrases = set(pairwise(wanted))
    matches = []
    for page, title, symptom in zip(pages, titles, symptoms, strict=True):
        found = weights.keys() & (title | symptom.words)
        lines = symptom.lines.count(f" {' '.join(wanted)} ") if phrases else 0
        share = 1.0 if lines else sum(weights[word] for word in found) / (sum(weights.values()) or 1)
        score = sum(weights[word] * (_TITLE_WEIGHT if word in title else 1.0) for word in found)
        score += sum(weights[one] + weights[other] for one, other in phrases & symptom.phrases)
        matches.append(_Match(page, lines, share, score))
    return matches


def _symptoms_of(page: PlaybookPage, examples: list[str]) -> _Symptoms:
    seen = "".join(_SYMPTOMS.findall(page.markdown))
    lines = "\n".join(f" {' '.join(_sequence(line))} " for line in [*seen.splitlines(), *examples])
    return _Symptoms(_words(seen), set(pairwise(_sequence(page.markdown))), lines)


def _examples(pages: list[PlaybookPage]) -> list[list[str]]:
    """Return, for each page, the lines that the log patterns of its check match."""
    examples: defaultdict[str, list[str]] = defaultdict(list)
    for pattern in known_patterns():
        examples[pattern.check] += pattern.examples
    return [examples[page.id] for page in pages]


def _words(text: str) -> set[str]:
    return {*_sequence(text), *_sequence(text.replace("-", " "))}


def _sequence(text: str) -> list[str]:
    """Return the words of a text in their order, in lower case and without endings such as those of plurals."""
    return [_ENDING.sub("", word) for word in _WORD.findall(text.lower())]


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
