"""Stacks of live threads, from the interpreter."""

from __future__ import annotations

import sys

from doctor.core.facts import Frame
from doctor.core.frames import frames_of_stack, waits_in
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
