"""Lines of gdb: ``thread apply all bt``, ``bt``, and ``py-bt`` of CPython's extension.

https://sourceware.org/gdb/current/onlinedocs/gdb.html/Backtrace.html,
https://github.com/python/cpython/blob/main/Tools/gdb/libpython.py. With that extension loaded, ``bt`` shows a Python
frame as ``Frame 0x…, for file FILE, line N, in FUNCTION``. Thread 1 of a process that gdb attached to is its main
thread, whose number in the kernel (LWP) is that of the process.
"""

from __future__ import annotations

import re

from doctor.core.facts.attached import StackSource
from doctor.core.stack_dumps.threads import dumped_frame
from doctor.postmortem.stacks.line_kinds import (
    AsideLine,
    FrameLine,
    LineKind,
    NativeLine,
    OtherLine,
    RefusalLine,
    ThreadLine,
    ThreadState,
)

_THREAD = re.compile(
    r"(?:\[Switching to thread (?P<switched>\d{1,6}) \(|Thread (?P<number>\d{1,6}) \()"
    r"(?:Thread 0x[0-9a-f]+ )?\(?LWP (?P<lwp>\d{1,10})\)?(?: \"(?P<name>[^\"]*)\")?\)(?:\):?|[:\]]|:)?"
)
_FRAME = re.compile(
    r"#(?P<depth>\d{1,5}) +(?:0x[0-9a-f]+ in (?P<call>\S.*)"
    r"|(?P<bare>[^\s(\[]+ \(.*|<signal handler called>|Frame 0x.*)"
    r"|(?P<template>[^\s(\[].* (?:at \S+:\d+|from \S+)))$"
)
"""A frame; a name may contain blanks if it is that of a template."""
_OF_PYTHON = re.compile(
    r"Frame 0x[0-9a-f]+, for file (?P<file>.{0,1000}), line (?P<line>\d{1,10}), in (?P<function>[^ (]{1,400})"
)
_PY_BT = re.compile(r"Traceback \(most recent call first\):$")
_PY_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d{1,10}), in (?P<function>.+)$')
_ATTACHED = re.compile(
    r"Attaching to (?:program: .*, )?process (?P<pid>\d{1,10})|\[Inferior \d+ \(process (?P<left>\d+)\)"
)
_BEGINS = re.compile(r"GNU gdb|\[Thread debugging using libthread_db|\[New LWP |warning: process \d+ ")
_OTHER = re.compile(
    r"\(gdb\)|-+Type <(?:return|RET)>|Using host libthread_db|0x[0-9a-f]{8,} in |Reading symbols from|\[Thread 0x"
    r"|\[New |\[Current thread is|Missing separate debuginfo|warning: |Unable to locate python frame|Unable to read "
    r"|Waiting for the GIL|Garbage-collecting|For help, type|Type \"(?:show|apropos)|License GPL|This is free software"
    r"|This GDB was configured|Copyright \(C\)|There is NO WARRANTY|Find the GDB manual|<http|__.*\) at \S+:\d+$|\d+\t"
    r"|To enable execution|To completely disable|For more information about this|line to your configuration"
    r"|Detaching from program|Backtrace stopped:|\s+at \S|\s+from \S|Download failed|Debuginfod|Enable debuginfod"
    r"|\s+add-auto-load-safe-path|\s*set auto-load safe-path|\"Auto-loading safe path|\s+info \"|For bug reporting"
)
_REFUSED = re.compile(r"(?:ptrace|Could not attach to process|No symbol table|warning: Selected architecture).*")
_SOURCE = re.compile(r"[ >]{0,4}\d{1,6} {4,}|\d{1,6}\s+in \S|\d{1,6}\t")
"""A line of source: of ``py-list``, and of a frame whose source gdb has or lacks."""
_PLACE = re.compile(r" (?:at|from) \S+$")


class GdbReader(ThreadState):
    """Reads the lines of gdb."""

    source: StackSource = "gdb"

    _in_python = _after_frame = False

    def leave(self) -> None:
        """Forget the thread."""
        super().leave()
        self._in_python = self._after_frame = False

    def read(self, line: str) -> LineKind | None:
        """Return what the line says."""
        if found := _THREAD.match(line):
            self.leave()
            self._in_thread = True
            number = int(found["switched"] or found["number"])
            return ThreadLine(found["name"] or "", int(found["lwp"]), number, is_main=number == 1)
        if found := _ATTACHED.match(line):
            self.leave()
            return AsideLine(int(found["pid"] or found["left"]))
        if _BEGINS.match(line):
            self.leave()
            return AsideLine()
        if (found := _FRAME.match(line)) and (found["template"] is None or "> (" in found["template"]):
            return self._frame(found)
        if _PY_BT.match(line):
            self._in_python = True
            return OtherLine()
        if self._in_python and (found := _PY_FRAME.match(line)):
            return FrameLine(dumped_frame(found["file"], int(found["line"]), found["function"]))
        if found := _REFUSED.match(line):
            return RefusalLine(found[0])
        if _OTHER.match(line) or ((self._in_thread or self._after_frame) and _SOURCE.match(line)):
            return OtherLine()
        # The rest of a frame whose arguments are long, or a line of Python's source.
        return OtherLine() if (self._after_frame or self._in_python) and line.startswith("  ") else None

    def _frame(self, found: re.Match[str]) -> LineKind:
        self._after_frame = True
        call = found["call"] or found["bare"] or found["template"]
        if python := _OF_PYTHON.search(call):
            return FrameLine(dumped_frame(python["file"], int(python["line"]), python["function"]))
        return NativeLine(function_of(call), is_innermost=found["depth"] == "0")


def function_of(call: str) -> str:
    """Return the function in ``c10d::Work::wait(std::chrono::…) () from /…/libtorch_cpu.so``, without arguments."""
    bare = _PLACE.sub("", call).replace("(anonymous namespace)::", "")
    return bare.partition("(")[0].strip() or bare
