"""The components whose messages are read from source code: where it is, and which calls log a failure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from message_sources.c_calls import calls, printf_text

FAILURE = (
    "fail",
    "error",
    "unable",
    "cannot",
    "can't",
    "could not",
    "abort",
    "timed out",
    "timeout",
    "invalid",
    "mismatch",
    "not supported",
    "unsupported",
    "no such",
    "refused",
    "closed",
    "unexpected",
    "corrupt",
    "out of",
    "lost",
    "denied",
)
"""Words of an announcement at a level below warning that is one of a failure."""


class SourceComponent(NamedTuple):
    """A component: how it is described in the package, and how its messages are read.

    ``checkout``: the folder below ``--sources``; ``paths``: regular expression of the files that are read; ``tags``:
    regular expression of the releases that are read if the folder is a clone, all of them if ``""`` means the only
    state that is there. ``read``: yields the messages in the text of one file.
    """

    name: str
    file: str
    checkout: str
    source: str
    paths: str
    tags: str
    cues: tuple[str, ...]
    line: str
    read: Callable[[str], Iterable[str]]
    is_raised: bool = False


def announces_failure(text: str) -> bool:
    """Whether a message that is not logged as an error is one of a failure."""
    lower = text.lower()
    return any(word in lower for word in FAILURE)


def printf_calls(names: str, informing: str = "", format_at: int | None = None) -> Callable[[str], Iterator[str]]:
    """A reader of calls with a format of ``printf``: the first argument that is made of literals, or the one at
    ``format_at``. Of the functions ``informing``, only messages of failures are read."""

    def read(source: str) -> Iterator[str]:
        for call in calls(source, f"{names}|{informing}" if informing else names):
            chosen = call.arguments if format_at is None else call.arguments[format_at : format_at + 1]
            text = next((text for text in map(printf_text, chosen) if text), None)
            if text and (not informing or call.name not in informing.split("|") or announces_failure(text)):
                yield text

    return read


COMPONENTS = (
    SourceComponent(
        name="NCCL",
        file="nccl",
        checkout="nccl",
        source="https://github.com/NVIDIA/nccl",
        paths=r"src/.*\.(?:cc|h|cpp)$",
        tags=r"v2\.(?:1\d|2\d|3\d)\.\d+-1$",
        cues=("NCCL WARN ", "NCCL INFO "),
        line="gpu-node-3:4127:4190 [2] {place} NCCL WARN {message}",
        read=printf_calls("WARN", "INFO|VERSION"),
    ),
)
