"""What a line of a stack dump says, whichever tool printed it."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from doctor.core.facts import Frame
from doctor.core.facts.attached import StackSource


class ProcessLine(NamedTuple):
    """The dump of a process begins. ``pid`` is 0 and the rest empty if the line does not show it."""

    pid: int = 0
    command: str = ""
    rank: int | None = None
    host: str = ""
    source: StackSource = ""


class SampleLine(NamedTuple):
    """Another dump of the same process begins; ``seconds`` after the previous one, ``None`` if unknown."""

    seconds: float | None = None


class ThreadLine(NamedTuple):
    """A thread begins. ``number``: its number in the dump (gdb); ``identity``: its address as the tool prints it;
    ``is_current``: it printed the dump itself; ``outermost_first``: the order of its frames."""

    name: str = ""
    native_id: int = 0
    number: int = 0
    identity: str = ""
    is_main: bool = False
    active: bool | None = None
    holds_gil: bool = False
    is_current: bool = False
    outermost_first: bool = False


class FrameLine(NamedTuple):
    """A Python frame."""

    frame: Frame


class NativeLine(NamedTuple):
    """A frame of native code. ``is_innermost``: the dump numbers it as the first one of a stack."""

    function: str
    is_innermost: bool = False


class LocalLine(NamedTuple):
    """A local variable of the frame before it."""

    name: str
    value: str


class VariableLine(NamedTuple):
    """A variable of the environment of the process before or after it."""

    name: str
    value: str


class RefusalLine(NamedTuple):
    """The tool could not read the process, or its stack, for this reason."""

    reason: str


class OtherLine(NamedTuple):
    """A line of the tool's own without meaning here: versions, source text, progress."""


class AsideLine(NamedTuple):
    """A line that a debugger prints before or after the stacks of one process; a process begins or ended there."""

    pid: int = 0


LineKind = (
    ProcessLine
    | SampleLine
    | ThreadLine
    | FrameLine
    | NativeLine
    | LocalLine
    | VariableLine
    | RefusalLine
    | OtherLine
    | AsideLine
)


class LineReader(Protocol):
    """Recognizes the lines of one tool. A reader keeps the state that indented lines need."""

    source: StackSource

    def read(self, line: str) -> LineKind | None:
        """Return what the line says, or ``None`` if the tool does not print such a line there."""

    def leave(self) -> None:
        """Forget the thread: a line of another tool, or a heading, follows."""


class ThreadState:
    """What readers keep between lines: whether the header of a thread came before, and no line that ends its stack."""

    _in_thread = False

    def leave(self) -> None:
        """Forget the thread."""
        self._in_thread = False
