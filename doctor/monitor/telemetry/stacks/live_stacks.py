"""Where a thread is, by the interpreter; and where an exception came from."""

from __future__ import annotations

import sys

from doctor.core.facts import Frame
from doctor.core.frames import frames_of_stack, frames_of_traceback, waits_in
from doctor.monitor.telemetry.stacks.rank_conditions import with_conditions


def thread_stack(thread: int) -> tuple[Frame, ...]:
    """The stack of a thread of this process, by its identity: innermost first, at most 60 frames; empty where there is
    no such thread. Off the step path: the user's sources are read for the conditions that lead there."""
    (stack,) = with_conditions([frames_of_stack(sys._current_frames().get(thread))])
    return stack


def is_waiting_in_collective(thread: int) -> bool:
    """Whether a thread of this process waits in a call of torch.distributed, by its stack."""
    return bool(waits_in(frames_of_stack(sys._current_frames().get(thread))))


def frames_of_exception(error: BaseException) -> tuple[Frame, ...]:
    """The way to where an exception was raised, innermost first, at most 60 frames; empty if it never was raised."""
    return frames_of_traceback(error.__traceback__)
