"""Stacks of live threads and of exceptions, from the interpreter."""

from __future__ import annotations

import sys

from doctor.core.facts import Frame
from doctor.core.frames import frames_of_stack, frames_of_traceback, waits_in
from doctor.monitor.telemetry.stacks.rank_conditions import with_conditions


def thread_stack(thread: int) -> tuple[Frame, ...]:
    """Return the stack of a thread of this process, innermost first, at most 60 frames.

    Empty if there is no such thread. Not for the step path: user sources are read for rank conditions.
    """
    (stack,) = with_conditions([frames_of_stack(sys._current_frames().get(thread))])
    return stack


def is_waiting_in_collective(thread: int) -> bool:
    """Return whether the stack of a thread shows a call of torch.distributed that waits."""
    return bool(waits_in(frames_of_stack(sys._current_frames().get(thread))))


def frames_of_exception(error: BaseException) -> tuple[Frame, ...]:
    """Return the traceback of an exception, innermost first, at most 60 frames, if it was raised."""
    return frames_of_traceback(error.__traceback__)
