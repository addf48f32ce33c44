"""Messages in Python source code: exceptions that are raised, and calls of loggers."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

from message_sources.c_calls import braces_text, conversions_text

_LEVELS = frozenset({"error", "exception", "critical", "fatal", "warning", "warn"})


class Said(NamedTuple):
    """``how``: the name of the exception, or the level of the logger."""

    how: str
    text: str
    is_raised: bool


def messages(source: str) -> Iterator[Said]:
    """Yield the messages of ``raise`` statements and of calls of loggers at warning and above."""
    try:
        tree = ast.parse(source)
    except SyntaxError:  # a template, or Python 2
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            name = _name(node.exc.func)
            text = _text(node.exc.args[0])
            if name and text:
                yield Said(name, text, is_raised=True)
        elif isinstance(node, ast.Assert) and node.msg is not None and (text := _text(node.msg)):
            yield Said("AssertionError", text, is_raised=True)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _LEVELS:
            text = _logged(node.args) if node.args else None
            if text:
                yield Said(node.func.attr, text, is_raised=False)


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _text(node: ast.expr) -> str | None:
    """The message with a placeholder for each value; ``None`` if it holds no literal text."""
    return _worded(_parts(node))


def _worded(text: str) -> str | None:
    return text if any(word.isalpha() and len(word) > 2 for word in text.replace("%s", " ").split()) else None


def _logged(arguments: list[ast.expr]) -> str | None:
    first = arguments[0]
    if len(arguments) > 1 and isinstance(first, ast.Constant) and isinstance(first.value, str):
        return _worded(conversions_text(first.value))
    return _text(first)


def _parts(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value).replace("%", "%%")
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_parts, node.values))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _parts(node.left) + _parts(node.right)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) and isinstance(node.left, ast.Constant):
        return conversions_text(str(node.left.value))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "format":
        return braces_text(_parts(node.func.value))
    return "%s"


def raised(source: str) -> Iterator[str]:
    """Yield the texts of the exceptions that a file raises."""
    return (said.text for said in messages(source) if said.is_raised)


def logged(source: str) -> Iterator[str]:
    """Yield the messages that a file logs at warning and above, without those of the module ``warnings``."""
    return (said.text for said in messages(source) if not said.is_raised and said.how != "warn")
