"""Stacks of live threads, from the interpreter."""

from __future__ import annotations

import linecache
import re
import sys
import threading
from collections.abc import Iterable
from types import FrameType

import msgspec

from doctor.core.facts import Frame, LeftLoop
from doctor.core.frames import frame_of, frames_of_stack, is_user_code, line_of, new_group_in, root_in, waits_now
from doctor.monitor.telemetry.stacks.loop_exits import variables_of
from doctor.monitor.telemetry.stacks.rank_conditions import with_conditions

_WORK = ("torch.distributed.distributed_c10d", "Work")
"""Module and name of the class of a handle."""
_TRANSFERS = {12: "send", 13: "recv", 14: "recv"}
"""Transfers by their number in ``OpType`` (torch/csrc/distributed/c10d/Work.hpp)."""


def thread_stack(thread: int) -> tuple[Frame, ...]:
    """Return the stack of a thread of this process, innermost first, at most 60 frames.

    Empty if there is no such thread. Not for the step path: user sources are read for rank conditions.
    """
    (stack,) = with_conditions([frames_of_stack(sys._current_frames().get(thread))])
    return stack


def user_frame_above(frame: FrameType | None) -> Frame | None:
    """Return the innermost line of the user's own code in the stack that ends in ``frame``."""
    while frame is not None:
        found = frame_of(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        if found.user:
            return found
        frame = frame.f_back
    return None


def with_statements(left: Iterable[LeftLoop]) -> tuple[LeftLoop, ...]:
    """Add the statement of each line that left a loop, and the condition on the rank that it is under.

    Not for the step path: user sources are read.
    """
    loops = tuple(left)
    known = with_conditions([(one.frame,) if one.frame else () for one in loops])
    return tuple(
        msgspec.structs.replace(one, frame=frames[0], statement=_statement(frames[0])) if frames else one
        for one, frames in zip(loops, known, strict=True)
    )


def _statement(frame: Frame) -> str:
    found = re.match(r"[^#]*?\b(break|return|raise)\b", linecache.getline(frame.file, frame.line))
    return found[1] if found else ""


def named_root(thread: int) -> int | None:
    """Return the source or destination of the call of torch.distributed that a thread is in, within its group."""
    return root_in(sys._current_frames().get(thread))


def made_group(thread: int) -> str:
    """Return number and ranks of the group that a thread makes with others, such as ``4 of ranks 0, 1, 2``."""
    return new_group_in(sys._current_frames().get(thread))


def awaited_transfer(thread: int) -> str:
    """Return ``send`` or ``recv`` if a thread waits for the handle of one, in C++ code that its stack does not show.

    Of a collective, the flight recorder shows it; over Gloo, it has no entries of sends and receives.
    """
    frame = sys._current_frames().get(thread)
    if frame is None:
        return ""
    line = linecache.getline(frame.f_code.co_filename, line_of(frame))
    if made := re.search(r"\bi(send|recv)\([^#]*\)\.wait\(", line):
        return made[1]
    named = re.search(r"\b([A-Za-z_]\w*)\.wait\(", line)
    with variables_of(frame) as variables:
        work = variables.get(named[1]) if named else None
        kind = type(work)
        if (kind.__module__, kind.__name__) != _WORK:
            return ""
        return _TRANSFERS.get(int(work._get_op_type()), "")  # type: ignore[union-attr]


def has_other_work(thread: int) -> bool:
    """Return whether another thread of this process is in the user's code, and not only in a wait for a third one: it
    may make the call that the others wait for."""
    for ident, frame in sys._current_frames().items():
        inner: FrameType | None = frame
        if ident == thread or frame.f_code.co_filename == threading.__file__:
            continue
        while inner is not None:
            if is_user_code(inner.f_code.co_filename):
                return True
            inner = inner.f_back
    return False


def is_waiting_in_collective(thread: int) -> bool:
    """Return whether the stack of a thread shows a call of torch.distributed that waits."""
    return waits_now(sys._current_frames().get(thread))
