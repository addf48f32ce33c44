"""Types exchanged between the watchdog and its users."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Literal, Protocol

import msgspec
from msgspec import Meta

from doctor.core.job import Job
from doctor.core.message_bounds import Ranks, Text
from doctor.monitor.telemetry.progress import Stall
from doctor.monitor.telemetry.rank_telemetry import Sections

Trigger = Literal["before", "round", "stall", "failure", "end"]
"""When a job is evaluated: before the first batch, periodically, on a stall, after an exception, at the end."""

CheckId = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9_.-]{1,64}\Z")]
MOST_IDS = 1024


class RankSource(Protocol):
    """The facts of one rank, as the watchdog requests them from its own thread."""

    def stall(self) -> Stall | None:
        """Return the current stall, if progress has stopped."""

    def startup_facts(self) -> Sections:
        """Return all facts before the first batch; may take seconds, in a thread of its own."""

    def current_facts(self) -> Sections:
        """Return what changes during the run."""

    def look_facts(self) -> Sections:
        """Return those of them that a look between two rounds compares, and what explains these."""

    def position(self) -> Sections:
        """Return the facts with stack and newest collectives."""

    def dumps(self) -> Mapping[str, bytes]:
        """Return the flight recorder dumps taken with the last position, by recorder."""


class Decision(msgspec.Struct, frozen=True):
    """The outcome of one evaluation. ``words``: on one line; ``ranks``: at fault."""

    has_errors: bool = False
    words: Text = ""
    ids: Annotated[tuple[CheckId, ...], Meta(max_length=MOST_IDS)] = ()
    ranks: Ranks = ()


EvaluateJob = Callable[[Job, Trigger], Decision]
OnRecovery = Callable[[Decision, float], None]
"""Called when a confirmed stall is over, with its decision and its duration in seconds."""
WriteLine = Callable[[str], None]
