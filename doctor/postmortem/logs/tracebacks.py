"""Parser of Python tracebacks in a log, consecutive or interleaved, into exceptions.

The lines of a process are identified by their origin. Without prefixes, lines of several processes cannot be
distinguished, so frames are added to the traceback that began last. Of a chain (``During handling of the above
exception …``), an exception raised again by a parent (``Original Traceback``), and an exception group, the first cause
is the event; ``then`` is the type that was seen last.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from keyword import kwlist

from doctor.analysis.logs.root_event import UNFINISHED
from doctor.core.facts.telemetry import Frame
from doctor.postmortem.logs.event_store import MOST_FRAMES, ParsedException, StoredEvent
from doctor.postmortem.logs.prefixes import UNKNOWN_ORIGIN, LineOrigin

MOST_LINES = 40
"""Maximum lines of an exception's message."""
MOST_PLAIN = 5
"""Maximum number of them without indentation, which may be lines of other processes."""
_NEAR_END = 10
"""Lines before the end of a log within which a traceback may be unfinished."""
MOST_STREAMS = 4096
"""Maximum number of processes whose tracebacks are parsed at the same time."""

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
    # The name without a part before "Exception".
    "Exception:",
    "╭",
    "❱",
    ".exc.",
    ".exceptions.",
    ".errors.",
    ": error: ",
)
"""Every line that begins, continues or ends a traceback contains at least one of these."""


_ONE_LINE = re.compile(r"Traceback \(most recent call last\):\s+File \"")
_PARTS = (
    (re.compile(r"(Traceback \(most recent call last\):)\s*"), r"\n\1\n"),
    (
        re.compile(r"(File \"[^\"\n]{1,1000}\", line \d{1,9}(?:, in (?:<\w{1,80}>|\w{1,200}))?)(?:\s+|$)"),
        r"\n  \1\n    ",
    ),
    (
        re.compile(r"(During handling of the above [^\n:]{1,80}:|The above exception was [^\n:]{1,80}:)\s*"),
        r"\n\n\1\n",
    ),
)


def lines_of_collapsed(text: str) -> list[str] | None:
    """The lines of a traceback that is printed in one, as reasons of failed jobs in the cloud and copied texts are;
    ``None`` if it is not."""
    if not _ONE_LINE.search(text):
        return None
    for part, below in _PARTS:
        text = part.sub(below, text)
    lines = (line for one in text.split("\n") for line in _LAST.sub(r"\1\n\2", one, count=1).split("\n"))
    return [line.rstrip() for line in lines if line.strip()]


Note = Callable[[LineOrigin, ParsedException, int], StoredEvent]
"""Called with an exception, its process and its line; the lines after it are added to the stored event."""

MOST_CODE = 200
"""Maximum characters of a line of source code."""
_HEADER = "Traceback (most recent call last)"
_NAMED_HEADER = re.compile(r"([A-Za-z_][\w.]{0,80})\s{2,}Traceback ")
"""IPython's header, with the type of the exception."""
_MARGIN = re.compile(r"\s*(?:\+-?[+-]*(?: \d+ -+)?|\|) ?(?=\s|$|\S)")
_FILE = re.compile(
    r"\s*(?:File|Cell) \"?(?P<file>[^\"\n]{1,1000}?)\"?,? line (?P<line>\d{1,9})"
    r"(?:,? in (?P<function>.{1,200}?)|,)?\s{0,20}$"
)
_BOXED = re.compile(
    r"│ +(?P<file>[^\s│].{0,400}?):(?P<line>\d{1,9}) in (?P<function>[^│\s]{1,200})\s{0,200}(?:│\s{0,9})?$"
)
_BOXED_SOURCE = re.compile(r"│ +❱ +\d{1,9} │")
"""The line of source code in a box drawn by rich whose call failed; a log may begin within the box."""
# Ray appends the type of the cause to its own: "ray.exceptions.RayTaskError(ValueError)".
_TYPE = r"(?:[A-Za-z_]\w{0,80}\.){0,12}[A-Za-z_]\w{0,80}(?:\(\w{1,80}\))?"
# Directly after a stack, any name counts that is not a plain word: zlib.error, queue.Empty, StopIteration.
_UNPLAIN = (
    r"(?=\w{0,80}[a-z]\w{0,80}[A-Z_]|\w{1,80}\.|[A-Z]\w{0,80}Error\b|Exception|Warning|Abort|Exit|Empty|Full|Failed)"
)
_Match = Callable[[str], re.Match[str] | None]
_ANY_FINAL = re.compile(rf"(?P<type>{_UNPLAIN}{_TYPE})(?:: (?P<message>.*)|:?\s*)$", re.DOTALL)
# If the stack is indented, the first line without indentation is the exception, except for lines that another process
# may have written in between.
_OF_OTHERS = (
    r"(?!(?i:epochs?|steps?|iter|loss|batch|train|val|lr|info|debug|note|done|ok|rank|gpu|node)\b(?!\.)"
    rf"|(?:{'|'.join(kwlist)})\b)"
)
_MARGIN_FINAL = re.compile(rf"(?P<type>{_OF_OTHERS}{_TYPE})(?:: (?P<message>.*)|:?\s*)$", re.DOTALL)
_NAMED = (
    r"[A-Z]\w{0,80}(?:Error|Exception|Interrupt|Exit|ExceptionGroup|StopIteration|Expired|Terminated|OutOfMemory)"
    r"|Exception|OSError|IOError|KeyboardInterrupt|SystemExit|StopIteration|StopAsyncIteration|GeneratorExit|ExceptionGroup"
    # A class of a module for exceptions: torch._dynamo.exc.BackendCompilerFailed, requests.exceptions.Timeout.
    r"|(?:(?<=\bexc\.)|(?<=\berrors\.)|(?<=\bexceptions\.))[A-Z](?!\w{0,80}Warning\b)\w{2,80}"
)
_FINAL = re.compile(
    rf"(?:(?:Uncaught|Unhandled) (?:exception:? )?)?"
    rf"(?P<type>(?:[A-Za-z_]\w{{0,80}}\.){{0,12}}(?:{_NAMED})(?:\(\w{{1,80}}\))?)(?:: ?(?P<message>.*)|\s*)$",
    re.DOTALL,
)
_USAGE = re.compile(
    r"(?:[^\s:]{1,200}\.py: error: (?=\S)|[^\s:]{1,200}: error: (?=(?:unrecognized arguments|ambiguous option|argument "
    r"[^:]{1,200}|the following arguments are required): |one of the arguments ))(?P<message>.+)",
    re.DOTALL,
)
"""How argparse ends a process (``ArgumentParser.error`` in Lib/argparse.py), with exit code 2."""
_LAST = re.compile(
    rf"^(    .*?)\s((?:[A-Za-z_]\w{{0,80}}\.){{0,12}}(?:{_NAMED})(?::\s|$))",
)
"""The source code of the innermost frame, and the exception behind it in the same line."""
_RECORDED = re.compile(
    rf"\s*(?:- )?message: ['\"](?P<type>(?:[A-Za-z_]\w{{0,80}}\.){{0,12}}(?:{_NAMED})): (?P<message>.*?)['\"]\s*$",
    re.DOTALL,
)
"""The exception in the error file of torchrun, printed as YAML
(torch/distributed/elastic/multiprocessing/errors/error_handler.py writes its type and message in one text)."""
_DECORATED = re.compile(r"\s{0,40}(?:E {2,7}|[│*`\"'“>•\[-] ?){1,4}(?=[A-Za-z_])")
"""Quotes, bullets, brackets, boxes and pytest's margin around an exception that somebody copied or a tool printed."""
_LINK = re.compile(r"(?:another exception occurred|direct cause of the following exception):")
_INNER = re.compile(
    r"Original Traceback|terminated with the following error|The above exception was raised|RemoteTraceback"
)
_CARRIER = re.compile(r"ExceptionGroup$|\.RayTaskError\b")
"""Exceptions that contain others, which are printed below them."""
_FATAL = re.compile(r"Fatal Python error: (?P<message>.*)")
_ENDS_MESSAGE = re.compile(
    r"Exception raised from |frame #\d|#\d+ |=====|-----|srun: |slurmstepd|\[[^\]]{0,100}\]|Traceback "
)
_INSTALLED = re.compile(
    r"/(?:site|dist)-packages/|/lib(?:64)?/python\d+(?:\.\d+)?/|\\(?:site-packages|lib)\\|"
    r"^(?:\.{3}/|(?!/))(?:torch|lightning|pytorch_lightning|transformers|accelerate|deepspeed|ray|multiprocessing|"
    r"concurrent|threading|contextlib|runpy|socket|subprocess)(?:/|\.py$)"
)
"""Paths of the standard library and of installed packages; some logs shorten them."""


def is_user_code(file: str) -> bool:
    """Return whether a file is user code, also a cell of a notebook or ``python -c``, and not installed."""
    if file.startswith("<"):
        return not file.startswith("<frozen")
    return not _INSTALLED.search(file)


@dataclass(slots=True)
class _TracebackState:
    """The unfinished traceback of one process.

    ``state``: the lines that follow: ``stack`` (frames), ``box`` (frames within a box drawn by rich), ``message``,
    ``fatal`` (stacks written by faulthandler), ``dying`` (that of the current thread), or ``""``. ``framed``: the last
    line was a frame, ``indented`` as Python writes it. ``linked``: the next exception follows from ``found``;
    ``nested``: it led to ``found``. ``lines``, ``plain``: lines of the message, and those without indentation.
    ``type``: of the exception, if the header names it, as IPython's does. ``last``: the last line of the stack.
    ``code``: the source code of the last frame of the user's program; ``coded``: that frame.
    """

    frames: deque[Frame] = field(default_factory=lambda: deque(maxlen=MOST_FRAMES))
    state: str = ""
    depth: int = 0
    framed: bool = False
    indented: bool = False
    linked: bool = False
    nested: bool = False
    found: StoredEvent | None = None
    lines: int = 0
    plain: int = 0
    type: str = ""
    last: int = 0
    code: str = ""
    coded: Frame | None = None

    def begin(self, state: str) -> None:
        self.frames.clear()
        self.state = state
        self.framed = False
        self.type = self.code = ""
        self.coded = None
        self.lines = self.plain = 0

    def read_code(self, text: str) -> None:
        """Keep a line if it is the first after a frame of the user's program."""
        frame = self.frames[-1]
        if frame.user and frame is not self.coded:
            self.code, self.coded = text.strip()[:MOST_CODE], frame


class Tracebacks:
    """Parses the tracebacks in a log. ``waiting``: processes whose next lines must be read."""

    def __init__(self, note: Note) -> None:
        self._note = note
        self._streams: dict[LineOrigin, _TracebackState] = {}
        self._logged: LineOrigin | None = None
        self.waiting: set[LineOrigin] = set()
        self._patience = 0

    def read(self, origin: LineOrigin, body: str, line: int, record: bool = False, mild: bool = False) -> bool:
        """Process a line; return whether it is part of a stack, which is not a message itself.

        ``record``: a logger began a record here; ``mild``: at a level at which no exception ends a process.
        """
        if self._logged is not None and not record and origin == UNKNOWN_ORIGIN and self._streams[self._logged].state:
            origin = self._logged  # loggers prefix only the first line of a traceback
        if origin in self.waiting:
            self._patience = 0
        else:
            self.pass_over()
        # The margin of an exception group shows the nesting.
        margin = _MARGIN.match(body) if body.lstrip()[:1] in ("|", "+") else None
        text = body[margin.end() :] if margin else body
        if _HEADER in text:
            self._logged = origin if record else None
            begun = self._stream(origin)
            begun.nested = begun.found is not None and (begun.nested or bool(_INNER.search(text)))
            begun.begin("box" if "─" in text else "stack")
            begun.type = named[1] if (named := _NAMED_HEADER.match(text)) else ""
            begun.last = line
            self.waiting.add(origin)
            return True
        if found := _FILE.match(text) or _BOXED.match(text):
            file = found["file"]
            function = (found["function"] or "").strip()
            frame = Frame(file, int(found["line"]), function, user=is_user_code(file))
            self._frame(origin, frame, indented=text.startswith("  "))
            self._stream(origin).last = line
            self._stream(origin).depth = _depth_of(text)
            return True
        stream = self._streams.get(origin)
        if _BOXED_SOURCE.match(text) and (stream is None or stream.state != "box"):
            self._stream(origin).begin("box")
            self._stream(origin).last = line
            self.waiting.add(origin)
            return True
        if stream is not None:
            return self._continue(origin, stream, text, line, (record, mild))
        if not mild:
            self._end(origin, text, line, _FINAL.match)
        return False

    def close(self, line: int) -> None:
        """Report the tracebacks that the log, which ends after ``line``, does not contain to their end."""
        for origin, stream in list(self._streams.items()):
            has_stack = stream.state == "box" or (stream.state == "stack" and (stream.frames or stream.type))
            if has_stack and line - stream.last <= _NEAR_END:
                frames = tuple(stream.frames)[::-1]
                self._note(origin, ParsedException(UNFINISHED, stream.type, "", frames), stream.last)

    def pass_over(self) -> None:
        """Count a line of another process; tracebacks without a new line for too long end."""
        self._patience += 1
        if self._patience > _PATIENCE:
            for other in self.waiting:
                self._streams[other].state = ""
            self.waiting.clear()

    def _frame(self, origin: LineOrigin, frame: Frame, *, indented: bool) -> None:
        stream = self._stream(origin)
        stream.indented = indented
        self.waiting.add(origin)
        if stream.state in ("fatal", "dying") and stream.found is not None:
            stream.found.add_frame(frame)
            return
        if stream.state not in ("stack", "box"):
            stream.begin("stack")
        if not stream.frames or stream.frames[-1] != frame:
            stream.frames.append(frame)
        stream.framed = True

    def _continue(
        self, origin: LineOrigin, stream: _TracebackState, text: str, line: int, how: tuple[bool, bool]
    ) -> bool:
        record, mild = how
        if stream.state == "stack" and 0 < _depth_of(text) < stream.depth and _FINAL.match(text.lstrip()):
            text = text.lstrip()  # the traceback as a whole is indented
        if self._is_stack(stream, text, record) or self._is_link(origin, stream, text):
            stream.last = line
            return True
        final = _final_of(stream, record)
        if not (mild and not stream.frames) and self._end(origin, text, line, final):
            return False
        stream.framed = False
        if stream.state == "message":
            self._message(origin, stream, text, record)
        elif stream.state in ("fatal", "dying") and text.startswith("Current thread ") and stream.found is not None:
            stream.state = "dying"  # of faulthandler's stacks, that of the current thread counts
            stream.found.drop_frames()
        elif stream.state == "dying":
            stream.state = ""
            self.waiting.discard(origin)
        return False

    @staticmethod
    def _is_stack(stream: _TracebackState, text: str, record: bool) -> bool:
        """Return whether a line is source code of a stack, markers below it, or the box around it."""
        if record and not text.startswith("  "):
            return False
        if stream.state == "box" and text.lstrip()[:1] in _DRAWN:
            return True
        if stream.state != "stack" or not stream.frames:
            return False
        if text[:1] in (" ", "\t") or text.startswith("[Previous line repeated "):
            stream.read_code(text)
            return True
        # Where the indentation was lost, one line of source code follows a frame.
        is_source = stream.framed and not _final_of(stream, record)(text)
        stream.framed = stream.framed and not is_source
        return is_source

    def _is_link(self, origin: LineOrigin, stream: _TracebackState, text: str) -> bool:
        """Process a line between two exceptions of which one led to the other; return whether it is."""
        if stream.found is None or stream.state == "stack":
            return False
        if _LINK.search(text):
            stream.linked = True
        elif _INNER.search(text):
            stream.nested = True
        else:
            return False
        self.waiting.add(origin)
        return True

    def _end(self, origin: LineOrigin, text: str, line: int, final: _Match) -> bool:
        if fatal := _FATAL.match(text):
            self._stream(origin).begin("fatal")
            self._keep(origin, ParsedException("python.fatal", "", fatal["message"], ()), line)
            return True
        if ": error: " in text and (usage := _USAGE.match(text)):
            self._stream(origin).begin("")
            self._keep(
                origin, ParsedException("python.exception", "argparse.ArgumentError", usage["message"], ()), line
            )
            self.waiting.discard(origin)
            return True
        match = final(text) or ("message: " in text and _RECORDED.match(text)) or self._decorated(origin, text)
        if not match:
            return False
        stream = self._stream(origin)
        frames, code = tuple(stream.frames)[::-1], stream.code
        stream.begin("message")
        raised = ParsedException("python.exception", match["type"], match["message"] or "", frames, code)
        self._keep(origin, raised, line)
        return True

    def _decorated(self, origin: LineOrigin, text: str) -> re.Match[str] | None:
        """Match an exception with its message in quotes or the like; within another message, it is part of that."""
        stream = self._streams.get(origin)
        if (stream is not None and stream.state) or not (margin := _DECORATED.match(text)):
            return None
        found = _FINAL.match(text[margin.end() :].rstrip(" │*`\"'”]"))
        return found if found and found["message"] else None

    def _keep(self, origin: LineOrigin, raised: ParsedException, line: int) -> None:
        stream = self._stream(origin)
        if stream.nested and stream.found is not None:
            stream.found.add_cause(raised, line)
        elif stream.linked and stream.found is not None:
            stream.found.add_later(raised.type, raised.message)
        else:
            stream.found = self._note(origin, raised, line)
        stream.linked, stream.nested = False, _CARRIER.search(raised.type) is not None
        self.waiting.add(origin)

    def _message(self, origin: LineOrigin, stream: _TracebackState, text: str, record: bool) -> None:
        """Process a line after a traceback: part of the message or its end. A chain may follow an empty line."""
        stream.lines += 1
        stream.plain += text[:1] not in (" ", "\t")
        if record or stream.lines > MOST_LINES or stream.plain > MOST_PLAIN or _ENDS_MESSAGE.match(text):
            stream.state = ""
            self.waiting.discard(origin)
        elif text.strip() and stream.found is not None and not stream.linked:
            stream.found.add_message(text)

    def _stream(self, origin: LineOrigin) -> _TracebackState:
        stream = self._streams.get(origin)
        if stream is None:
            if len(self._streams) >= MOST_STREAMS:
                gone = next(iter(self._streams))
                del self._streams[gone]
                self._logged = None if self._logged == gone else self._logged
                self.waiting.discard(gone)
            stream = self._streams[origin] = _TracebackState()
        return stream


def _depth_of(text: str) -> int:
    return len(text) - len(text.lstrip())


def _final_of(stream: _TracebackState, record: bool) -> _Match:
    if stream.state != "stack" or not stream.framed or record:
        return _FINAL.match
    return _MARGIN_FINAL.match if stream.indented else _ANY_FINAL.match


_DRAWN = tuple("│╭╰❱┃")
_PATIENCE = 200
"""Maximum number of lines of other processes between two lines of one traceback."""
