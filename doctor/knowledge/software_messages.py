"""Messages that other software logs when it fails, extracted from its source code.

``messages/components.json`` describes each component, and ``messages/<component>.json`` holds what it can log. Where
:mod:`doctor.knowledge.log_patterns` has a pattern for a line, that pattern takes precedence: it knows the values of the
message. ``benchmarks/software_messages.py`` makes both files from source code.
"""

from __future__ import annotations

import functools
import re
from importlib.resources import files
from typing import TYPE_CHECKING

import msgspec

from doctor.core.decoding import prepared

if TYPE_CHECKING:
    from doctor.knowledge.linear_regex import Pattern

CAUSE, CONSEQUENCE, HARMLESS = "cause", "consequence", "harmless"
"""What a message shows if no check of its own reports it: a failure of the component itself, a failure elsewhere, or
nothing that ends a job."""
UNCLASSIFIED = "unclassified"
"""The messages of new releases that nobody has classified yet. They are not recognized."""
LEAST_LETTERS = 8
"""Minimum number of letters and digits of a message that is recognized: shorter ones are part of many lines."""
MOST_COMPILED = 512
"""Maximum number of compiled patterns that are kept: a log seldom has more kinds of errors."""


class SoftwareComponent(msgspec.Struct, frozen=True):
    """A program or library, and how its lines look.

    ``cues``: the message follows one of these in a line. ``line``: such a line, with ``{message}`` and values.
    ``is_raised``: the messages are those of exceptions; ``packages``: the innermost frame of their tracebacks is in one
    of these, or in any if there are none. ``is_chatty``: a cue is in most lines of a healthy log, so only lines that
    look like errors are searched; ``is_bare``: the lines have no prefix, and the longest part of each message is a cue.
    ``releases``: the oldest and the newest release that was read; ``source``: where its source code, or else its
    documentation, is published.
    """

    name: str
    file: str
    cues: tuple[str, ...]
    line: str
    releases: tuple[str, str]
    source: str
    is_raised: bool = False
    is_chatty: bool = False
    is_bare: bool = False
    packages: tuple[str, ...] = ()

    def may_raise_in(self, file: str) -> bool:
        """Whether an exception whose innermost frame is in a file may be of this component; ``""`` if unknown."""
        is_inside = any(f"/{package}/" in f"/{file}" for package in self.packages)
        return self.is_raised and (is_inside or not file or not self.packages)


class SoftwareMessage(msgspec.Struct, frozen=True):
    """A message with ``%s``, ``%d``, ``%x`` and ``%f`` for its values.

    ``about``: the id of the check that it is evidence for, :data:`CAUSE`, :data:`CONSEQUENCE` or :data:`HARMLESS`.
    """

    text: str
    about: str

    @property
    def literals(self) -> tuple[str, ...]:
        """The parts of the message between its values."""
        return tuple(part.replace("%%", "%") for part in _VALUE.split(self.text))

    @property
    def letters(self) -> int:
        """The number of its letters and digits, which tells how specific it is."""
        return sum(character.isalnum() for part in self.literals for character in part)

    @property
    def longest_part(self) -> str:
        """The longest literal part, by which the message is found."""
        return max((part.strip() for part in self.literals), key=len)

    @property
    def pattern(self) -> Pattern:
        """The compiled pattern of the message."""
        return _compiled(self.text)


_VALUE = re.compile(r"(?<!%)%[sdxf]")
"""A placeholder."""
_VALUES = {
    "%s": r".*?",
    "%d": r"[-+]?\d{1,20}",
    "%x": r"(?:0[xX])?[0-9a-fA-F]{1,32}|\(nil\)",
    "%f": r"[-+.\w]{1,40}",
}


@functools.lru_cache(maxsize=MOST_COMPILED)
def _compiled(text: str) -> Pattern:
    from doctor.knowledge.linear_regex import linear  # it loads RE2, which checks do not need

    return linear("(?s)" + pattern_of(text))


def pattern_of(text: str) -> str:
    """The regular expression of a message: its parts in their order, with any white space between words."""
    parts = re.split(f"({_VALUE.pattern})", text)
    return "".join(f"(?:{_VALUES[part]})" if part in _VALUES else _literal(part.replace("%%", "%")) for part in parts)


def _literal(part: str) -> str:
    return r"\s{1,40}".join(map(re.escape, re.split(r"\s+", part)))


@functools.cache
def components() -> tuple[SoftwareComponent, ...]:
    """All components."""
    text = (files(__package__) / "messages" / "components.json").read_bytes()
    return msgspec.json.decode(text, type=prepared(tuple[SoftwareComponent, ...]))


@functools.cache
def messages_of(file: str) -> tuple[SoftwareMessage, ...]:
    """The messages of a component with a class, by its ``file``."""
    text = (files(__package__) / "messages" / f"{file}.json").read_bytes()
    by_class = msgspec.json.decode(text, type=prepared(dict[str, tuple[str, ...]]))
    classified = ((about, texts) for about, texts in by_class.items() if about != UNCLASSIFIED)
    return tuple(SoftwareMessage(text, about) for about, texts in classified for text in texts)
