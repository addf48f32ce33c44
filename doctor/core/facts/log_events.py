"""What logs contain about a job: the third source of facts, in addition to the host and the run.

The rank of a log line is often unknown, so these facts belong to the job: events, each with its origin and time as far
as they are known.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from doctor.core.facts.telemetry import Frame


class Event(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A known message (:mod:`doctor.knowledge.log_patterns`), at its first occurrence in one process.

    ``kind``: of the message (``nccl.bootstrap.noif``). ``text``: the line without prefixes, colors and progress bars,
    at most :data:`LONGEST` characters. ``file`` and ``line`` (from 1): its location. ``rank``, ``host``, ``pid``: the
    process that logged it, as far as the line, the file name or neighboring lines show; ``local_rank`` if only that is
    known. ``at``: seconds since the epoch, ``None`` without a timestamp; a timestamp without a time zone is read as
    UTC. ``values``: the named groups of the pattern. ``frames``: of a traceback that ends here, innermost first.
    ``count``: number of occurrences in the same process; ``last_at``: time of the last one.
    """

    kind: str
    text: str
    file: str
    line: int
    rank: int | None = None
    local_rank: int | None = None
    host: str | None = None
    pid: int | None = None
    at: float | None = None
    values: tuple[tuple[str, str], ...] = ()
    frames: tuple[Frame, ...] = ()
    count: int = 1
    last_at: float | None = None

    def value(self, name: str) -> str | None:
        """The value called ``name`` in the message."""
        return next((value for key, value in self.values if key == name), None)

    def with_text(self, text: str) -> Event:
        """The same message with another text."""
        return msgspec.structs.replace(self, text=text)

    @property
    def named(self) -> Mapping[str, str]:
        """All values in the message."""
        return dict(self.values)


LONGEST = 600
"""Maximum number of characters of a line."""


class LogFile(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A log that was read: its lines, bytes (uncompressed), first and last timestamp, and the ranks that logged to it.
    ``cut``: why it was not read to its end. ``recognized``: number of lines of a known kind. ``hosts``: the hosts, pods
    or containers that its lines name as their origin."""

    path: str
    lines: int = 0
    bytes: int = 0
    first_at: float | None = None
    last_at: float | None = None
    ranks: tuple[int, ...] = ()
    cut: str | None = None
    recognized: int = 0
    hosts: tuple[str, ...] = ()


class ClockShift(msgspec.Struct, frozen=True, gc=False):
    """The clock of ``host`` is ahead by ``seconds`` (negative: behind)."""

    host: str
    seconds: float


class LogEvidence(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """All facts from the logs of a job. ``events`` in the order in which they happened, as far as it is known.
    ``shifts``: the offsets of host clocks from the majority, as far as events that several hosts log at the same
    moment show them; times of events are adjusted to the majority. ``hosts``: all hosts that the logs name. ``marks``:
    the last step of each process, signs of an orderly end, and lines that look like errors
    (:mod:`doctor.postmortem.logs.outcome_marks.marks`). ``quoted``: files and lines that findings quote, as checks of
    last resort get them; empty for all others."""

    events: tuple[Event, ...] = ()
    files: tuple[LogFile, ...] = ()
    shifts: tuple[ClockShift, ...] = ()
    hosts: tuple[str, ...] = ()
    marks: tuple[Event, ...] = ()
    quoted: tuple[tuple[str, int], ...] = ()

    def of(self, *kinds: str) -> tuple[Event, ...]:
        """The events of these kinds; a kind that ends in a dot stands for all that begin with it."""
        exact = {kind for kind in kinds if not kind.endswith(".")}
        stems = tuple(kind for kind in kinds if kind.endswith("."))
        return tuple(one for one in self.events if one.kind in exact or (stems and one.kind.startswith(stems)))

    def position(self, file: str, line: int | None) -> int | None:
        """The position of an event among all events, by its file and line."""
        places = ((one.file, one.line) for one in self.events)
        return next((position for position, place in enumerate(places) if place == (file, line)), None)
