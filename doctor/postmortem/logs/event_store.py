"""The events of one log while it is read: the first of each kind that a process says with the same values, and how
often it is said again. Their number is bounded, whatever the log holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from doctor.core.facts import Event
from doctor.core.facts.log_events import LONGEST
from doctor.core.facts.telemetry import Frame
from doctor.postmortem.logs.prefixes import LineOrigin
from doctor.postmortem.logs.rank_attribution import LogProcesses
from doctor.postmortem.logs.tracebacks import LONGEST_MESSAGE, MOST_FRAMES, ParsedException

MOST_OF_A_KIND = 2048
"""Events of one kind that are kept."""
MOST_OF_A_PROCESS = 64
"""Events of one kind that are kept of one process."""
MOST = 12_000
"""Events that are kept in all, beside :data:`ALWAYS` of every kind."""
ALWAYS = 64
LONGEST_VALUE = 2000
"""Characters of a value that are kept."""
NEWEST = frozenset({"run.bar", "run.bar_named"})
"""Kinds of which the newest state is kept where there is no room for all: progress bars, by their ``words``."""

Values = tuple[tuple[str, str], ...]


class StoredEvent:
    """An event that grows: what the lines after it tell is added while it was said once."""

    __slots__ = ("at", "count", "frames", "kind", "last_at", "line", "speaker", "text", "values", "weak_rank")

    def __init__(self, kind: str, text: str, line: int, speaker: LineOrigin, at: float | None, values: Values) -> None:
        self.kind = kind
        self.text = text[:LONGEST]
        self.line = line
        self.speaker = speaker
        self.weak_rank: int | None = None
        self.at = at
        self.values = {name: value[:LONGEST_VALUE] for name, value in values}
        self.frames: list[Frame] = []
        self.count = 1
        self.last_at: float | None = None

    def again(self, at: float | None, times: int = 1) -> None:
        """It was said once more."""
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
        """The frames that were added are those of a thread that does not matter."""
        if self.count == 1:
            self.frames.clear()

    def add_later(self, type_: str, message: str) -> None:
        """Name the exception that this one led to."""
        if self.count == 1:
            self.values["then"] = type_
            self.values["then_message"] = message[:LONGEST_VALUE]

    def add_cause(self, cause: ParsedException, line: int) -> None:
        """This exception came from another one, which takes its place."""
        if self.count == 1:
            later = self.values.get("type", "")
            self.values = {"type": cause.type, "message": cause.message[:LONGEST_MESSAGE], "then": later}
            self.text = (f"{cause.type}: {cause.message}" if cause.message else cause.type)[:LONGEST]
            self.frames = list(cause.frames)
            self.line = line

    def event(self, file: str, processes: LogProcesses) -> Event:
        """The event as it is known when the log ends."""
        told = processes.of(self.speaker, self.weak_rank)
        return Event(
            self.kind,
            self.text,
            file,
            self.line,
            rank=told.rank,
            local_rank=told.local_rank,
            host=told.host,
            pid=told.pid,
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
        """The event; where the same process said the same before, or there is no room for more, that one."""
        kind, speaker = event.kind, event.speaker
        full = (kind, speaker, key)
        same = self._kept.get(full)
        if same is None and not self._has_room(kind, speaker):
            same = self._first_of.get((kind, speaker)) or self._first_of[kind, None]
        if same is not None:
            same.again(event.at)
            if kind in NEWEST and same.values.get("words") == event.values.get("words"):
                same.text, same.line, same.values = event.text, event.line, event.values
            return same
        self._kept[full] = event
        for owner in (speaker, None):
            self._first_of.setdefault((kind, owner), event)
            self._numbers[kind, owner] += 1
        return event

    def number_of(self, kind: str, speaker: LineOrigin) -> int:
        """How many events of a kind are kept of a process."""
        return self._numbers[kind, speaker]

    def like(self, kind: str, speaker: LineOrigin, values: Values) -> StoredEvent | None:
        """The first event of a kind that a process said, where it names the same; lines that were added to its message
        do not count."""
        first = self._first_of.get((kind, speaker))
        if first is None or any(first.values.get(name, "").partition("\n")[0] != value for name, value in values):
            return None
        return first

    def said_again(self, kind: str, speaker: LineOrigin | None, times: int) -> None:
        """A process said it that many times more; ``None``: any."""
        if first := self._first_of.get((kind, speaker)):
            first.again(None, times)

    def _has_room(self, kind: str, speaker: LineOrigin) -> bool:
        of_kind = self._numbers[kind, None]
        return self._numbers[kind, speaker] < MOST_OF_A_PROCESS and (
            of_kind < ALWAYS or (of_kind < MOST_OF_A_KIND and len(self._kept) < MOST)
        )

    def __iter__(self) -> Iterator[StoredEvent]:
        """All that is kept, by line."""
        return iter(sorted(self._kept.values(), key=lambda event: event.line))
