"""Recognition of the messages that other software logs when it fails (:mod:`doctor.knowledge.software_messages`).

A component is loaded when a log has a line of it. Its messages are found by their longest literal parts, and of several
that match, the most specific one counts.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import NamedTuple

from doctor.knowledge.software_messages import (
    LEAST_LETTERS,
    SoftwareComponent,
    SoftwareMessage,
    components,
    messages_of,
)
from doctor.postmortem.logs.multi_match import CueMatcher

KIND = "software."
"""Kinds of events are this and the class of the message, without the id of a check: ``software.cause``."""
OF_A_CHECK = "check"
LONGEST_SAID = 200
"""Maximum number of characters of a message that are kept."""
LONGEST_CUE = 16
"""Maximum number of characters of a cue that is part of a message: longer ones make the automaton larger."""
MOST_CANDIDATES = 32
"""Maximum number of messages that one line is compared with, the most specific ones: a line may be made of parts of
many."""
LONGEST_SEARCHED = 2000
"""Maximum number of characters of a line that are searched."""


class RecognizedMessage(NamedTuple):
    """A message of a component in a line."""

    component: SoftwareComponent
    message: SoftwareMessage
    said: str

    @property
    def kind(self) -> str:
        """The kind of the event."""
        about = self.message.about
        return KIND + (about if about.islower() else OF_A_CHECK)

    @property
    def values(self) -> tuple[tuple[str, str], ...]:
        """The values of the event."""
        return (
            ("component", self.component.name),
            ("about", self.message.about),
            ("message", self.message.text),
            ("said", self.said),
        )


@functools.cache
def line_components() -> dict[str, tuple[SoftwareComponent, ...]]:
    """The components whose messages follow a cue in a line, by this cue."""
    return _by_cue(is_chatty=False)


@functools.cache
def chatty_components() -> dict[str, tuple[SoftwareComponent, ...]]:
    """Those whose cues are in most lines of a healthy log."""
    return _by_cue(is_chatty=True)


def _by_cue(*, is_chatty: bool) -> dict[str, tuple[SoftwareComponent, ...]]:
    found: dict[str, tuple[SoftwareComponent, ...]] = {}
    for component in components():
        for cue in _cues_of(component) if component.is_chatty == is_chatty else ():
            found[cue] = (*found.get(cue, ()), component)
    return found


def _cues_of(component: SoftwareComponent) -> Iterable[str]:
    if not component.is_bare:
        return component.cues
    return dict.fromkeys(
        one.longest_part[:LONGEST_CUE] for one in messages_of(component.file) if one.letters >= LEAST_LETTERS
    )


def message_in_line(line: str, cues: Iterable[str]) -> RecognizedMessage | None:
    """Return the message that follows one of these cues in a line."""
    chatty, others = chatty_components(), line_components()
    for cue in cues:
        _, found, rest = line.partition(cue)
        for component in others.get(cue) or chatty[cue] if found else ():
            text = line if component.is_bare else rest
            if message := _index(component.file).find(text[:LONGEST_SEARCHED]):
                return RecognizedMessage(component, message, text.strip()[:LONGEST_SAID])
    return None


def message_of_exception(text: str, file: str = "") -> RecognizedMessage | None:
    """Return the message of an exception. ``file``: that of its innermost frame."""
    for component in components():
        if component.may_raise_in(file) and (message := _index(component.file).find(text[:LONGEST_SEARCHED])):
            return RecognizedMessage(component, message, text.partition("\n")[0].strip()[:LONGEST_SAID])
    return None


class _MessageIndex:
    """The messages of one component by their longest literal parts."""

    def __init__(self, messages: Iterable[SoftwareMessage]) -> None:
        by_part: dict[str, list[SoftwareMessage]] = {}
        for message in messages:
            if message.letters >= LEAST_LETTERS:
                by_part.setdefault(message.longest_part, []).append(message)
        self._parts = CueMatcher(by_part, is_compact=True)
        self._messages = tuple(tuple((one.letters, one) for one in by_part[part]) for part in self._parts.texts)

    def find(self, text: str) -> SoftwareMessage | None:
        """Return the most specific message that the text contains."""
        text = " ".join(text.split())
        parts = dict.fromkeys(number for number, _, _ in self._parts.find(text.encode()))
        candidates = [one for number in parts for one in self._messages[number]]
        specific = sorted(candidates, key=lambda one: (-one[0], one[1].text))[:MOST_CANDIDATES]
        return next((message for _, message in specific if message.pattern.search(text) is not None), None)


@functools.cache
def _index(file: str) -> _MessageIndex:
    return _MessageIndex(messages_of(file))
