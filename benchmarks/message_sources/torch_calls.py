"""Messages in PyTorch's source code, C++ and Python: what it logs, and the texts of its exceptions."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from message_sources import python_calls
from message_sources.c_calls import Call, braces_text, calls, joined_text, split, stream_text

_LOGGED = "LOG|C10D_(?:ERROR|WARNING)|TORCH_WARN(?:_ONCE)?|TORCH_UCC_LOG_ERROR"
_JOINED_ALWAYS = "c10::str|fmt::format"
_JOINED = r"TORCH_CHECK(?:_MSG|_VALUE|_TYPE|_INDEX|_WITH|_NOT_IMPLEMENTED)?|TORCH_INTERNAL_ASSERT|AT_ERROR"
_RAISED = (
    rf"{_JOINED}|C10D?_THROW_ERROR|REDUCER_CHECK|C10D_CHECK_WITH|TORCH_UCC_CHECK|AT_ASSERTM?|"
    r"(?:std::)?(?:runtime_error|invalid_argument|out_of_range|logic_error)|"
    r"(?:SocketError|TimeoutError|DistError|DistNetworkError|DistStoreError|DistBackendError)"
)
_BEFORE_THE_TEXT = {
    "TORCH_CHECK_WITH": 2,
    "C10D_CHECK_WITH": 2,
    "C10_THROW_ERROR": 1,
    "C10D_THROW_ERROR": 1,
    "TORCH_UCC_CHECK": 1,
    "REDUCER_CHECK": 2,
    "TORCH_UCC_LOG_ERROR": 1,
}
"""Arguments of a macro before those that make the text; of other macros that check a condition it is one."""
_FORMATS = ("fmt::format", "C10D_")
_NOT_MESSAGES = re.compile(r"WorkNCCL\(|\[c10d\]")
"""Beginnings of texts that are part of messages, or that macros are made of."""
FAILURE = ("fail", "error", "exception", "timeout", "timed out", "terminat", "abort", "taking the entire process down")
"""Words of a text that is made apart from the call that logs or throws it."""


def logged(source: str) -> Iterator[str]:
    """Yield the messages that are logged at the levels above information."""
    if _is_python(source):
        yield from python_calls.logged(source)
        return
    for call in calls(source, _LOGGED):
        if call.name != "LOG":
            yield from _text_of(call)
        elif call.arguments[0].strip() in ("ERROR", "WARNING", "FATAL") and (text := stream_text(call.rest)):
            yield from _message(text)
    yield from made_apart(source)


def raised(source: str) -> Iterator[str]:
    """Yield the texts of exceptions."""
    if _is_python(source):
        yield from python_calls.raised(source)
        return
    for call in calls(source, _RAISED):
        yield from _text_of(call)
    yield from made_apart(source)


def made_apart(source: str) -> Iterator[str]:
    """Yield the texts of failures that are first made and then logged or thrown."""
    for call in calls(source, _JOINED_ALWAYS):
        for text in _text_of(call):
            if any(word in text.lower() for word in FAILURE):
                yield text


def _is_python(source: str) -> bool:
    try:
        ast.parse(source)
    except (SyntaxError, ValueError):
        return False
    return True


def _text_of(call: Call) -> Iterator[str]:
    conditions = int(call.name.startswith(("TORCH_CHECK", "TORCH_INTERNAL_ASSERT", "AT_ASSERT")))
    arguments = call.arguments[_BEFORE_THE_TEXT.get(call.name, conditions) :]
    is_format = call.name.startswith(_FORMATS)
    pieces = (piece for argument in arguments[: 1 if is_format else None] for piece in split(argument, "+"))
    if text := joined_text(tuple(pieces)):
        yield from _message(braces_text(text) if is_format else text)


def _message(text: str) -> Iterator[str]:
    if not _NOT_MESSAGES.match(text):
        yield text.strip()
