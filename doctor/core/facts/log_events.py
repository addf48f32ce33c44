"""What logs say of a job: the third source of facts, beside what a host shows and what a run shows.

Facts of a log seldom belong to one rank for sure, so they are the job's: events, each with what is known of who said
it and when.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from doctor.core.facts.telemetry import Frame


class Event(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One message that is known (:mod:`doctor.knowledge.log_patterns`), as one process said it first.

    ``kind``: of the message (``nccl.bootstrap.noif``). ``text``: the line without prefixes, colours and progress
    bars, at most :data:`LONGEST` characters. ``file`` and ``line`` (from 1): where it stands. ``rank``, ``host``,
    ``pid``: who said it, as far as the line, the file's name or its neighbours tell; ``local_rank`` where only that is
    told. ``at``: seconds since the epoch, ``None`` without a time stamp; one without a zone is read as UTC. ``values``:
    what the message names, by field. ``frames``: of a traceback that ends here, innermost first. ``count``: how often
    the same process said it, and ``last_at`` when last.
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
        """What the message names as ``name``."""
        return next((value for key, value in self.values if key == name), None)

    @property
    def named(self) -> Mapping[str, str]:
        """All that the message names."""
        return dict(self.values)


LONGEST = 600
"""Characters of a line that are kept."""


class LogFile(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A log that was read: its lines, bytes (unpacked), times of the first and the last stamp, ranks that speak in it.
    ``cut``: why it was not read to its end. ``recognized``: how many lines are of a known kind."""

    path: str
    lines: int = 0
    bytes: int = 0
    first_at: float | None = None
    last_at: float | None = None
    ranks: tuple[int, ...] = ()
    cut: str | None = None
    recognized: int = 0


class ClockShift(msgspec.Struct, frozen=True, gc=False):
    """The clock of ``host`` is ahead by ``seconds`` (negative: behind)."""

    host: str
    seconds: float


class LogEvidence(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """All that logs say of a job. ``events`` in the order in which they happened, as far as that can be told.
    ``shifts``: seconds that the clock of a host is ahead of that of most, where moments that hosts share tell; times of
    events are by the clock of most. ``hosts``: all that the logs name. ``marks``: the last step of each process, signs
    of an orderly end, and lines that look like errors (:mod:`doctor.postmortem.logs.outcome_marks.marks`)."""

    events: tuple[Event, ...] = ()
    files: tuple[LogFile, ...] = ()
    shifts: tuple[ClockShift, ...] = ()
    hosts: tuple[str, ...] = ()
    marks: tuple[Event, ...] = ()

    def of(self, *kinds: str) -> tuple[Event, ...]:
        """The events of these kinds; a kind that ends in a dot stands for all that begin with it."""
        exact = {kind for kind in kinds if not kind.endswith(".")}
        stems = tuple(kind for kind in kinds if kind.endswith("."))
        return tuple(one for one in self.events if one.kind in exact or (stems and one.kind.startswith(stems)))

    def position(self, file: str, line: int | None) -> int | None:
        """Where an event stands among all, by its file and line."""
        places = ((one.file, one.line) for one in self.events)
        return next((position for position, place in enumerate(places) if place == (file, line)), None)
