"""Common parts of all sections of facts.

A section is one frozen, hashable record of what a process (level ``rank``) or a host (level ``host``) knows about
one subject. Sections hold tuples, never lists or dicts, so that equal sections of thousands of ranks can be one
object. A value that could not be read is ``None`` and has an entry in ``hidden``; a section that could not be read at
all is replaced by a :class:`Missing`.

Facts hold no cycles, so the garbage collector does not track them (``gc=False``): traversing the facts of 16,384 ranks
took half of the time of all checks.
"""

from __future__ import annotations

from collections.abc import Hashable
from enum import Enum
from typing import Any, ClassVar, Literal, TypeVar

import msgspec

from doctor.core.decoding import prepared
from doctor.core.text import lazy_compile

Level = Literal["rank", "host"]
Origin = Literal["collected", "measured", "watched", "chosen"]


class HiddenField(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One value of a section that could not be observed: ``field`` of that section, why, and how to make it visible."""

    field: str
    reason: str
    unhide: str = ""


class MissingReason(str, Enum):
    """Why a whole section is missing.

    ``ABSENT``: the machine does not have it (no driver, no SLURM). ``HIDDEN``: it exists, but access is not permitted.
    ``FAILED``: the collector raised. ``TIMEOUT``: it timed out. ``UNMEASURED``: no measurement was requested.
    """

    ABSENT = "absent"
    HIDDEN = "hidden"
    FAILED = "failed"
    TIMEOUT = "timeout"
    UNMEASURED = "unmeasured"


class Missing(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Takes the place of a missing section."""

    lack: MissingReason
    reason: str
    unhide: str = ""

    @property
    def is_breakage(self) -> bool:
        """Whether the doctor itself failed, which makes a verdict inconclusive."""
        return self.lack in (MissingReason.FAILED, MissingReason.TIMEOUT)


S = TypeVar("S", bound="Section")


class Section(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """Base of all sections. ``key`` is the name in a capture."""

    key: ClassVar[str] = ""
    level: ClassVar[Level] = "rank"
    origin: ClassVar[Origin] = "collected"

    hidden: tuple[HiddenField, ...] = ()

    def part(self) -> Hashable:
        """The part of its host that a section shows, if processes see different parts; ``None`` if all see the same."""
        return None

    def joined(self: S, other: S) -> S:
        """Return the parts that this process and another one of its host see, as one section."""
        return self

    def why_hidden(self, field: str) -> HiddenField | None:
        """The note about ``field``, if it could not be observed."""
        return next((note for note in self.hidden if note.field == field), None)


class Variable(msgspec.Struct, frozen=True, gc=False):
    """An environment variable as the process sees it; secrets are already masked."""

    name: str
    value: str


R = TypeVar("R", bound=msgspec.Struct)
_SURROGATE = lazy_compile("[\ud800-\udfff]")


def harmless(name: str) -> str:
    """Return the name of a host or a device, which may become part of a command that users paste, without characters
    that have a meaning to a shell or a terminal."""
    return _ACTED_ON.sub("_", name)


_ACTED_ON = lazy_compile(r"[\x00-\x20\x7f-\xa0;&|$`\"'<>()*?!#\\]")


def in_unicode(record: R) -> R:
    """Return the record itself, or a copy with U+FFFD for the bytes in names of files and hosts that are not valid
    UTF-8, which JSON can't encode. ``TypeError`` if a value has no JSON form."""
    try:
        msgspec.json.encode(record)
    except UnicodeEncodeError:
        return msgspec.convert(_in_unicode(msgspec.to_builtins(record)), prepared(type(record)))
    return record


def _in_unicode(value: Any) -> Any:
    if isinstance(value, str):
        return _SURROGATE.sub("\ufffd", value)
    if isinstance(value, dict):
        return {_in_unicode(key): _in_unicode(inner) for key, inner in value.items()}
    return [_in_unicode(item) for item in value] if isinstance(value, (list, tuple)) else value
