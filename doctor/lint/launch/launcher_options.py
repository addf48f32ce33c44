"""Parses the options at the beginning of a launcher's arguments."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from doctor.knowledge.launchers import OptionSyntax
from doctor.lint.launch.partial_text import is_all_unknown


class CommandWord(NamedTuple):
    """A word of a command, and the line on which it begins."""

    text: str
    line: int


class ParsedOptions(NamedTuple):
    """``end``: index of the first word behind the options; ``is_open``: unknown words are among them."""

    options: dict[str, str]
    end: int
    is_open: bool


_ALIASES = {"nproc": "nproc-per-node", "nnode": "nnodes", "n-tasks": "ntasks", "machinefile": "hostfile"}
"""Alternative spellings of options."""
_VALUE = re.compile(r"(?!-)|-\d+\Z")


def parse_options(fields: Sequence[CommandWord], syntax: OptionSyntax) -> ParsedOptions:
    """The options at the beginning of ``fields``, up to the program or script; ``--`` ends them."""
    options: dict[str, str] = {}
    at, is_open = 0, False
    while at < len(fields):
        text = fields[at].text
        if text == "--":
            return ParsedOptions(options, at + 1, is_open)
        if is_all_unknown(text):
            at, is_open = at + 1, True
            continue
        if not text.startswith("-") or text == "-":
            break
        name, value = _split(text, syntax)
        at += 1
        if value is None and name not in syntax.flags and at < len(fields) and _VALUE.match(fields[at].text):
            value = fields[at].text
            at += 1
        options[name] = "true" if value is None else value
    return ParsedOptions(options, at, is_open)


def _split(text: str, syntax: OptionSyntax) -> tuple[str, str | None]:
    """Split ``--name=value``, ``--name``, ``-n4`` or ``-n`` into the long name and the value in the same word."""
    if text.startswith("--"):
        name, equals, value = text[2:].partition("=")
        name = name.replace("_", "-")
        return _ALIASES.get(name, name), value if equals else None
    body, equals, value = text[1:].partition("=")
    if body in syntax.short:
        return syntax.short[body], value if equals else None
    letter = syntax.short.get(text[1])
    if letter is None or letter in syntax.flags:
        return (letter or body.replace("_", "-")), None
    return letter, text[2:].removeprefix("=")
