"""The events of one log: the first of each kind, process and values, with a count.

The number of events is bounded for any log.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from doctor.core.facts import Event
from doctor.core.facts.log_events import LONGEST
from doctor.core.facts.telemetry import Frame
from doctor.postmortem.logs.prefixes import LineOrigin
from doctor.postmortem.logs.rank_attribution import LogProcesses

MOST_FRAMES = 60
"""Maximum number of frames of one traceback; the innermost are kept."""
LONGEST_MESSAGE = 2000
"""Maximum characters of an exception's message."""
MOST_OF_A_KIND = 2048
"""Maximum number of events of one kind."""
MOST_OF_A_PROCESS = 64
"""Maximum number of events of one kind of one process."""
MOST = 12_000
"""Maximum number of all events, beside :data:`ALWAYS` of every kind."""
ALWAYS = 64
LONGEST_VALUE = 2000
"""Maximum characters of a value."""
NEWEST = frozenset({"run.bar", "run.bar_named"})
"""Kinds whose newest state replaces the previous one: progress bars, by their ``words``."""

Values = tuple[tuple[str, str], ...]


class ParsedException(NamedTuple):
    """An exception: kind of event, type, first line of the message, frames (innermost first), and the source line of
    the innermost frame of the user's program."""

    kind: str
    type: str
    message: str
    frames: tuple[Frame, ...]
    code: str = ""


class StoredEvent:
    """An event that the lines after it may extend, unless it was repeated."""

    __slots__ = ("at", "count", "frames", "kind", "last_at", "line", "origin", "text", "values", "weak_rank")

    def __init__(self, kind: str, text: str, line: int, origin: LineOrigin, at: float | None, values: Values) -> None:
        self.kind = kind
        self.text = text[:LONGEST]
        self.line = line
        self.origin = origin
        self.weak_rank: int | None = None
        self.at = at
        self.values = {name: value[:LONGEST_VALUE] for name, value in values}
        self.frames: list[Frame] = []
        self.count = 1
        self.last_at: float | None = None

    def again(self, at: float | None, times: int = 1) -> None:
        """Count a repetition."""
        self.count += times
        self.last_at = self.last_at if at is None else at

    def add_message(self, text: str) -> None:
        """Add a line of an exception's message."""
        if self.count == 1:
            self.values["message"] = f"{self.values.get('message', '')}\n{text}"[:LONGEST_MESSAGE].lstrip("\n")

    def add_frame(self, frame: Frame) -> None:
        """Add the caller of the last frame."""
        if len(self.frames) < MOST_FRAMES and self.count == 1:
            self.frames.append(frame)

    def drop_frames(self) -> None:
        """Remove all frames: they are those of an unrelated thread."""
        if self.count == 1:
            self.frames.clear()

    def add_later(self, type_: str, message: str) -> None:
        """Name the exception that this one led to."""
        if self.count == 1:
            self.values["then"] = type_
            self.values["then_message"] = message[:LONGEST_VALUE]

    def add_cause(self, cause: ParsedException, line: int) -> None:
        """Replace this exception by its cause."""
        if self.count == 1:
            later = self.values.get("type", "")
            self.values = {"type": cause.type, "message": cause.message[:LONGEST_MESSAGE], "then": later}
            self.text = (f"{cause.type}: {cause.message}" if cause.message else cause.type)[:LONGEST]
            self.frames = list(cause.frames)
            self.line = line

    def event(self, file: str, processes: LogProcesses) -> Event:
        """Return the event, when the log was read completely."""
        return Event(
            self.kind,
            self.text,
            file,
            self.line,
            **processes.of(self.origin, self.weak_rank)._asdict(),
            at=self.at,
            values=tuple(self.values.items()),
            frames=tuple(self.frames),
            count=self.count,
            last_at=self.last_at,
        )


class EventStore:
    """The events of one log, in the order of their first lines."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, LineOrigin, Values], StoredEvent] = {}
        self._first_of: dict[tuple[str, LineOrigin | None], StoredEvent] = {}
        self._numbers: Counter[tuple[str, LineOrigin | None]] = Counter()

    def keep(self, event: StoredEvent, key: Values) -> StoredEvent:
        """Store an event; if it is repeated or there is no room, count and return the earlier one."""
        kind, origin = event.kind, event.origin
        full = (kind, origin, key)
        same = self._kept.get(full)
        if same is None:
            of_kind = self._numbers[kind, None]
            has_room = self._numbers[kind, origin] < MOST_OF_A_PROCESS and (
                of_kind < ALWAYS or (of_kind < MOST_OF_A_KIND and len(self._kept) < MOST)
            )
            same = None if has_room else self._first_of.get((kind, origin)) or self._first_of[kind, None]
        if same is not None:
            same.again(event.at)
            if kind in NEWEST and same.values.get("words") == event.values.get("words"):
                same.text, same.line, same.values = event.text, event.line, event.values
            return same
        self._kept[full] = event
        for owner in (origin, None):
            self._first_of.setdefault((kind, owner), event)
            self._numbers[kind, owner] += 1
        return event

    def number_of(self, kind: str, origin: LineOrigin) -> int:
        """Return the number of events of a kind and process."""
        return self._numbers[kind, origin]

    def like(self, kind: str, origin: LineOrigin, values: Values) -> StoredEvent | None:
        """Return the first event of a kind and process if it has the first lines of these values."""
        first = self._first_of.get((kind, origin))
        if first is None or any(first.values.get(name, "").partition("\n")[0] != value for name, value in values):
            return None
        return first

    def repeat(self, kind: str, origin: LineOrigin | None, times: int) -> None:
        """Count further repetitions by a process; ``None``: by any process."""
        if first := self._first_of.get((kind, origin)):
            first.again(None, times)

    def __iter__(self) -> Iterator[StoredEvent]:
        """Iterate over all events by line."""
        return iter(sorted(self._kept.values(), key=lambda event: event.line))
