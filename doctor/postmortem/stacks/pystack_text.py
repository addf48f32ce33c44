"""Lines of ``pystack remote`` and ``pystack core``, also with ``--native`` and ``--locals``.

https://github.com/bloomberg/pystack/blob/main/src/pystack/traceback_formatter.py. Frames come outermost first, each
with the line of its source, if the source was found. The output names no process: the number of a main thread is that
of its process.
"""

from __future__ import annotations

import re

from doctor.core.facts.attached import StackSource
from doctor.core.stack_dumps.threads import dumped_frame
from doctor.postmortem.stacks.line_kinds import (
    AsideLine,
    FrameLine,
    LineKind,
    LocalLine,
    NativeLine,
    OtherLine,
    RefusalLine,
    ThreadLine,
    ThreadState,
)

_THREAD = re.compile(
    r"Traceback for thread (?P<id>\d{1,10})(?: \((?P<name>.*)\))? \[(?P<state>[^]]*)\] \(most recent call last\):$"
)
_FRAME = re.compile(
    r'    \((?P<kind>Python|C)\) File "(?P<file>.*)", line (?P<line>-?\d{1,10}), in (?P<function>.+?)'
    r"(?: \((?P<library>[^()]*)\))?$"
)
_LOCAL = re.compile(r" {12}(?P<name>[^\W\d]\w*): (?P<value>.*)$")
_INLINED = " (inlined)"
_CORE = re.compile(
    r"(?:Using executable found|Core file information:|The process died|state: .* zombie:|pid: \d+ ppid)"
)
_REFUSED = re.compile(r"(?:💀 (?P<reason>.*?) 💀|Use -h or --help)")
_FAILED = re.compile(r"The frame stack for thread \d+ is empty|\* Unable to merge native stack")


class PystackReader(ThreadState):
    """Reads the lines of pystack."""

    source: StackSource = "pystack"

    def read(self, line: str) -> LineKind | None:
        """Return what the line says."""
        if found := _THREAD.match(line):
            self._in_thread = True
            return ThreadLine(
                name=found["name"] or "",
                native_id=int(found["id"]),
                holds_gil="Has the GIL" in found["state"],
                outermost_first=True,
            )
        if found := _REFUSED.match(line):
            return RefusalLine(found["reason"]) if found["reason"] else OtherLine()
        if _CORE.match(line):
            return AsideLine()
        if not self._in_thread:
            return None
        if found := _FRAME.match(line):
            return self._frame(found)
        if found := _LOCAL.match(line):
            return LocalLine(found["name"], found["value"])
        return OtherLine() if line.startswith("        ") or _FAILED.search(line) else None

    def _frame(self, found: re.Match[str]) -> LineKind:
        if found["kind"] == "C":
            return NativeLine(found["function"].removesuffix(_INLINED))
        function = found["function"] + (f" ({found['library']})" if found["library"] else "")
        return FrameLine(dumped_frame(found["file"], max(int(found["line"]), 0), function))
