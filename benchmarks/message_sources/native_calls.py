"""Messages in the C++ source code of Gloo and oneCCL, whose macros join their arguments."""

from __future__ import annotations

import re
from collections.abc import Iterator

from message_sources.c_calls import calls, joined_text, split

_COMPARED = {"EQ": "==", "NE": "!=", "LT": "<", "LE": "<=", "GT": ">", "GE": ">="}
_GLOO = (
    r"GLOO_(?:THROW\w*|ERROR|WARN|ERROR_MSG|ENFORCE(?:_EQ|_NE|_LT|_LE|_GT|_GE)?)|"
    r"signal(?:AndThrow)?Exception|(?:std::)?runtime_error"
)
_ONECCL = "CCL_THROW(?:_WITH_ERROR)?|CCL_FATAL|LOG_ERROR"
"""Without assertions (``CCL_THROW_IF_NOT``): a pattern takes all errors of oneCCL for one check."""


def gloo(source: str) -> Iterator[str]:
    """Yield the texts of Gloo's exceptions and errors; of an assertion without a text, its condition."""
    for call in calls(source, _GLOO):
        name, _, comparison = call.name.rpartition("_ENFORCE")
        if not name:
            yield from _text(call.arguments)
            continue
        operator = _COMPARED.get(comparison.strip("_"))
        values = 2 if operator else 1
        texts = list(_text(call.arguments[values:]))
        condition = f" {operator} ".join(_words(one) for one in call.arguments[:values])
        yield from texts or [f"{condition}. %s vs %s" if operator else condition]


def oneccl(source: str) -> Iterator[str]:
    """Yield the texts of oneCCL's exceptions and errors."""
    for call in calls(source, _ONECCL):
        texts = _text(call.arguments)
        yield from (text for text in texts if "%%" not in text)  # a conversion that the stream does not make


def _text(arguments: tuple[str, ...]) -> Iterator[str]:
    pieces = tuple(piece for argument in arguments for piece in split(argument, "+"))
    text = joined_text(pieces) if pieces else None
    if text is not None:
        yield text


def _words(condition: str) -> str:
    return re.sub(r"\s+", " ", condition).strip().replace("%", "%%")
