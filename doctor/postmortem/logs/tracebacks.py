"""Tracebacks of Python in a log, one after the other or interleaved, as the exceptions that they end with.

Lines of one process are known by who says them; what several processes write without a prefix can't be told apart, so
frames then go to the traceback that began last. Of a chain (``During handling of the above exception …``), of an error
that a worker raised and its parent raises again (``Original Traceback``), and of a group of exceptions, the first cause
is the event; ``then`` names the type that was seen last.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from keyword import kwlist
from typing import NamedTuple, Protocol

from doctor.core.facts.telemetry import Frame
from doctor.postmortem.logs.prefixes import UNKNOWN_ORIGIN, LineOrigin

MOST_FRAMES = 60
"""Frames of one traceback that are kept, the innermost."""
LONGEST_MESSAGE = 2000
"""Characters of an exception's message that are kept."""
MOST_LINES = 40
"""Lines of an exception's message that are kept."""
MOST_PLAIN = 5
"""Those of them that may begin at the margin, as lines of others do."""
MOST_STREAMS = 4096
"""Processes whose tracebacks are followed at the same time."""

CUES = (
    "Traceback (most recent call last)",
    'File "',
    'File \\"',
    "another exception occurred:",
    "direct cause of the following exception:",
    "terminated with the following error",
    "(most recent call first):",
    "Fatal Python error",
    "Error",
    "Exception",
    "KeyboardInterrupt",
    "SystemExit",
    "StopIteration",
    "TimeoutExpired",
    # The names whose part before "Error" is in capitals, and the one that has none.
    "OSError",
    "IOError",
    "Exception:",
    "╭",
)
"""Texts of which at least one stands in every line that begins, continues or ends a traceback."""


class ParsedException(NamedTuple):
    """An exception as it stands in a log: kind of the event, type and the first line of the message, frames innermost
    first."""

    kind: str
    type: str
    message: str
    frames: tuple[Frame, ...]


class LoggedException(Protocol):
    """An exception that was noted; what the lines after it tell is added."""

    def add_message(self, text: str) -> None:
        """Add a line of the message."""

    def add_frame(self, frame: Frame) -> None:
        """Add the caller of the last frame."""

    def drop_frames(self) -> None:
        """The frames that were added are those of a thread that does not matter."""

    def add_later(self, type_: str, message: str) -> None:
        """Name the exception that it led to."""

    def add_cause(self, cause: ParsedException, line: int) -> None:
        """Name the exception that led to it."""


Note = Callable[[LineOrigin, ParsedException, int], LoggedException]
"""Takes an exception down: who, what, in which line."""

_HEADER = "Traceback (most recent call last)"
_MARGIN = re.compile(r"\s*(?:\+-?[+-]*(?: \d+ -+)?|\|) ?(?=\s|$|\S)")
_FILE = re.compile(
    r"\s*(?:File|Cell) \"?(?P<file>[^\"\n]{1,1000}?)\"?,? line (?P<line>\d{1,9})"
    r"(?:,? in (?P<function>.{1,200}?))?\s{0,20}$"
)
_BOXED = re.compile(
    r"│ +(?P<file>[^\s│].{0,400}?):(?P<line>\d{1,9}) in (?P<function>[^│\s]{1,200})\s{0,200}(?:│\s{0,9})?$"
)
# Ray puts the type of the cause behind its own: "ray.exceptions.RayTaskError(ValueError)".
_TYPE = r"(?:[A-Za-z_]\w{0,80}\.){0,12}[A-Za-z_]\w{0,80}(?:\(\w{1,80}\))?"
# Directly after a stack any name does that is no plain word: zlib.error, queue.Empty, StopIteration.
_UNPLAIN = (
    r"(?=\w{0,80}[a-z]\w{0,80}[A-Z_]|\w{1,80}\.|[A-Z]\w{0,80}Error\b|Exception|Warning|Abort|Exit|Empty|Full|Failed)"
)
_ANY_FINAL = re.compile(rf"(?P<type>{_UNPLAIN}{_TYPE})(?:: (?P<message>.*)|:?\s*)$", re.DOTALL)
# If the stack has kept its indentation, whatever stands at the margin behind it is the exception, but for what another
# process may have written between.
_OF_OTHERS = (
    r"(?!(?i:epochs?|steps?|iter|loss|batch|train|val|lr|info|debug|note|done|ok|rank|gpu|node)\b(?!\.)"
    rf"|(?:{'|'.join(kwlist)})\b)"
)
_MARGIN_FINAL = re.compile(rf"(?P<type>{_OF_OTHERS}{_TYPE})(?:: (?P<message>.*)|:?\s*)$", re.DOTALL)
_NAMED = (
    r"[A-Z]\w{0,80}(?:Error|Exception|Interrupt|Exit|ExceptionGroup|StopIteration|Expired|Terminated|OutOfMemory)"
    r"|Exception|OSError|IOError|KeyboardInterrupt|SystemExit|StopIteration|StopAsyncIteration|GeneratorExit|ExceptionGroup"
)
_FINAL = re.compile(
    rf"(?P<type>(?:[A-Za-z_]\w{{0,80}}\.){{0,12}}(?:{_NAMED})(?:\(\w{{1,80}}\))?)(?:: ?(?P<message>.*)|\s*)$", re.DOTALL
)
_LINK = re.compile(r"(?:another exception occurred|direct cause of the following exception):")
_INNER = re.compile(
    r"Original Traceback|terminated with the following error|The above exception was raised|RemoteTraceback"
)
_CARRIER = re.compile(r"ExceptionGroup$|\.RayTaskError\b")
"""Exceptions that carry others, which are printed below them."""
_FATAL = re.compile(r"Fatal Python error: (?P<message>.*)")
_ENDS_MESSAGE = re.compile(
    r"Exception raised from |frame #\d|#\d+ |=====|-----|srun: |slurmstepd|\[[^\]]{0,100}\]|Traceback "
)
_INSTALLED = re.compile(
    r"/(?:site|dist)-packages/|/lib(?:64)?/python\d+(?:\.\d+)?/|\\(?:site-packages|lib)\\|"
    r"^(?:\.{3}/|(?!/))(?:torch|lightning|pytorch_lightning|transformers|accelerate|deepspeed|ray|multiprocessing|"
    r"concurrent|threading|contextlib|runpy|socket|subprocess)(?:/|\.py$)"
)
"""Where Pythons keep packages and their library; some logs shorten such paths."""


def is_user_code(file: str) -> bool:
    """Whether a file is neither of the standard library nor of an installed package. Cells of a notebook and ``python
    -c`` are the user's."""
    if file.startswith("<"):
        return not file.startswith("<frozen")
    return not _INSTALLED.search(file)


class _TracebackState:
    """The traceback that one process is writing. ``state``: ``stack`` (frames come), ``box`` (they come in a frame that
    rich draws), ``message`` (lines of the message come), ``fatal`` (stacks that faulthandler writes), or nothing.
    ``framed``: the last line was a frame, ``indented`` as Python writes it. ``linked``: what is raised next follows
    from ``found``; ``nested``: it led to ``found``."""

    __slots__ = ("found", "framed", "frames", "indented", "lines", "linked", "nested", "plain", "state")

    def __init__(self) -> None:
        self.frames: deque[Frame] = deque(maxlen=MOST_FRAMES)
        self.state = ""
        self.framed = False
        self.indented = False
        self.linked = False
        self.nested = False
        self.found: LoggedException | None = None
        self.lines = self.plain = 0

    def begin(self, state: str) -> None:
        self.frames.clear()
        self.state = state
        self.framed = False
        self.lines = self.plain = 0


class Tracebacks:
    """Follows the tracebacks of all processes that write a log. :meth:`read` takes each line that may matter."""

    def __init__(self, note: Note) -> None:
        self._note = note
        self._streams: dict[LineOrigin, _TracebackState] = {}
        self._logged: LineOrigin | None = None
        self.waiting: set[LineOrigin] = set()
        """Whose next lines matter whatever stands in them."""
        self._patience = 0

    def read(self, speaker: LineOrigin, body: str, line: int, record: bool = False, mild: bool = False) -> bool:
        """Take a line; whether it is part of a stack, which says nothing by itself. ``record``: a logger began a record
        here, ``mild`` at a level at which no exception ends anything."""
        speaker = self._whose(speaker, record)
        self._wait_longer(speaker)
        text = _without_margin(body)
        if _HEADER in text:
            self._logged = speaker if record else None
            return self._begin(speaker, text)
        frame = _frame_line(text)
        if frame is not None:
            return self._frame(speaker, frame, indented=text.startswith("  "))
        stream = self._streams.get(speaker)
        if stream is not None:
            return self._continue(speaker, stream, text, line, (record, mild))
        if not mild:
            self._end(speaker, text, line, _FINAL)
        return False

    def _whose(self, speaker: LineOrigin, record: bool) -> LineOrigin:
        """Loggers put their prefix before the first line of a traceback only: what nobody says then is of the same
        process."""
        if self._logged is None or record or speaker != UNKNOWN_ORIGIN or not self._streams[self._logged].state:
            return speaker
        return self._logged

    def _wait_longer(self, speaker: LineOrigin) -> None:
        if speaker in self.waiting:
            self._patience = 0
        else:
            self.pass_over()

    def pass_over(self) -> None:
        """A line of another process came. Who has been waited for too long is not waited for any more."""
        self._patience += 1
        if self._patience > _PATIENCE:
            for other in self.waiting:
                self._streams[other].state = ""
            self.waiting.clear()

    def _begin(self, speaker: LineOrigin, text: str) -> bool:
        stream = self._stream(speaker)
        stream.nested = stream.found is not None and (stream.nested or bool(_INNER.search(text)))
        stream.begin("box" if "─" in text else "stack")
        self.waiting.add(speaker)
        return True

    def _frame(self, speaker: LineOrigin, frame: Frame, *, indented: bool) -> bool:
        stream = self._stream(speaker)
        stream.indented = indented
        if stream.state in ("fatal", "dying") and stream.found is not None:
            stream.found.add_frame(frame)
            self.waiting.add(speaker)
            return True
        if stream.state not in ("stack", "box"):
            stream.begin("stack")
        if not stream.frames or stream.frames[-1] != frame:
            stream.frames.append(frame)
        stream.framed = True
        self.waiting.add(speaker)
        return True

    def _continue(
        self, speaker: LineOrigin, stream: _TracebackState, text: str, line: int, how: tuple[bool, bool]
    ) -> bool:
        """A line of a process that wrote part of a traceback before."""
        record, mild = how
        if self._is_stack(stream, text, record) or self._is_link(speaker, stream, text):
            return True
        final = _final_of(stream, record)
        if not (mild and not stream.frames) and self._end(speaker, text, line, final):
            return False
        stream.framed = False
        if stream.state == "message":
            self._message(speaker, stream, text, record)
        elif stream.state in ("fatal", "dying"):
            self._fatal(speaker, stream, text)
        return False

    def _fatal(self, speaker: LineOrigin, stream: _TracebackState, text: str) -> None:
        """Of the stacks of all threads, as faulthandler writes them, that of the one which died counts."""
        if text.startswith("Current thread ") and stream.found is not None:
            stream.state = "dying"
            stream.found.drop_frames()
        elif stream.state == "dying":
            self._leave(speaker, stream)

    @staticmethod
    def _is_stack(stream: _TracebackState, text: str, record: bool) -> bool:
        """Source code, marks under it, the drawing around it."""
        if record and not text.startswith("  "):
            return False
        if stream.state == "box" and text.lstrip()[:1] in _DRAWN:
            return True
        if stream.state != "stack" or not stream.frames:
            return False
        return (
            text[:1] in (" ", "\t") or _repeats(text) or (stream.framed and not _final_of(stream, record).match(text))
        )

    def _is_link(self, speaker: LineOrigin, stream: _TracebackState, text: str) -> bool:
        """Words between two exceptions of which one led to the other."""
        if stream.found is None or stream.state == "stack":
            return False
        if _LINK.search(text):
            stream.linked = True
        elif _INNER.search(text):
            stream.nested = True
        else:
            return False
        self.waiting.add(speaker)
        return True

    def _end(self, speaker: LineOrigin, text: str, line: int, final: re.Pattern[str]) -> bool:
        """Note the exception where this is its line; whether it is."""
        if fatal := _FATAL.match(text):
            self._stream(speaker).begin("fatal")
            self._keep(speaker, ParsedException("python.fatal", "", fatal["message"], ()), line)
            return True
        match = final.match(text)
        if not match:
            return False
        stream = self._stream(speaker)
        frames = tuple(stream.frames)[::-1]
        stream.begin("message")
        self._keep(speaker, ParsedException("python.exception", match["type"], match["message"] or "", frames), line)
        return True

    def _keep(self, speaker: LineOrigin, raised: ParsedException, line: int) -> None:
        stream = self._stream(speaker)
        if stream.nested and stream.found is not None:
            stream.found.add_cause(raised, line)
        elif stream.linked and stream.found is not None:
            stream.found.add_later(raised.type, raised.message)
        else:
            stream.found = self._note(speaker, raised, line)
        stream.linked, stream.nested = False, _CARRIER.search(raised.type) is not None
        self.waiting.add(speaker)

    def _message(self, speaker: LineOrigin, stream: _TracebackState, text: str, record: bool) -> None:
        """A line after the one that ended a traceback: of its message, or what ends it. A chain may go on after an
        empty line."""
        stream.lines += 1
        stream.plain += text[:1] not in (" ", "\t")
        if record or stream.lines > MOST_LINES or stream.plain > MOST_PLAIN or _ENDS_MESSAGE.match(text):
            self._leave(speaker, stream)
        elif text.strip() and stream.found is not None and not stream.linked:
            stream.found.add_message(text)

    def _leave(self, speaker: LineOrigin, stream: _TracebackState) -> None:
        stream.state = ""
        self.waiting.discard(speaker)

    def _stream(self, speaker: LineOrigin) -> _TracebackState:
        stream = self._streams.get(speaker)
        if stream is None:
            if len(self._streams) >= MOST_STREAMS:
                gone = next(iter(self._streams))
                del self._streams[gone]
                self._logged = None if self._logged == gone else self._logged
                self.waiting.discard(gone)
            stream = self._streams[speaker] = _TracebackState()
        return stream


def _final_of(stream: _TracebackState, record: bool) -> re.Pattern[str]:
    """What the line that ends a stack looks like."""
    if stream.state != "stack" or not stream.framed or record:
        return _FINAL
    return _MARGIN_FINAL if stream.indented else _ANY_FINAL


_DRAWN = tuple("│╭╰❱┃")
_PATIENCE = 200
"""Lines of other processes that come between two lines of one traceback."""


def _without_margin(body: str) -> str:
    """A line of a group of exceptions without the margin that shows the nesting."""
    if body.lstrip()[:1] in ("|", "+") and (margin := _MARGIN.match(body)):
        return body[margin.end() :]
    return body


def _repeats(text: str) -> bool:
    return text.startswith("[Previous line repeated ")


def _frame_line(text: str) -> Frame | None:
    found = _FILE.match(text) or _BOXED.match(text)
    if not found:
        return None
    file = found["file"]
    return Frame(file, int(found["line"]), (found["function"] or "").strip(), user=is_user_code(file))
