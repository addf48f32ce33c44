"""Suppression comments: ``# doctor: ignore[CODE003] reason`` on the line of the violation, or alone above it."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from doctor.core.finding import Severity
from doctor.lint.engine.discovery import LINE_END
from doctor.lint.engine.rule import Rule, SourceLocation, Violation

_MENTION = re.compile(r"doctor:\s*ignore")
_COMMENT = re.compile(r"#\s*doctor:\s*ignore(?:\[(?P<names>[^\]]*)\])?:?[ \t]*(?P<reason>[^#\r\n]*)")


class SuppressionComment(NamedTuple):
    """``covered_line``: the line that the comment covers. Without a ``reason`` it has no effect."""

    line: int
    column: int
    covered_line: int
    names: tuple[str, ...]
    reason: str


def _names(pattern: str, rule_id: str, family: str) -> bool:
    return pattern in (rule_id, family.upper(), rule_id.rstrip("0123456789"))


def comments_in(text: str, *, is_python: bool) -> tuple[SuppressionComment, ...]:
    """The suppression comments of a file; strings of Python are not comments."""
    if _MENTION.search(text) is None:
        return ()
    spoken = _python_comments(text) if is_python else _hash_comments(text)
    found = [(place, alone, match) for place, alone, words in spoken if (match := _COMMENT.search(words))]
    stacked = {place.line for place, alone, _ in found if alone}
    comments = []
    for place, alone, match in found:
        covered_line = place.line
        while alone and covered_line in stacked:  # several of them, one above the other
            covered_line += 1
        names = tuple(name.strip().upper() for name in (match["names"] or "").split(",") if name.strip())
        comments.append(SuppressionComment(place.line, place.column, covered_line, names, match["reason"].strip()))
    return tuple(comments)


def _python_comments(text: str) -> Iterator[tuple[SourceLocation, bool, str]]:
    """Place, whether it is alone on its line, and text; up to the first place that cannot be tokenized."""
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                yield SourceLocation(*token.start), not token.line[: token.start[1]].strip(), token.string
    except (tokenize.TokenError, SyntaxError):
        return


def _hash_comments(text: str) -> Iterator[tuple[SourceLocation, bool, str]]:
    """Comments of shell and YAML."""
    for number, line in enumerate(LINE_END.split(text), 1):
        if found := _COMMENT.search(line):
            yield SourceLocation(number, found.start()), not line[: found.start()].strip(), line[found.start() :]


class Suppressions:
    """The comments of one file, and those that suppressed something."""

    def __init__(self, comments: tuple[SuppressionComment, ...]) -> None:
        self._comments = comments
        self._used: set[tuple[SuppressionComment, str]] = set()

    def reason_for(self, rule: Rule, lines: Collection[int]) -> tuple[str, int] | None:
        """The reason for which a violation on these lines is suppressed, and the line of the comment."""
        for comment in self._comments:
            named = [name for name in comment.names if _names(name, rule.id, rule.family)]
            if named and comment.covered_line in lines:
                self._used.update((comment, name) for name in named)
                if comment.reason:
                    return comment.reason, comment.line
        return None

    def unused(self, judged: Collection[str], known: Mapping[str, str]) -> Iterator[Violation]:
        """Comments without a reason, with unknown names, and unused ones. ``judged``: ids of the rules that finished;
        ``known``: every id, with its family."""
        for comment in self._comments:
            if words := self._why(comment, judged, known):
                yield Violation(SourceLocation(comment.line, comment.column), *words)

    def _why(
        self, comment: SuppressionComment, judged: Collection[str], known: Mapping[str, str]
    ) -> tuple[str, str] | None:
        if not comment.names:
            return "the ignore names no rule, and does not count", "Name it: `# doctor: ignore[CODE003] why`."
        for name in comment.names:
            if not any(_names(name, one, family) for one, family in known.items()):
                return f"no rule is called {name}, so nothing is ignored", "Take the id from `doctor list`."
        if not comment.reason:
            return "the ignore gives no reason, and does not count", "Write why behind the bracket."
        unused = [name for name in comment.names if (comment, name) not in self._used]
        idle = [name for name in unused if all(one in judged for one, of in known.items() if _names(name, one, of))]
        if idle:
            return f"nothing is found here that {', '.join(idle)} would ignore", "Take the comment away."
        return None


UNUSED_SUPPRESSION = Rule(
    id="CODE000",
    name="ignore-in-vain",
    severity=Severity.INFO,
    reads=object,
    judge=lambda _source: (),  # the file checker reports it after all other rules
    cases=tuple,
    question="Ask whether each comment that asks to ignore a finding gives a reason and is still of use.",
    effect="A finding is thought to be accepted that is not, or a new fault on that line goes unseen.",
    fix="Write `# doctor: ignore[ID] reason`, or take the comment away.",
)
