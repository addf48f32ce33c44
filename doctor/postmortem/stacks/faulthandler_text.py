"""Lines of :mod:`faulthandler`: ``dump_traceback``, ``register`` and ``dump_traceback_later``.

https://github.com/python/cpython/blob/main/Python/traceback.c. Threads come newest first, so that the main thread is
the last one; a thread that called faulthandler itself is the ``Current thread``. Since Python 3.14 a thread has its
name, and the stack of C code follows.
"""

from __future__ import annotations

import re

from doctor.core.facts.attached import StackSource
from doctor.core.stack_dumps.threads import dumped_frame
from doctor.postmortem.stacks.line_kinds import (
    FrameLine,
    LineKind,
    NativeLine,
    OtherLine,
    SampleLine,
    ThreadLine,
    ThreadState,
)

_THREAD = re.compile(
    r"(?P<current>Current thread|Thread) (?P<id>0x[0-9a-fA-F]+)(?: \[(?P<name>[^]]*)\])? \(most recent call first\):"
)
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d{1,10}|\?\?\?) in (?P<function>.+)$')
_OTHER = re.compile(r"  (?:<no Python frame>|<freed thread state>|<invalid frame>|\.{3,}|Garbage-collecting)$")
_C_STACK = re.compile(r"Current thread's C stack trace \(most recent call first\):$")
_C_FRAME = re.compile(r'  Binary file "(?P<file>.*)", at (?P<function>[^+\s]*)(?:\+0x[0-9a-f]+)? \[0x[0-9a-f]+\]$')
_TIMEOUT = re.compile(r"Timeout \((?P<hours>\d{1,6}):(?P<minutes>\d\d):(?P<seconds>\d\d(?:\.\d{1,6})?)\)!$")


class FaulthandlerReader(ThreadState):
    """Reads the lines of faulthandler."""

    source: StackSource = "faulthandler"

    def read(self, line: str) -> LineKind | None:
        """Return what the line says."""
        if found := _THREAD.match(line):
            self._in_thread = True
            is_current = found["current"] != "Thread"
            return ThreadLine(name=found["name"] or "", identity=found["id"].lower(), is_current=is_current)
        if found := _TIMEOUT.match(line):
            self._in_thread = False
            return SampleLine(int(found["hours"]) * 3600 + int(found["minutes"]) * 60 + float(found["seconds"]))
        if _C_STACK.match(line):
            return OtherLine()
        if not self._in_thread:
            return None
        if found := _FRAME.match(line):
            number = found["line"]
            return FrameLine(dumped_frame(found["file"], int(number) if number.isdigit() else 0, found["function"]))
        if found := _C_FRAME.match(line):
            return NativeLine(found["function"])
        return OtherLine() if _OTHER.match(line) else None
