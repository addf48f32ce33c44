"""Messages in calls of C and C++ source code: formats of ``printf``, arguments that are joined, and streams."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

_SKIPPED = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:[^"\\\n]|\\.)*"|\'(?:[^\'\\\n]|\\.)*\'', re.DOTALL)
_STRING = re.compile(r'(?:u8|[LuU])?"((?:[^"\\\n]|\\.)*)"')
_CONVERSION = re.compile(r"%(?:[-+ #0']*(?:\d+|\*)?(?:\.(?:\d+|\*))?(?:hh|ll|[hlLqjzt])?([diouxXcsfFeEgGaApnm])|%)")
_KINDS = {**dict.fromkeys("diu", "%d"), **dict.fromkeys("xXop", "%x"), **dict.fromkeys("fFeEgGaA", "%f")}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "0": "", "a": "", "e": ""}
_MACRO = re.compile(r"\bPRI([diouxX])\w*")


class Call(NamedTuple):
    """A call: its name, its arguments as source code, and what follows it up to the next semicolon."""

    name: str
    arguments: tuple[str, ...]
    rest: str


def calls(source: str, names: str) -> Iterator[Call]:
    """Yield the calls of functions and macros whose names match the regular expression ``names``."""
    source = _without_comments(source)
    for found in re.finditer(rf"(?<![\w.]){'(' + names + ')'}\s*\(", source):
        if source[: found.start()].rstrip(" \t").endswith("define"):
            continue
        parsed = _arguments(source, found.end())
        if parsed is not None:
            arguments, end = parsed
            yield Call(found[1], arguments, source[end : _end_of_statement(source, end)])


def printf_text(argument: str) -> str | None:
    """The message of a format of ``printf``; ``None`` if the argument is not made of literals alone."""
    joined = _MACRO.sub(r'"\1"', argument)
    if not _STRING.search(joined) or re.search(r"[^\s\\A-Z_]", _STRING.sub("", joined)):
        return None
    text = "".join(map(_unescaped, _STRING.findall(joined)))
    return conversions_text(text)


def joined_text(parts: tuple[str, ...]) -> str | None:
    """The message of arguments that are written one after the other (``TORCH_CHECK``, ``c10::str``)."""
    text = ""
    for part in parts:
        if nested := re.fullmatch(r"\s*(?:c10::str|std::string|fmt::format|strcat)\s*\((.*)\)\s*", part, re.DOTALL):
            parsed = _arguments(nested[1] + ")", 0)
            part_text = joined_text(parsed[0]) if parsed else None
            text += braces_text(part_text) if part_text and "fmt::format" in part else part_text or "%s"
            continue
        text += _literal(part)
    return text if _has_words(text) else None


def stream_text(rest: str) -> str | None:
    """The message of ``<< "text" << value``."""
    text = "".join(map(_literal, split(rest, "<<")[1:]))
    return text if _has_words(text) else None


def braces_text(text: str) -> str:
    """The message of a format of ``fmt::format`` or ``str.format``."""
    protected = text.replace("{{", "\0").replace("}}", "\1")
    return re.sub(r"\{[^{}]*\}", "%s", protected).replace("\0", "{").replace("\1", "}")


def conversions_text(text: str) -> str:
    """The message of a ``%`` format, with one placeholder for each kind of value."""
    return _CONVERSION.sub(lambda one: _KINDS.get(one[1], "%s") if one[1] else "%%", text)


def _literal(part: str) -> str:
    strings = _STRING.findall(part)
    if strings and not re.search(r"[^\s\\]", _STRING.sub("", part)):
        return "".join(map(_unescaped, strings)).replace("%", "%%")
    return "%s" if part.strip() and "endl" not in part else ""


def _has_words(text: str) -> bool:
    return bool(re.search(r"[A-Za-z]{3}", text.replace("%s", "")))


def _unescaped(literal: str) -> str:
    return re.sub(r"\\(.)", lambda one: _ESCAPES.get(one[1], one[1]), literal)


def _without_comments(source: str) -> str:
    return _SKIPPED.sub(lambda one: " " if one[0].startswith("/") else one[0], source)


def _arguments(source: str, start: int) -> tuple[tuple[str, ...], int] | None:
    """The arguments from after the opening parenthesis, and the position after the closing one."""
    found: list[str] = []
    depth, begin = 0, start
    position = start
    while position < len(source):
        character = source[position]
        if character in "\"'":
            literal = _SKIPPED.match(source, position)
            position = literal.end() if literal else position + 1
            continue
        if character in "([{":
            depth += 1
        elif character in ")]}":
            if depth == 0:
                return (*found, source[begin:position]), position + 1
            depth -= 1
        elif character == "," and depth == 0:
            found.append(source[begin:position])
            begin = position + 1
        position += 1
    return None


def split(source: str, separator: str) -> list[str]:
    """Split outside literals and parentheses."""
    parts, depth, begin, position = [], 0, 0, 0
    while position < len(source):
        character = source[position]
        if character in "\"'" and (literal := _SKIPPED.match(source, position)):
            position = literal.end()
            continue
        depth += (character in "([{") - (character in ")]}")
        if depth == 0 and source.startswith(separator, position):
            parts.append(source[begin:position])
            position += len(separator)
            begin = position
            continue
        position += 1
    return [*parts, source[begin:]]


def _end_of_statement(source: str, start: int) -> int:
    position = start
    while position < len(source) and source[position] not in ";{}":
        literal = _SKIPPED.match(source, position) if source[position] in "\"'" else None
        position = literal.end() if literal else position + 1
    return position


def table_texts(source: str) -> Iterator[str]:
    """Yield the messages of SLURM's table of errors (``ERRTAB_ENTRY(CODE), "message"``)."""
    for found in re.finditer(r"ERRTAB_ENTRY\(\w+\),\s*((?:\"(?:[^\"\\]|\\.)*\"\s*)+)", source):
        if text := printf_text(found[1]):
            yield text
