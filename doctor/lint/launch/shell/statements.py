"""A script as simple commands, each with the branches and loops around it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from doctor.core.text import lazy_compile
from doctor.lint.launch.shell.lexer import tokens
from doctor.lint.launch.shell.tokens import Literal, Operator, ParameterExpansion, Token, Word

_OPENING = frozenset(("if", "while", "until", "{"))
_LISTS = frozenset(("for", "select", "case"))
_CLOSING = frozenset(("fi", "done", "esac", "}"))
_WITHIN = frozenset(("then", "do", "else", "elif", "!", "time"))
_KEYWORDS = _OPENING | _LISTS | _WITHIN | {"function"}
"""What may stand before the name of a function, or before a bracket without one."""
_NEVER_FAILING = ("export", "cd", "set", "source", ".", "module", "ml")
"""Commands that are not expected to fail."""
_LOOPS = frozenset(("for", "while", "until", "select"))
_NAME = lazy_compile(r"[A-Za-z_]\w*")
_COUNTED = lazy_compile(r"(?:\+\+|--)([A-Za-z_]\w*)|([A-Za-z_]\w*)(?:\+\+|--|[-+*/%]?=[^=].*)")
_TESTS = ("[", "[[", "test")
DECLARING = ("export", "declare", "typeset", "local", "readonly")


@dataclass(frozen=True)
class Statement:
    """One command. ``is_chained``: whether it runs depends on another one (``&&``, ``||``); ``tested``: the variables
    that the conditions of the branches around it read; ``function``: the one whose body it is in."""

    words: tuple[Word, ...]
    line: int
    end_line: int
    in_branch: bool = False
    in_loop: bool = False
    is_chained: bool = False
    in_background: bool = False
    tested: frozenset[str] = frozenset()
    function: str = ""


class ShellScript(NamedTuple):
    """The commands in the order of the text. ``doubtful``: variables that a branch, loop or function may set, so their
    values are unknown."""

    statements: tuple[Statement, ...]
    doubtful: frozenset[str]


def split_script(text: str) -> ShellScript:
    """Read a script as commands."""
    splitter = _Splitter()
    found = splitter.run(tokens(text))
    names = set(splitter.loop_names)
    for statement in found:
        assigned = [assigned_name(word) for word in statement.words]
        is_assignment = statement.words[0].plain in DECLARING or None not in assigned  # not of a program alone
        if (statement.in_branch or statement.is_chained) and is_assignment:
            names.update(filter(None, assigned))
        names.update(_computed(statement))
    return ShellScript(found, frozenset(names))


def _computed(statement: Statement) -> Iterator[str]:
    """The variables that ``let`` or ``((…))`` changes."""
    first, *others = (word.plain or "" for word in statement.words)
    if first == "let":
        literals = (part.text for word in statement.words[1:] for part in word.parts if isinstance(part, Literal))
        yield from (name for text in literals for name in _NAME.findall(text))
    elif statement.in_branch and (match := _COUNTED.fullmatch("".join((first, *others)))):
        yield match[1] or match[2]


def _read_in(words: Iterable[Word]) -> Iterator[str]:
    parts = (part for word in words for part in word.parts)
    yield from (part.name for part in parts if isinstance(part, ParameterExpansion))


def assigned_name(word: Word) -> str | None:
    """``NAME`` of ``NAME=value`` and ``NAME+=value``."""
    first = word.parts[0] if word.parts else None
    if not isinstance(first, Literal):
        return None
    name, equals, _ = first.text.partition("=")
    name = name.removesuffix("+")
    return name if equals and name.isidentifier() and name.isascii() else None


class _Splitter:
    def __init__(self) -> None:
        self.loop_names: list[str] = []
        self._tested: list[tuple[int, set[str]]] = []  # of open branches: their depth, and what they read
        self._done: list[Statement] = []
        self._around: list[tuple[str, int]] = []  # open blocks, and the number of statements before each
        self._words: list[Word] = []
        self._skips = False  # the target of a redirection
        self._is_chained = False
        self._begin = 0  # of the pipeline, in statements
        self._named = ""  # the word before a bracket, and then the function whose body follows
        self._functions: list[tuple[int, str]] = []  # open bodies: their depth, and the name

    def run(self, found: Iterable[Token]) -> tuple[Statement, ...]:
        for token in found:
            if isinstance(token, Operator):
                self._operator(token.text)
            elif self._skips:
                self._skips = False
            else:
                self._words.append(token)
        self._flush()
        return tuple(self._done)

    def _operator(self, text: str) -> None:
        if text == ">":
            self._skips = True
        elif text == "(":
            names = [word.plain for word in self._words if word.plain not in _KEYWORDS]
            self._words.clear()  # the name of a function, or nothing before a subshell
            self._open("(")  # that of a body: name() (…)
            self._named = names[0] or "" if len(names) == 1 else ""
        elif text == ")":
            self._close_bracket()
        else:
            self._end(text)

    def _close_bracket(self) -> None:
        if self._words and self._words[0].plain == "case":
            self._flush()
        if self._around and self._around[-1][0] == "case":
            self._words.clear()  # a pattern
            return
        named = self._named
        self._flush()
        self._leave("(")
        self._named = named

    def _end(self, text: str) -> None:
        before, was_chained = len(self._done), self._is_chained
        start = self._begin
        self._flush()
        if text == "&":
            for at in range(min(start, before), len(self._done)):
                self._done[at] = replace(self._done[at], in_background=True)
        if text in ("&&", "||"):
            first = self._done[-1].words[0] if self._done else None
            never_fails = first is not None and (assigned_name(first) is not None or first.plain in _NEVER_FAILING)
            self._is_chained = was_chained or text == "||" or not never_fails
        elif text not in ("|", "|&"):
            self._is_chained = False
        if text not in ("|", "|&"):
            self._begin = len(self._done)

    def _flush(self) -> None:
        words = self._keywords(self._words)
        self._words = []
        self._skips = False
        if not words:
            return
        first, last = words[0].line, words[-1].end_line
        kinds = {kind for kind, _ in self._around}
        if self._around and self._around[-1][0] == "if" and words[0].plain in _TESTS:
            self._tested.append((len(self._around), set(_read_in(words))))
        tested = frozenset().union(*(names for _, names in self._tested))
        chained, looped = self._is_chained, bool(kinds & _LOOPS)
        function = self._functions[-1][1] if self._functions else ""
        self._named = ""
        self._done.append(
            Statement(tuple(words), first, last, bool(kinds), looped, chained, tested=tested, function=function)
        )

    def _keywords(self, words: list[Word]) -> list[Word]:
        """The words without leading keywords, whose blocks are entered or left."""
        while words:
            first = words[0].plain
            if first in _LISTS:
                self._around.append((first, len(self._done)))
                self.loop_names += [name for word in words[1:2] if (name := word.plain) and first != "case"]
                return []
            if first in _OPENING:
                self._open(first)
            elif first in _CLOSING:
                self._leave(first)
                return []
            elif first == "function":
                return []
            elif first not in _WITHIN:
                return words
            words = words[1:]
        return []

    def _open(self, opening: str) -> None:
        """Enter a block, which is the body of a function if its name and brackets are just before."""
        self._around.append((opening, len(self._done)))
        if self._named and opening in ("{", "("):
            self._functions.append((len(self._around), self._named))
        self._named = ""

    def _leave(self, closing: str) -> None:
        if self._around:
            _, self._begin = self._around.pop()
            self._functions = [one for one in self._functions if one[0] <= len(self._around)]
            self._tested = [one for one in self._tested if one[0] <= len(self._around)]
