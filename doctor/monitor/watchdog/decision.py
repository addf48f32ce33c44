"""The words between the sentinel and those who use it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Literal, Protocol

import msgspec
from msgspec import Meta

from doctor.core.facts import Missing, Section
from doctor.core.job import Job
from doctor.core.message_bounds import Ranks, Text
from doctor.monitor.telemetry.progress import Stall

Sections = dict[str, "Section | Missing"]

Trigger = Literal["before", "round", "stall", "failure", "end"]
"""When a job is judged: before the first batch, now and then, when it stands still, after an exception, at the end."""

CheckId = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9_.-]{1,64}\Z")]
MOST_IDS = 1024

OnHang = Literal["report", "abort"]


class RankSource(Protocol):
    """One rank as the sentinel sees it. Everything but :meth:`opening` is called from the sentinel's thread."""

    def stall(self) -> Stall | None:
        """Whether progress has stopped."""

    def opening(self) -> Sections:
        """Everything that is known before the first batch, the facts of the host included. May take seconds; called
        in a thread of its own."""

    def card(self) -> Sections:
        """What changes while the run goes on."""

    def position(self) -> Sections:
        """Where the rank stands: the card, and stack and last collectives."""

    def dumps(self) -> Mapping[str, bytes]:
        """What the flight recorder held at the last position, whole, for files; by recorder."""


class Decision(msgspec.Struct, frozen=True):
    """What the one who judged found. ``words``: the verdict on one line; ``ids`` of its findings; ``ranks`` blamed."""

    sick: bool = False
    words: Text = ""
    ids: Annotated[tuple[CheckId, ...], Meta(max_length=MOST_IDS)] = ()
    ranks: Ranks = ()


EvaluateJob = Callable[[Job, Trigger], Decision]
OnRecovery = Callable[[Decision, float], None]
"""Told of a stall that was judged sick and is over: the ruling, and the seconds that it lasted."""
WriteLine = Callable[[str], None]
