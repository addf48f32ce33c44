"""Messages from a watched process to the child that exports them, one JSON document a line."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec


class TelemetrySample(msgspec.Struct, frozen=True):
    """The value of a metric."""

    name: str
    meaning: str
    value: float
    attributes: Mapping[str, str]


class TelemetryEvent(msgspec.Struct, frozen=True):
    """A new finding. ``at``: nanoseconds since the epoch; ``severity``: ``error``, ``warning`` or ``info``."""

    at: int
    severity: str
    body: str
    attributes: Mapping[str, str]


class TelemetryMessage(msgspec.Struct, frozen=True):
    """All current samples and the events since the last message. ``run``: the id of the run."""

    run: str
    samples: tuple[TelemetrySample, ...] = ()
    events: tuple[TelemetryEvent, ...] = ()
