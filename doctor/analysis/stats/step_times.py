"""Step times, over a period that is long enough to be significant."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from statistics import median

from doctor.core.facts import StepFacts, Window
from doctor.core.job import Rank

PHASES = {
    "data": "waiting for data",
    "forward": "in the forward pass",
    "backward": "in the backward pass",
    "optimizer": "in the optimizer",
    "other": "in hooks and logging on the host",
}
"""Parts of a step, as text after "spends 190 ms"."""


def recent_windows(steps: StepFacts, least: int, seconds: float) -> tuple[Window, ...]:
    """The newest windows that cover ``seconds`` and are ``least`` or more; else empty."""
    lasted = 0.0
    for taken, window in enumerate(reversed(steps.windows), 1):
        lasted += window.total * window.steps
        if taken >= least and lasted >= seconds:
            return steps.windows[-taken:]
    return ()


def parts_of(window: Window) -> dict[str, float]:
    """Seconds per batch by part of the step; collectives count for the part that calls them."""
    return {
        "data": window.data,
        "forward": window.forward or 0.0,
        "backward": window.backward or 0.0,
        "optimizer": window.optimizer or 0.0,
        "other": window.other or 0.0,
    }


def typical_parts(windows: Collection[Window]) -> dict[str, float]:
    """Medians of the parts over ``windows``."""
    parts = [parts_of(window) for window in windows]
    return {name: median(own[name] for own in parts) for name in PHASES}


def typical_total(windows: Collection[Window]) -> float:
    """The median time of whole steps, in seconds per batch."""
    return median(window.total for window in windows)


def common_windows(
    ranks: Iterable[Rank], least: int, seconds: float
) -> tuple[tuple[int, ...], Mapping[int, Mapping[int, Window]]]:
    """The first steps of the newest windows that all of ``ranks`` have, oldest first, and the windows of each rank.

    As many as cover ``seconds`` on the first rank; none if they do not."""
    stepping = {rank.number: steps.windows for rank in ranks if (steps := rank.find(StepFacts)) and steps.windows}
    own = {number: {window.first_step: window for window in windows} for number, windows in stepping.items()}
    shared = sorted(set.intersection(*(set(windows) for windows in own.values()))) if own else []
    first = next(iter(own.values()), {})
    recent = recent_windows(StepFacts(windows=tuple(first[step] for step in shared)), least, seconds)
    return tuple(window.first_step for window in recent), own


def milliseconds(seconds: float) -> str:
    """A time within a step as text: ``0.4 ms``, ``120 ms``, ``2.5 s``."""
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{seconds * 1000:.1f} ms" if seconds < 0.00995 else f"{seconds * 1000:.0f} ms"


def time_range(low: float, high: float) -> str:
    """Both ends of an interval in brackets, `` (40 min to 55 min)``; empty if they are equal."""
    ends = long_time(low), long_time(high)
    return f" ({ends[0]} to {ends[1]})" if ends[0] != ends[1] else ""


def long_time(seconds: float) -> str:
    """A predicted time as text, rounded to its accuracy: ``40 s``, ``25 min``, ``3 h 20 min`` or ``4 days``."""
    minutes = round(seconds / 60)
    if minutes < 2:
        return f"{seconds:.0f} s"
    if minutes < 100:
        return f"{minutes} min"
    if minutes < 48 * 60:
        hours, rest = divmod(round(minutes / 10) * 10, 60)
        return f"{hours} h {rest} min" if rest else f"{hours} h"
    return f"{minutes / 1440:.0f} days"
