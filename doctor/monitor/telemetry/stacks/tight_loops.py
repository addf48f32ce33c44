"""For how long a thread has been in a loop of the user's code that shows no sign of an end.

Either it computes in a few lines of one function: a search that never converges, or a wait that asks again and again
without a pause. An evaluation, the generation of texts or a metric calls modules of torch, other libraries or functions
of the user, which its stack shows sooner or later. Or its source shows a loop of :mod:`.endless_loops`, while no other
thread of the process computes; or it walks through a folder that contains itself (:mod:`.folder_walks`); or it is in a
search of :mod:`.searches`, which may be in a library, too.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable
from types import FrameType
from typing import TYPE_CHECKING

from doctor.core.clock import monotonic, process_time
from doctor.core.facts.telemetry import REPEATS, SEARCH
from doctor.core.frames import is_user_code, line_of
from doctor.core.text import lazy_compile
from doctor.monitor.telemetry.stacks.stillness import nanoseconds_busy, nanoseconds_run

if TYPE_CHECKING:
    from doctor.monitor.telemetry.stacks.searches import SearchClock

MOST_LINES, MOST_FRAMES = 4, 60
BUSY = 0.8
"""Least share of the time for which the thread runs, or could run if a processor were free."""
OTHERS, OTHERS_SECONDS = 0.2, 0.3
"""CPU time of the other threads of the process, as a share of the time and beside that, up to which they are idle."""
_SAVES = "/torch/serialization.py"
_INNER = lazy_compile(
    r"/lib(?:64)?/python\d+\.\d+/(?!site-packages|dist-packages)|/torch/(?:_tensor|functional)\.py$"
    r"|^<frozen (?!importlib|zipimport|runpy)"
)
"""Files that may be called from these lines: Python's own library, of which some modules (``os``, ``posixpath``) are
frozen into the interpreter, and Python code of operators of torch."""


class TightLoop:
    """The loop that one thread of this process is in, from one look to the next."""

    def __init__(self, thread: int, native_id: int) -> None:
        self._thread = thread
        self._native_id = native_id
        self._key: Hashable = None
        self._since, self._busy = 0.0, 0
        self._lines: set[int] = set()
        self._positions: set[Hashable] = set()
        self._endless: Hashable = None
        self._endless_since, self._others = 0.0, 0.0
        self._folders: Hashable = None
        self._folders_since = 0.0
        self._repeats = ""
        self._answers: set[int] = set()
        self._search: SearchClock | None = None

    def look(self, *, computes: bool = True) -> float:
        """Return the seconds for which the thread has been in a loop; takes some microseconds, once its source is read.

        Not ``computes``: only in one that may sleep.
        """
        seconds = max(self._look_at_source(computes=computes), self._look_at_folders())
        return max(seconds, self._look_at_stack(), self._look_at_search()) if computes else seconds

    def words(self) -> str:
        """Return what shows that the loop repeats itself, or what is searched; empty without one."""
        if len(self._answers) > 1:
            return f"{REPEATS}{self._repeats}"
        return f"{SEARCH}{self._search.words}" if self._search is not None and self._search.words else ""

    def _look_at_search(self) -> float:
        from doctor.monitor.telemetry.stacks.searches import SearchClock  # no healthy step needs it

        if self._search is None:
            self._search = SearchClock(self._thread, self._native_id)
        return self._search.look()

    def _look_at_folders(self) -> float:
        """Return the seconds for which the thread has walked through a folder that contains itself."""
        from doctor.monitor.telemetry.stacks.folder_walks import folder_loop  # no healthy step needs it

        now, loop = monotonic(), folder_loop(sys._current_frames().get(self._thread))
        if loop is None or loop.folder != self._folders:
            self._folders, self._folders_since = None if loop is None else loop.folder, now
        return now - self._folders_since

    def _look_at_source(self, *, computes: bool) -> float:
        from doctor.monitor.telemetry.stacks.endless_loops import endless_loop  # no healthy step needs it

        now, loop = monotonic(), endless_loop(sys._current_frames().get(self._thread))
        ran = nanoseconds_run(self._native_id)
        if loop is None or ran is None or not (loop.pauses or computes):
            self._endless, self._answers = None, set()
            return 0.0
        others = process_time() - ran / 1e9
        work = others - self._others > OTHERS * (now - self._endless_since) + OTHERS_SECONDS
        if loop.key != self._endless or work or _saves_elsewhere(self._thread):
            self._endless, self._endless_since, self._others = loop.key, now, others
            self._repeats, self._answers = loop.repeats, set()
        if loop.answer is not None:
            self._answers.add(loop.answer)
        return now - self._endless_since

    def _look_at_stack(self) -> float:
        now, busy = monotonic(), nanoseconds_busy(self._native_id)
        place = _place(sys._current_frames().get(self._thread))
        if place is None or busy is None:
            self._key = None
            return 0.0
        key, line, position = place
        is_idle = busy - self._busy < BUSY * (now - self._since - 1.0) * 1e9
        if key != self._key or is_idle or len(self._lines) > MOST_LINES:
            self._key, self._since, self._busy = key, now, busy
            self._lines, self._positions = set(), set()
        self._lines.add(line)
        self._positions.add(position)
        return now - self._since if len(self._positions) > 1 else 0.0  # one call may just take long


def _saves_elsewhere(thread: int) -> bool:
    """Return whether another thread saves, perhaps to a slow disk."""
    for ident, frame in sys._current_frames().items():
        inner: FrameType | None = frame
        while ident != thread and inner is not None:
            if inner.f_code.co_filename.endswith(_SAVES):
                return True
            inner = inner.f_back
    return False


def _place(frame: FrameType | None) -> tuple[Hashable, int, Hashable] | None:
    """Return which call the innermost one of the user's code is, its line, and the instructions that it is in.

    ``None`` below other libraries.
    """
    inner: list[tuple[int, int]] = []
    while frame is not None and not is_user_code(frame.f_code.co_filename):
        if not _INNER.search(frame.f_code.co_filename):
            return None
        inner.append((id(frame.f_code), frame.f_lasti))
        frame = frame.f_back
    if frame is None:
        return None
    outer: list[tuple[int, int]] = []
    caller = frame.f_back
    while caller is not None and len(outer) < MOST_FRAMES:
        outer.append((id(caller.f_code), caller.f_lasti))
        caller = caller.f_back
    return (id(frame), id(frame.f_code), tuple(outer)), line_of(frame), (frame.f_lasti, tuple(inner))
