"""Texts that users read avoid the terms of a word list: calques, metaphors, archaic words and British spelling.

The list is ``tests/data/prose_terms.json``: ``phrases`` match whole words in any case, ``*`` matches any letters of
a word, ``except`` lists correct contexts, ``write`` is the suggestion.
"""

from __future__ import annotations

import ast
import json
import re
from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
TERMS = ROOT / "tests" / "data" / "prose_terms.json"
WHOLE = ("checks/doctor_checks", "doctor/cli", "doctor/report")
"""Folders in which docstrings are checked as well: those of checks and commands are shown to users."""
SHOWN_KEYS = ("confirmed_by", "description", "fix", "meaning", "note", "replacement", "says", "summary", "title", "why")
"""Keys of the data files whose values are shown to users."""
PAGES = ("README.md", "PLUGINS.md", "DECISIONS.md", "CONTRIBUTING.md", "SECURITY.md", "docs", "playbooks")

_WORD = re.compile(r"[\w-]+")
_CODE = re.compile(r"^(?P<fence>```|~~~).*?^(?P=fence)|`[^`\n]+`|https?://\S+", re.MULTILINE | re.DOTALL)
_VALUES = re.compile(r'"(?:' + "|".join(SHOWN_KEYS) + r')": "(?P<text>(?:[^"\\]|\\.)*)"')
_EXPRESSIONS = re.compile(r"\{[^{}\n]*\}")
_NOT_PROSE = ("re.compile", "lazy_compile", ".split", "lines", "logged")
"""Ends of the names of functions whose arguments are patterns, words, scripts or logs."""
_BREAK = r"""(?:\s+|\s*["']\s+[a-z]?["']\s*)"""
"""White space between two words, or the border of two adjacent string literals."""

pytestmark = pytest.mark.skipif(not (ROOT / "playbooks").is_dir(), reason="needs a checkout")


class Term(NamedTuple):
    """``words``: patterns of the words of a phrase with wildcards, else the words. All match text in lower case."""

    words: frozenset[str] | re.Pattern[str]
    pattern: re.Pattern[str]
    exceptions: tuple[re.Pattern[str], ...]
    write: str

    def may_be_in(self, words: set[str], listed: str) -> bool:
        """Whether a text with these words can have a hit; ``listed``: the words, one a line."""
        return self.words <= words if isinstance(self.words, frozenset) else bool(self.words.search(listed))

    def hits(self, lowered: str) -> Iterator[re.Match[str]]:
        for match in self.pattern.finditer(lowered):
            before = lowered[match.start() - 1 : match.start()]
            if not _WORD.fullmatch(before) and not any(_covers(one, match) for one in self.exceptions):
                yield match


def _covers(exception: re.Pattern[str], match: re.Match[str]) -> bool:
    found = exception.finditer(match.string, max(0, match.start() - 60), match.end() + 60)
    return any(one.start() <= match.start() and match.end() <= one.end() for one in found)


def _pattern(phrase: str) -> re.Pattern[str]:
    # No look-behind: a literal at the start is found fast.
    words = (re.escape(word).replace(r"\*", r"\w*") for word in phrase.split(" "))
    return re.compile(rf"{_BREAK.join(words)}(?![\w-])")


def _wildcards(phrase: str) -> re.Pattern[str]:
    longest = max(phrase.split(" "), key=lambda word: len(word.strip("*")))
    return re.compile(longest.strip("*"))


def read_terms() -> list[Term]:
    return [
        Term(
            _wildcards(phrase) if "*" in phrase else frozenset(phrase.split(" ")),
            _pattern(phrase),
            tuple(map(_pattern, entry.get("except", ()))),
            entry["write"],
        )
        for entry in json.loads(TERMS.read_text(encoding="utf-8"))
        for phrase in entry["phrases"]
    ]


class Fault(NamedTuple):
    line: int
    words: str
    write: str


def faults_in(text: str, terms: list[Term]) -> list[Fault]:
    """The hits in ``text``, with lines from 1."""
    lowered = text.lower()
    words = set(_WORD.findall(lowered))
    listed = "\n".join(words)
    return [
        Fault(text.count("\n", 0, match.start()) + 1, " ".join(match[0].split()), term.write)
        for term in terms
        if term.may_be_in(words, listed)
        for match in term.hits(lowered)
    ]


def prose_of_page(text: str) -> str:
    """A page with code and addresses blanked out."""
    return _CODE.sub(_blank, text)


def prose_of_data(text: str) -> str:
    """A data file with all but the values that users see blanked out."""
    return _only(text, [value.span("text") for value in _VALUES.finditer(text)])


def prose_of_module(text: str, lines: list[int], *, whole: bool) -> str:
    """A module with all but its sentences on ``lines`` blanked out; ``whole``: those in docstrings count too."""
    begins = [0, *accumulate(len(line) for line in text.splitlines(keepends=True))]

    def place(line: int, column: int) -> int:
        return begins[line - 1] + len(text[begins[line - 1] : begins[line]].encode()[:column].decode())

    spans = []
    for node in _shown_strings(ast.parse(text), lines, whole):
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        spans.append((place(node.lineno, node.col_offset), place(node.end_lineno, node.end_col_offset)))
    return _EXPRESSIONS.sub(_blank, _only(text, [span for span in spans if " " in text[slice(*span)]]))


def _only(text: str, spans: list[tuple[int, int]]) -> str:
    kept, end = [], 0
    for start, stop in sorted(spans):
        kept += [re.sub(r"\S", " ", text[end:start]), text[start:stop]]
        end = stop
    return "".join([*kept, re.sub(r"\S", " ", text[end:])])


def _blank(code: re.Match[str]) -> str:
    return re.sub(r"\S", " ", code[0])


def _shown_strings(node: ast.AST, lines: list[int], whole: bool) -> Iterator[ast.Constant | ast.JoinedStr]:
    """String literals without test cases, regular expressions, lists of words and, unless ``whole``, docstrings."""
    for child in ast.iter_child_nodes(node):
        if not _has_line(lines, child):
            continue
        if isinstance(child, ast.JoinedStr) or (isinstance(child, ast.Constant) and isinstance(child.value, str)):
            yield child
        elif not (
            (isinstance(child, ast.keyword) and child.arg == "cases")
            or (isinstance(child, ast.Call) and ast.unparse(child.func).endswith(_NOT_PROSE))
            or (isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant) and not whole)
        ):
            yield from _shown_strings(child, lines, whole)


def _has_line(lines: list[int], node: ast.AST) -> bool:
    """Whether a node has one of the lines, as far as it has lines; decorators are above the line of their function."""
    last = getattr(node, "end_lineno", None)
    if last is None:
        return True
    first = min(one.lineno for one in (node, *getattr(node, "decorator_list", ())))
    place = bisect_left(lines, first)
    return place < len(lines) and lines[place] <= last


def _faults() -> Iterator[str]:
    terms = read_terms()
    for path in _files():
        name, text = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
        if path.suffix == ".md":
            prose = prose_of_page(text)
        elif path.suffix == ".json":
            prose = prose_of_data(text)
        elif suspects := faults_in(text, terms):
            lines = sorted({one.line for one in suspects})
            prose = prose_of_module(text, lines, whole=name.startswith(WHOLE))
        else:
            continue
        for fault in sorted(faults_in(prose, terms)):
            yield f"{name}:{fault.line}: {fault.words!r}: write {fault.write}"


def _files() -> Iterator[Path]:
    for name in PAGES:
        path = ROOT / name
        yield from sorted(path.rglob("*.md")) if path.is_dir() else (path,)
    for name in ("checks/doctor_checks", "doctor"):
        yield from sorted((ROOT / name).rglob("*.py"))
    for name in ("", "causes", "log_lines", "sites"):
        yield from sorted((ROOT / "doctor" / "knowledge" / name).glob("*.json"))


def test_texts_avoid_the_listed_terms() -> None:
    faults = list(_faults())
    assert not faults, "\n" + "\n".join(faults)


_MODULE = '''
"""What nobody tells you."""
NAMES = "nobody root".split()
PATTERN = re.compile("ranks that nobody (?:hears|told)")


@option(help="Ranks that nobody knows.")
@check(cases=lambda: Passes("nobody is late"))
def command():
    """Ask whether ranks are alike."""
    yield "ranks in place " f"of {alike} hosts, told"
    key = "told"
'''


@pytest.mark.parametrize(
    ("whole", "expected"),
    [
        (False, [(7, "nobody"), (11, 'in place " f"of'), (11, "told")]),
        (True, [(2, "nobody"), (2, "tells"), (7, "nobody"), (10, "alike"), (11, 'in place " f"of'), (11, "told")]),
    ],
)
def test_sentences_of_a_module_are_searched(whole: bool, expected: list[tuple[int, str]]) -> None:
    terms = read_terms()
    every_line = list(range(1, 14))
    faults = faults_in(prose_of_module(_MODULE, every_line, whole=whole), terms)
    assert sorted((fault.line, fault.words) for fault in faults) == expected


def test_prose_of_pages_and_data_is_searched() -> None:
    terms = read_terms()
    page = "There is no port, and `70000 is no port`.\n\n```\nnobody\n```\n\nThis\nis no port. It is no longer used.\n"
    assert faults_in(prose_of_page(page), terms) == [(8, "is no", "is not a, are not")]
    data = '{"pattern": "told",\n "fix": "Tell it \\"again\\".", "cues": ["heard"]}'
    assert [fault[:2] for fault in faults_in(prose_of_data(data), terms)] == [(2, "tell")]


def test_wildcards_and_capitals_match() -> None:
    terms = read_terms()
    hits = [fault.words for fault in faults_in("Reinitialised at the TIME-OUT; an optimistic analysis\n", terms)]
    assert sorted(hits) == ["reinitialised", "time-out"]
