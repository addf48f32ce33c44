"""Training steps per second of a running job, where local variables or the doctor's record show them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from statistics import median
from typing import Literal, NamedTuple

from doctor.core.facts import AttachedProcess, ProcessSample
from doctor.core.stack_dumps.threads import STEP_NAMES

_COUNT = re.compile(r"\d{1,15}", re.ASCII)
_Place = tuple[int, int, str, str]
"""Rank of a variable's name, position of its frame from the outermost one, file and function."""


class StepRate(NamedTuple):
    """Training steps per second. ``source``: local variables of the stacks, or the record of the doctor's callback."""

    per_second: float
    source: Literal["locals", "callback"]


def step_rate(processes: Iterable[AttachedProcess]) -> StepRate | None:
    """The median over the ranks that show it; ``None`` if none does."""
    found = list(processes)
    if counted := [rate for one in found if (rate := counted_steps(one)) is not None]:
        return StepRate(round(median(counted), 3), "locals")
    recorded = [one.step_rate for one in found if one.step_rate is not None]
    return StepRate(round(median(recorded), 3), "callback") if recorded else None


def counted_steps(process: AttachedProcess) -> float | None:
    """Steps per second by the most telling variable that grows over all samples; ``None`` if none does."""
    counts = [_counts_in(sample) for sample in process.samples]
    if len(counts) < 2:
        return None
    seconds = process.samples[-1].at - process.samples[0].at
    for place in sorted(set(counts[0]).intersection(*counts)):
        values = [count[place] for count in counts]
        if values == sorted(values) and values[-1] > values[0] and seconds > 0:
            return (values[-1] - values[0]) / seconds
    return None


def _counts_in(sample: ProcessSample) -> Mapping[_Place, int]:
    main = next((thread for thread in sample.threads if thread.is_main), None)
    if main is None:
        return {}
    outermost = len(main.frames) - 1
    return {
        (
            STEP_NAMES.index(one.name),
            outermost - one.frame,
            main.frames[one.frame].file,
            main.frames[one.frame].function,
        ): int(one.value)
        for one in main.locals
        if one.name in STEP_NAMES and _COUNT.fullmatch(one.value) and one.frame <= outermost
    }
