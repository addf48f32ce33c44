"""Lines of ``py-spy dump``, also with ``--locals``, ``--native`` and ``--subprocesses``.

https://github.com/benfred/py-spy/blob/master/src/dump.rs. The command line of a process may have several lines
(``python -c``); it ends at the line with the version. Releases before 0.2 indent frames by a tab and a space, those
before 0.3 print the address of a thread instead of the kernel's number.
"""

from __future__ import annotations

import re

from doctor.core.facts.attached import StackSource
from doctor.core.stack_dumps.threads import dumped_frame
from doctor.postmortem.stacks.line_kinds import (
    FrameLine,
    LineKind,
    LocalLine,
    NativeLine,
    OtherLine,
    ProcessLine,
    RefusalLine,
    ThreadLine,
    ThreadState,
    VariableLine,
)

MOST_COMMAND_LINES = 200
"""Lines of a command line; beyond them the dump is damaged."""
_PROCESS = re.compile(r"Process (?P<pid>\d{1,10}): (?P<command>.*)")
_VERSION = re.compile(r"Python v\d+\.\d\S*(?: \(.*\))?$")
_PARENT = re.compile(r"Parent Process (?P<pid>\d{1,10}): ")
PARENT = "PPID"
"""Name of the variable that holds the parent's PID, as in a shell."""
_RULE = re.compile(r"-{20,}$")
_THREAD = re.compile(
    r"(?:\S.{0,200}[:\uff1a] ?)?Thread (?:(?P<id>0x[0-9A-F]+(?:\.{3}|\u2026)?|\d{1,20})(?!\w))?"
    r"(?: ?\((?P<state>(?:active|idle)(?:\+gil)?|gil)\))?(?::? \"(?P<name>.*)\")?$"
)
"""The header of a thread; people put words before it, and leave out its number."""
_SHORTENED = re.compile(r"\s*(?:\.{3,}|\u2026|\S.* \(\))$")
"""What people put for frames that they left out, and a frame without its file."""
_FRAME = re.compile(r"(?: {4}|\t ?)(?P<name>\S.*) \((?P<file>[^()]+?)(?::(?P<line>\d{1,10}))?\)$")
_BARE = re.compile(r"[ \t]{0,8}(?P<name>[\w.<>]+) \((?P<file>[^()\s]+\.py):(?P<line>\d{1,10})\)$")
"""A frame without a thread: people quote the frames alone."""
_NOTE = re.compile(r"(?<=\))\s+(?:<-|\u2190|# ).*")
"""What people write behind a frame."""
_LOCAL = re.compile(r" {12}(?P<name>[^\W\d]\w*): (?P<value>.*)$")
_LOCALS = re.compile(r" {8}(?:Arguments|Locals):$")
_ERROR = re.compile(r"(?:Error: |Reason: )(?P<reason>.*)")
_NATIVE_FILE = re.compile(r"\.(?:c|cc|cpp|cxx|cu|cuh|h|hh|hpp|pyx|pxd|rs|S|so(?:\.[\d.]+)?)$")


class PySpyReader(ThreadState):
    """Reads the lines of py-spy."""

    source: StackSource = "py-spy"

    _command_lines = 0

    def leave(self) -> None:
        """Forget the thread."""
        super().leave()
        self._command_lines = 0

    def read(self, line: str) -> LineKind | None:
        """Return what the line says."""
        if self._in_thread and line.startswith((" ", "\t")):
            return self._in_a_thread(line)
        if found := _PROCESS.match(line):
            self._in_thread, self._command_lines = False, 1
            return ProcessLine(int(found["pid"]), found["command"], source="py-spy")
        if _VERSION.match(line) or _RULE.match(line):
            self._command_lines = 0
            return OtherLine()
        if found := _PARENT.match(line):
            # Its own command line may have several lines too.
            self._command_lines = 1
            return VariableLine(PARENT, found["pid"])
        if (found := _THREAD.match(line)) and (found["id"] or found["state"]):
            self._in_thread, self._command_lines = True, 0
            return _thread(found)
        if found := _ERROR.match(line):
            self.leave()
            return RefusalLine(found["reason"])
        if self._command_lines:
            self._command_lines = (self._command_lines + 1) % MOST_COMMAND_LINES
            return OtherLine()
        found = None if self._in_thread else _BARE.match(line)
        return FrameLine(dumped_frame(found["file"], int(found["line"]), found["name"])) if found else None

    def _in_a_thread(self, line: str) -> LineKind | None:
        if found := _FRAME.match(_NOTE.sub("", line)):
            number = found["line"]
            if number is None or _NATIVE_FILE.search(found["file"]):
                return NativeLine(found["name"])
            return FrameLine(dumped_frame(found["file"], int(number), found["name"]))
        if _LOCALS.match(line):
            return OtherLine()
        if found := _LOCAL.match(line):
            return LocalLine(found["name"], found["value"])
        return OtherLine() if _SHORTENED.match(line) else None


def _thread(found: re.Match[str]) -> ThreadLine:
    state, identity, name = found["state"] or "", found["id"] or "", found["name"] or ""
    return ThreadLine(
        name=name,
        native_id=int(identity) if identity.isdigit() else 0,
        identity=identity,
        is_main=name == "MainThread",
        active="active" in state if state and state != "gil" else None,
        holds_gil="gil" in state,
    )
