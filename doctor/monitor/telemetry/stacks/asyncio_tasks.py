"""Tasks of an event loop of :mod:`asyncio` that a thread runs: what they await does not stand on its stack."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

from doctor.monitor.telemetry.stacks.loop_exits import variables_of

_FILE, _FUNCTION, _NEAR = "/asyncio/base_events.py", "_run_once", 60
"""The function in which a loop waits for events and calls what they are for, and the innermost frames to look at."""
_MOST_TASKS, _DEEPEST = 64, 30
"""Tasks, and coroutines that await one another, that are looked at."""


def event_loop_in(frame: FrameType | None) -> object | None:
    """Return the event loop that the stack ending in ``frame`` runs; ``None`` if it runs none."""
    for _ in range(_NEAR):
        if frame is None:
            return None
        if frame.f_code.co_name == _FUNCTION and frame.f_code.co_filename.endswith(_FILE):
            with variables_of(frame) as variables:
                return variables.get("self")
        frame = frame.f_back
    return None


def unfinished_tasks(loop: object) -> Sequence[Any]:
    """Return the tasks of a loop; none if there are too many, or if they change meanwhile."""
    all_tasks = getattr(sys.modules.get("asyncio"), "all_tasks", None)
    if all_tasks is None:
        return ()
    try:
        found = tuple(all_tasks(loop))
    except RuntimeError:
        return ()
    return found if len(found) <= _MOST_TASKS else ()


def coroutine_frames(task: Any) -> list[FrameType]:
    """Return the frames of the coroutines of a task, the innermost first."""
    return list(_from_outside(task.get_coro()))[::-1]


def waits_for_tasks(task: Any, tasks: Sequence[Any]) -> bool:
    """Return whether a task awaits only tasks that are given, by itself or by ``gather``."""
    awaited = getattr(task, "_fut_waiter", None)
    children = getattr(awaited, "_children", None)
    among = [awaited] if children is None else [one for one in children if not one.done()]
    return bool(among) and all(any(one is other for other in tasks) for one in among)


def _from_outside(coroutine: Any) -> Iterator[FrameType]:
    for _ in range(_DEEPEST):
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "gi_frame", None)
        if frame is None:
            return
        yield frame
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "gi_yieldfrom", None)
