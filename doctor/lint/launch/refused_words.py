"""Asks argparse whether a parser that a program declares accepts the words of a command. Nothing of it is run."""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

from doctor.lint.engine.project_files import ProjectFiles
from doctor.lint.launch.partial_text import is_all_unknown, is_known, is_placeholder, names_in
from doctor.lint.python.project.settings.command_parsers import CommandParser, DeclaredArgument, command_parsers
from doctor.lint.python.script import UNKNOWN

MOST_WORDS = 1_000
"""Words of one command; longer ones are generated."""
MOST_DECLARED = 1_500
MOST_OPEN_ENDED = 3
"""Positional arguments of any number of words; argparse tries all ways to share the words among them."""
_MAY_BE_SEVERAL = re.compile(r"[*?\[\]{}~]|\.\.\.|…")
"""Characters that the shell may expand to several words, and what stands for words that are left out."""
_NEGATIVE = re.compile(r"-\.?\d")
_TEMPLATE = re.compile(r"[A-Z][A-Z0-9_]*|#\w+|N/?A")
"""What an example has for a number: ``NUM_GPUS``."""
_HOLDS_OPTIONS = re.compile(r"(?:ARG|OPT|FLAG|PARAM|EXTRA|CMD|CONF|REST|…|^[@*])", re.IGNORECASE)
"""Names of variables that hold more than one value."""


class CommandRefusal(NamedTuple):
    """Why argparse ends a program. ``kind``: ``unknown``, ``value``, ``choice``, ``missing``, ``count``, ``flag``,
    ``surplus``, ``exclusive`` or ``ambiguous``; ``words``: those of the command, or the names of missing arguments;
    ``option``: the argument that is meant."""

    kind: str
    words: tuple[str, ...]
    option: str = ""
    detail: str = ""


class _Refused(Exception):
    pass


class _HelpAsked(Exception):
    """``--help`` ends the program too, as it was asked to."""


class _SilentParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _Refused(message)

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        raise _HelpAsked

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print nothing."""


class _Choices:
    """Choices in which every unknown value may be."""

    def __init__(self, values: Sequence[object]) -> None:
        try:
            self._values: frozenset[object] | Sequence[object] = frozenset(values)
        except TypeError:
            self._values = values

    def __contains__(self, value: object) -> bool:
        return (isinstance(value, str) and not is_known(value)) or value in self._values

    def __iter__(self) -> Iterator[object]:
        """Nothing for messages, in which there may be very many."""
        return iter(())


class _Number:
    """Reads a number as the type does, and accepts what is unknown."""

    def __init__(self, kind: type[int] | type[float]) -> None:
        self._kind = kind
        self.__name__ = kind.__name__

    def __call__(self, word: str) -> object:
        return self._kind(word) if is_known(word) else word


_TYPES = {"int": _Number(int), "float": _Number(float)}
_WITHOUT_VALUE = frozenset(
    ("store_true", "store_false", "store_const", "append_const", "count", "help", "version", "BooleanOptionalAction")
)
_ACTIONS = _WITHOUT_VALUE | {"store", "append", "extend"}


class AskedParser:
    """A parser to ask, made once for all commands of its program.

    Raises:
        ValueError: argparse does not accept the declarations, or too much of them is unknown.
    """

    def __init__(self, read: CommandParser) -> None:
        self.read = read
        self._names = {name: one for one in read.declared for name in one.names if not one.is_positional}
        self._dark = {name for name, one in self._names.items() if _is_dark(one)}
        positional = [one for one in read.declared if one.is_positional]
        if any(_is_dark(one) or not one.is_certain for one in positional) or len(read.declared) > MOST_DECLARED:
            raise ValueError("an argument without a name is unknown")
        open_ended = [one for one in positional if one.given.get("nargs") in ("?", "*", "+", "...", "A...")]
        if len(open_ended) > MOST_OPEN_ENDED:
            raise ValueError("too many ways to share the words")
        rests = [one for one in read.declared if one.given.get("nargs") in ("...", "A...")]
        self._takes_rest = bool(rests)
        self._counts_positional = not open_ended
        for one in list(self._names.values()):
            if one.given.get("action") == "BooleanOptionalAction":
                self._names.update({f"--no-{name[2:]}": one for name in one.names if name.startswith("--")})
        self._strict, self._relaxed = self._made(relaxed=False), self._made(relaxed=True)

    @property
    def options(self) -> tuple[str, ...]:
        """The names of all options."""
        return tuple(self._names)

    def accepts(self, word: str) -> bool:
        """Whether one word alone is accepted, whatever else is missing."""
        found = self._ask(self._relaxed, [word])
        return found is None

    def refusal(self, words: Sequence[str]) -> CommandRefusal | None:
        """Why the program surely does not accept a command; ``None`` if it may."""
        if len(words) > MOST_WORDS or (self.read.from_file and any(one[:1] in self.read.from_file for one in words)):
            return None
        parts = self._parts(words)
        if any(self._is_dark_word(word) for part in parts for word in part):
            return None
        if len(parts) == 1:
            return self._certain(self._ask(self._strict, parts[0]), parts[0])
        if self._takes_rest:
            return None
        for part in parts:
            if "--" in part:
                return None
            found = self._certain(self._ask(self._relaxed, part), part)
            if found is not None and found.kind in ("unknown", "value", "choice", "flag", "ambiguous", "exclusive"):
                return found
        return None

    # -- the words

    def _parts(self, words: Sequence[str]) -> list[list[str]]:
        """The known words between those that may be any words, or none."""
        parts: list[list[str]] = [[]]
        before: DeclaredArgument | None = None
        for word in words:
            is_free = is_all_unknown(word) or (word.startswith("-") and not is_known(word.partition("=")[0]))
            if is_free and not (before is not None and _takes_one(before) and not _may_hold_options(word)):
                parts.append([])
                before = None
            else:
                parts[-1].append(word)
                before = self._option_of(word) if "=" not in word else None
        return parts

    def _option_of(self, word: str) -> DeclaredArgument | None:
        """The option that a word names, also by the begin of its name."""
        name = word.partition("=")[0]
        if name in self._names or not name.startswith("--") or not self.read.abbreviates:
            return self._names.get(name)
        begun = [one for one in self._names if one.startswith(name)]
        return self._names[begun[0]] if len(begun) == 1 else None

    def _is_dark_word(self, word: str) -> bool:
        """Whether a word names an option of which it is unknown how many words it takes, or may abbreviate one."""
        if not word.startswith("-") or not self._dark:
            return False
        name = word.partition("=")[0]
        return any(one == name or one.startswith(name) or (name[:2] == one and one[1] != "-") for one in self._dark)

    # -- the answers

    def _made(self, *, relaxed: bool) -> _SilentParser:
        """The parser; ``relaxed``: nothing is required, and there are no positional arguments."""
        uncertain = any(not one.is_certain for one in self.read.declared)
        made = _SilentParser(
            prog="program",
            add_help=self.read.adds_help,
            allow_abbrev=self.read.abbreviates,
            conflict_handler="resolve" if uncertain else self.read.conflicts,
        )
        groups = [made.add_mutually_exclusive_group(required=one and not relaxed) for one in self.read.groups]
        for one in self.read.declared:
            if relaxed and one.is_positional:
                continue
            owner = groups[one.group] if one.group >= 0 and one.is_certain else made
            try:
                owner.add_argument(*one.names, **_keywords(one, relaxed=relaxed))
            except (argparse.ArgumentError, TypeError, AttributeError) as error:
                raise ValueError(str(error)) from None
        return made

    def _ask(self, parser: _SilentParser, words: Sequence[str]) -> CommandRefusal | None:
        try:
            _, rest = parser.parse_known_args(list(words))
        except _Refused as why:
            return _read_message(str(why))
        except (_HelpAsked, RecursionError, MemoryError, TypeError, ValueError):
            return None
        if not rest or self.read.known_only:
            return None
        options = tuple(one for one in rest if one.startswith("-") and not _NEGATIVE.match(one) and one != "--")
        if options:
            return CommandRefusal("unknown", options)
        return CommandRefusal("surplus", tuple(rest)) if parser is self._strict and self._counts_positional else None

    def _certain(self, found: CommandRefusal | None, words: Sequence[str]) -> CommandRefusal | None:
        """A refusal, unless it may be due to words that the shell expands, or differ between releases of argparse."""
        if found is None:
            return None
        has_several = any(_MAY_BE_SEVERAL.search(one) for one in words)
        if found.kind == "unknown":
            known = tuple(one for one in found.words if is_known(one.partition("=")[0]) and _is_option(one))
            return found._replace(words=known) if known else None
        if found.kind == "ambiguous":
            named = re.findall(r"--[\w.-]+", found.detail)
            return found if all(one in self._names and self._names[one].is_certain for one in named) else None
        if found.kind in ("value", "choice"):
            return found if _is_plain(found.option, found.words[0]) else None
        if found.kind in ("surplus", "missing") and has_several:
            return None
        if found.kind == "surplus":
            return found if all(map(is_known, words)) and not any(map(_is_left_out, found.words)) else None
        if found.kind == "count" and (has_several or any(_NEGATIVE.match(one) for one in words)):
            return None
        return found


def asked_parsers(modules: ProjectFiles, location: str) -> tuple[AskedParser, ...]:
    """The parsers of a program that must accept each command; none if one of them is not read whole."""
    key = ("asked parsers", location)
    if key not in modules.memo:
        modules.memo[key] = tuple(_made_of(modules, location))
    found: tuple[AskedParser, ...] = modules.memo[key]
    return found


def _made_of(modules: ProjectFiles, location: str) -> Iterator[AskedParser]:
    for read in command_parsers(modules, location):
        try:
            yield AskedParser(read)
        except ValueError:
            continue


def _is_option(word: str) -> bool:
    """Whether a word is an option and no mark of a list or a part left out: ``-``, ``--...``."""
    return re.match(r"--?[A-Za-z_]", word) is not None and not _MAY_BE_SEVERAL.search(word.partition("=")[0])


def _is_plain(option: str, word: str) -> bool:
    name = option.partition("/")[0].lstrip("-")
    is_template = bool(_TEMPLATE.fullmatch(word)) or is_placeholder(name, word)
    return (
        bool(word)
        and is_known(word)
        and not is_template
        and not _MAY_BE_SEVERAL.search(word)
        and not word.startswith("<")
    )


def _is_left_out(word: str) -> bool:
    return is_placeholder("", word) or not re.search(r"\w", word)


def _may_hold_options(word: str) -> bool:
    return any(_HOLDS_OPTIONS.search(one) for one in names_in(word))


def _takes_one(one: DeclaredArgument) -> bool:
    """Whether an option takes at least one word, or one may follow."""
    action, nargs = one.given.get("action", "store"), one.given.get("nargs")
    return action not in _WITHOUT_VALUE and not isinstance(nargs, int)


def _is_dark(one: DeclaredArgument) -> bool:
    """Whether it is unknown how many words an argument takes."""
    nargs, action = one.given.get("nargs"), one.given.get("action", "store")
    is_known_count = nargs is None or (isinstance(nargs, int) and nargs > 0) or nargs in ("?", "*", "+", "...", "A...")
    return not is_known_count or isinstance(nargs, bool) or action not in _ACTIONS


def _keywords(one: DeclaredArgument, *, relaxed: bool) -> dict[str, Any]:
    """The keywords of a declaration, with types that accept what is unknown."""
    action = "store" if _is_dark(one) else one.given.get("action", "store")
    made: dict[str, Any] = {"action": action}
    if action == "BooleanOptionalAction":
        made["action"] = argparse.BooleanOptionalAction
    if action == "version":
        made["version"] = ""
    if action in ("store_const", "append_const"):
        made["const"] = None
    if one.given.get("required") is True and one.is_certain and not relaxed:
        made["required"] = True
    if action in _WITHOUT_VALUE:
        return made
    if not _is_dark(one) and one.given.get("nargs") is not None:
        made["nargs"] = one.given["nargs"]
    if one.is_certain:
        kind, choices = one.given.get("type", "str"), one.given.get("choices")
        if kind in _TYPES:
            made["type"] = _TYPES[str(kind)]
        if isinstance(choices, tuple) and kind in ("int", "float", "str") and UNKNOWN not in choices:
            made["choices"] = _Choices(choices)
    return made


_MESSAGES = (
    ("value", re.compile(r"argument (?P<option>.+?): invalid (?P<detail>\w+) value: (?P<words>.*)$", re.DOTALL)),
    ("choice", re.compile(r"argument (?P<option>.{1,200}?): invalid choice: (?P<words>.*?) \(choose from", re.DOTALL)),
    ("flag", re.compile(r"argument (?P<option>.+?): ignored explicit argument (?P<words>.*)$", re.DOTALL)),
    ("count", re.compile(r"argument (?P<option>.+?): (?P<detail>expected .*)$", re.DOTALL)),
    ("exclusive", re.compile(r"argument (?P<option>.+?): not allowed with argument (?P<detail>.*)$", re.DOTALL)),
    ("ambiguous", re.compile(r"ambiguous option: (?P<option>\S+) could match (?P<detail>.*)$", re.DOTALL)),
    ("missing", re.compile(r"the following arguments are required: (?P<detail>.*)$", re.DOTALL)),
    ("missing", re.compile(r"(?P<detail>one of the arguments .* is required)$", re.DOTALL)),
)


def _read_message(message: str) -> CommandRefusal | None:
    for kind, pattern in _MESSAGES:
        if (found := pattern.match(message)) is not None:
            parts = found.groupdict()
            word = parts.get("words")
            words = (_unquoted(word),) if word is not None else ()
            return CommandRefusal(kind, words, parts.get("option") or "", parts.get("detail") or "")
    return None


def _unquoted(text: str) -> str:
    try:
        return str(ast.literal_eval(text))
    except (SyntaxError, ValueError):
        return text
