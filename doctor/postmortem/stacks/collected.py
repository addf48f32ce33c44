"""The processes in a file of stacks, with all their samples."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from doctor.core.facts import Frame, StackThread
from doctor.core.facts.attached import StackSource
from doctor.core.stack_dumps.py_spy import (
    MOST_PIDS,
    RANK_NAMES,
    is_traces,
    pid_of_traces,
    rank_locals_of_traces,
    threads_of_traces,
)
from doctor.core.stack_dumps.threads import MOST_FRAMES, MOST_NATIVE, MOST_THREADS, dumped_thread, is_training_thread
from doctor.postmortem.stacks.dump_text import read_lines, streams_of
from doctor.postmortem.stacks.headings import host_of
from doctor.postmortem.stacks.line_kinds import (
    AsideLine,
    FrameLine,
    LineKind,
    LocalLine,
    NativeLine,
    ProcessLine,
    RefusalLine,
    SampleLine,
    ThreadLine,
    VariableLine,
)
from doctor.postmortem.stacks.py_spy_text import PARENT

MOST_PROCESSES = 1 << 16
MOST_SAMPLES = 64
"""Samples of one process that are kept, the newest ones."""
_BOOTSTRAP = ("threading.py", ("_bootstrap", "_bootstrap_inner"))
_NATIVE_STARTS = frozenset(
    """
    start_thread clone clone3 __clone __clone3 __GI___clone pythread_wrapper t_bootstrap thread_run
    std::execute_native_thread_routine execute_native_thread_routine c10::ThreadPool::main_loop
    gloo::transport::tcp::Loop::run
    """.split()  # noqa: SIM905 - shorter
)
"""Functions that threads other than the main one begin with: glibc's (nptl/pthread_create.c), CPython's
(Python/thread_pthread.h, Modules/_threadmodule.c), libstdc++'s (src/c++11/thread.cc) and torch's."""
_WAITING_FILES = ("threading.py", "queue.py", "selectors.py", "multiprocessing/connection.py")
_AT_EXIT = "_shutdown"
"""The function of threading that the main thread waits in at the end of the program."""
NUMBER = re.compile(r"\d{1,7}", re.ASCII)
_DECODER = json.JSONDecoder()


@dataclass
class DumpedThread:
    """A thread while its lines are read."""

    line: ThreadLine
    frames: list[Frame] = field(default_factory=list)
    native: list[str] = field(default_factory=list)
    inside: list[str] = field(default_factory=list)
    """Native functions after the last Python frame, outermost first."""
    is_started: bool = False
    """Whether native code shows that it is not the main thread."""

    def add(self, kind: FrameLine | NativeLine) -> None:
        """Add a frame."""
        self.is_started = self.is_started or (isinstance(kind, NativeLine) and kind.function in _NATIVE_STARTS)
        if isinstance(kind, FrameLine):
            if len(self.frames) < MOST_FRAMES:
                self.frames.append(kind.frame)
            self.inside.clear()
        elif self.line.outermost_first:
            if len(self.inside) < MOST_FRAMES:
                self.inside.append(kind.function)
        elif not self.frames and len(self.native) < MOST_NATIVE:
            self.native.append(kind.function)

    @property
    def is_assumed(self) -> bool:
        """Whether the dump shows frames without the header of their thread."""
        return self.line.is_main and not self.line.name and not self.line.number and not self.line.native_id

    @property
    def may_be_main(self) -> bool:
        """Whether its outermost frame may be that of a program: threads begin elsewhere, and cut stacks end within."""
        if not self.frames or self.is_started:
            return False
        outermost = self.frames[0] if self.line.outermost_first else self.frames[-1]
        # py-spy knows the names of threads, and the main thread is seldom renamed.
        is_named = self.line.active is not None and bool(self.line.name)
        is_other = outermost.file.endswith(_WAITING_FILES) and outermost.function != _AT_EXIT
        return not is_other and (not is_named or outermost.function == "<module>")

    @property
    def trains(self) -> bool:
        """Whether a framework trains in it."""
        return is_training_thread(self.line.name, ((frame.file, frame.function) for frame in self.frames))

    def finished(self, *, is_main: bool) -> StackThread:
        """Return the thread."""
        line = self.line
        reverse = line.outermost_first
        return dumped_thread(
            self.frames[::-1] if reverse else self.frames,
            self.inside[::-1] if reverse else self.native,
            name=line.name,
            native_id=line.native_id,
            is_main=is_main,
            active=line.active,
            holds_gil=line.holds_gil,
        )


@dataclass
class DumpedProcess:
    """A process of a dump, of which there may be several in a file.

    ``file`` and ``label`` (of its lines) say where it was read; ``order`` counts the processes of a file. ``source``:
    how its stacks were collected, and ``tool`` the one that printed them. ``seconds``: between its samples, if the dump
    says so.
    """

    file: str
    label: str = ""
    order: int = 0
    pid: int = 0
    command: str = ""
    host: str = ""
    rank: int | None = None
    source: StackSource = ""
    tool: str = ""
    samples: list[tuple[StackThread, ...]] = field(default_factory=list)
    seconds: float | None = None
    variables: dict[str, str] = field(default_factory=dict)
    rank_locals: dict[str, int] = field(default_factory=dict)
    refused: str = ""
    identity: str = ""
    """Of its main thread, in dumps that show no PID."""

    @property
    def main(self) -> StackThread | None:
        """The main thread of the newest sample."""
        return next((thread for thread in self.samples[-1] if thread.is_main), None) if self.samples else None


def read_stacks(text: str, file: str = "") -> list[DumpedProcess]:
    """Return the processes in the text of a file, in its order. Other text has none."""
    if text.lstrip()[:1] == "[":
        found = list(_of_json(text, file))
        if found:
            return found
    processes = [one for label, lines in streams_of(text) for one in _Assembler(file, label).processes(lines)]
    processes = _without_parts(processes)
    for order, process in enumerate(processes):
        process.order = order
    return processes[:MOST_PROCESSES]


def _without_parts(processes: list[DumpedProcess]) -> list[DumpedProcess]:
    """The processes without what is only a part of another one: the rest of a dump whose beginning was cut off, and
    the native stack of the one process whose Python stack another tool printed."""
    identified = [one for one in processes if one.main is not None and (one.pid or one.rank is not None)]
    tools = {one.tool for one in identified if one.main and one.main.frames}

    def is_part(one: DumpedProcess) -> bool:
        if one.pid or one.rank is not None or one.command or one.refused:
            return False
        main = one.main
        return main is None or (not main.frames and len(identified) == 1 and one.tool not in tools)

    return [one for one in processes if not is_part(one)] if identified else processes


def _of_json(text: str, file: str) -> Iterator[DumpedProcess]:
    """Yield the processes of one or several documents of py-spy; lines between them are of its errors."""
    place = 0
    by_pid: dict[int, DumpedProcess] = {}
    while (place := text.find("[", place)) >= 0 and len(by_pid) < MOST_PROCESSES:
        try:
            document, end = _DECODER.raw_decode(text, place)
        except (ValueError, RecursionError):
            place = text.find("\n", place) if "\n" in text[place:] else len(text)
            continue
        place = end
        if is_traces(document) and document:
            pid = pid_of_traces(document) or 0
            process = by_pid.get(pid) if pid else None
            if process is None:
                process = DumpedProcess(file, order=len(by_pid), pid=pid, source="py-spy")
                by_pid[pid or -len(by_pid) - 1] = process
            process.samples.append(threads_of_traces(document))
            process.rank_locals.update(rank_locals_of_traces(document))
    yield from by_pid.values()


class _Assembler:
    """Builds processes from the lines of one stream."""

    def __init__(self, file: str, label: str) -> None:
        self._file, self._label = file, label
        self._found: list[DumpedProcess] = []
        self._process: DumpedProcess | None = None
        self._threads: list[DumpedThread] = []
        self._heading: ProcessLine | None = None
        self._variables: dict[str, str] = {}
        self._variables_first = False
        self._locals: dict[str, int] = {}
        self._seconds: float | None = None
        self._parent = ""

    def processes(self, lines: Sequence[str]) -> list[DumpedProcess]:
        """Return the processes of the stream; dumps of one PID are samples of one process."""
        for line in read_lines(lines):
            if line.kind is not None:
                self._take(line.kind, line.source)
        self._end_sample()
        self._give_variables()
        _share_stacks(self._found)
        found = [part for process in self._found for part in _parted(process)]
        return _merged(found)

    def _take(self, kind: LineKind, source: StackSource) -> None:
        if isinstance(kind, (FrameLine, NativeLine)):
            self._add_frame(kind, source)
        elif isinstance(kind, ThreadLine):
            self._begin_thread(kind, source)
        elif isinstance(kind, ProcessLine):
            self._begin(kind)
        elif isinstance(kind, RefusalLine):
            self._refuse(kind, source)
        elif isinstance(kind, AsideLine):
            self._aside(kind)
        else:
            self._note(kind)

    def _note(self, kind: LineKind) -> None:
        if isinstance(kind, SampleLine):
            self._end_sample()
            self._seconds = kind.seconds
        elif isinstance(kind, VariableLine) and kind.name == PARENT:
            self._parent = kind.value
        elif isinstance(kind, VariableLine):
            self._variables_first = self._variables_first or not self._found
            self._variables[kind.name] = kind.value
        elif isinstance(kind, LocalLine) and kind.name in RANK_NAMES and NUMBER.fullmatch(kind.value):
            # Frames come innermost first: the outermost function, which was given its rank, comes last.
            self._locals[kind.name] = int(kind.value)

    def _begin(self, line: ProcessLine) -> None:
        """A heading of a script may precede the one of the tool for the same process."""
        self._end_sample()
        before = self._heading
        if before is not None and not (before.pid and line.pid and before.pid != line.pid):
            line = ProcessLine(
                line.pid or before.pid,
                line.command or before.command,
                before.rank if line.rank is None else line.rank,
                line.host or before.host,
                before.source if before.source in ("debug-server", "ray") else line.source or before.source,
            )
        self._heading = line
        self._process = None

    def _aside(self, line: AsideLine) -> None:
        """Gdb begins with a process or has left it."""
        if self._threads:
            self._end_sample()
            self._process = None
        if line.pid and self._heading is None and self._process is None:
            before = self._found[-1] if self._found else None
            if before is not None and before.pid == line.pid:
                return
            self._heading = ProcessLine(line.pid, source="gdb")

    def _begin_thread(self, line: ThreadLine, source: StackSource) -> None:
        if self._threads and self._is_of_next(line, source):
            self._end_sample()
            if source != "faulthandler":
                self._process = None
        if source == "py-spy" and len(self._threads) == 1 and self._threads[0].is_assumed:
            self._threads.clear()  # the end of a stack whose beginning was cut off
        self._ensure(source)
        if len(self._threads) < MOST_THREADS:
            self._threads.append(DumpedThread(line))

    def _is_of_next(self, line: ThreadLine, source: StackSource) -> bool:
        """Whether a thread belongs to another dump than those before it."""
        if source == "py-spy":
            return line.is_main and any(thread.line.is_main for thread in self._threads) and self._is_unnamed()
        if source == "gdb":
            numbers = [thread.line.number for thread in self._threads]
            if len(numbers) > 1 and numbers[0] < numbers[1]:
                return line.number <= numbers[-1]
            return line.number >= numbers[-1] and (len(numbers) > 1 or numbers[-1] == line.number)
        before = [thread.line for thread in self._threads]
        if line.is_current and any(one.is_current for one in before):
            return True
        return bool(line.identity) and any(one.identity == line.identity for one in before)

    def _is_unnamed(self) -> bool:
        return self._process is not None and not self._process.command

    def _add_frame(self, kind: FrameLine | NativeLine, source: StackSource) -> None:
        if isinstance(kind, NativeLine) and kind.is_innermost:
            last = self._threads[-1] if self._threads else None
            if last is None or last.native or last.frames:
                if last is not None and last.line.number:
                    return  # a second backtrace of the same thread
                self._end_sample()
                self._process = None
                self._begin_thread(ThreadLine(is_main=True), source)
        if not self._threads:
            if not isinstance(kind, FrameLine) and source != "gdb":
                return
            self._begin_thread(ThreadLine(is_main=True), source)
        self._threads[-1].add(kind)

    def _ensure(self, source: StackSource) -> DumpedProcess:
        if self._process is None:
            if not self._variables_first:
                self._give_variables()
            heading = self._heading or ProcessLine()
            pid = heading.pid if heading.pid < MOST_PIDS else 0
            self._process = DumpedProcess(
                self._file,
                self._label,
                pid=pid,
                command=heading.command,
                host=heading.host,
                rank=heading.rank,
                source=heading.source or source,
                tool=source,
            )
            if self._parent:
                self._process.variables[PARENT] = self._parent
            self._found.append(self._process)
            self._heading, self._parent = None, ""
            if self._variables_first:
                self._give_variables()
        return self._process

    def _give_variables(self) -> None:
        if self._variables and self._found:
            process = self._found[-1]
            process.variables.update(self._variables)
            process.host = process.host or host_of(process.variables)
            self._variables = {}

    def _refuse(self, line: RefusalLine, source: StackSource) -> None:
        self._end_sample()
        process = self._ensure(source)
        process.refused = process.refused or line.reason

    def _end_sample(self) -> None:
        threads, process = self._threads, self._process
        if threads and process is not None:
            process = self._process = self._of_identity(process, threads)
            process.samples.append(_finished(threads))
            process.seconds = self._seconds if process.seconds is None else process.seconds
            process.rank_locals.update(self._locals)
            if not process.pid:
                main = _main_of(threads)
                process.pid = main.line.native_id if main else 0
            del process.samples[:-MOST_SAMPLES]
        self._threads, self._locals = [], {}

    def _of_identity(self, process: DumpedProcess, threads: Sequence[DumpedThread]) -> DumpedProcess:
        """The process of a dump by faulthandler: those of several processes in one file differ in their main thread."""
        main = _main_of(threads)
        identity = main.line.identity if main is not None and process.source == "faulthandler" else ""
        if not identity or process.identity in ("", identity):
            process.identity = process.identity or identity
            return process
        same = (one for one in self._found if one.identity == identity)
        other = next(same, None) or DumpedProcess(self._file, self._label, source="faulthandler", identity=identity)
        if other not in self._found:
            self._found.append(other)
        return other


def _finished(threads: Sequence[DumpedThread]) -> tuple[StackThread, ...]:
    """The threads of a sample, with the one marked that trains: a framework's thread, else the main thread."""
    main = next((one for one in threads if one.trains), None) or _main_of(threads)
    return tuple(thread.finished(is_main=thread is main) for thread in threads)


def _main_of(threads: Sequence[DumpedThread]) -> DumpedThread | None:
    named = (one for one in threads if one.line.is_main and not (one.is_assumed and one.is_started))
    main = next(named, None)
    if main is not None or any(thread.line.number for thread in threads):
        return main
    # faulthandler prints the main thread last, as does py-spy without names.
    own = [thread for thread in threads if thread.may_be_main]
    return own[-1] if own else None


def _share_stacks(processes: Sequence[DumpedProcess]) -> None:
    """Give processes without frames the stack of the next one: people list the headings of equal stacks together."""
    for process, following in zip(processes[-2::-1], processes[:0:-1], strict=False):
        own, shared = process.main, following.main
        is_heading_alone = len(process.samples) == 1 and len(process.samples[0]) == 1 and not process.command
        if is_heading_alone and own and shared and not own.frames and not own.native and not following.command:
            joined = dumped_thread(
                shared.frames, shared.native, name=own.name, native_id=own.native_id, is_main=True, active=own.active
            )
            process.samples = [(joined,)]


def _parted(process: DumpedProcess) -> Iterator[DumpedProcess]:
    """Yield the processes of a dump by pystack, which prints no line between processes."""
    if process.source != "pystack" or len(process.samples) != 1:
        yield process
        return
    threads = process.samples[0]
    mains = [place for place, thread in enumerate(threads) if thread.frames and not _is_started(thread)]
    if len(mains) < 2:
        yield process
        return
    first = mains[0] == 0
    starts = mains if first else [0, *(place + 1 for place in mains[:-1])]
    ends = [*starts[1:], len(threads)]
    for main, start, end in zip(mains, starts, ends, strict=True):
        own = tuple(
            dumped_thread(
                one.frames,
                one.native,
                name=one.name,
                native_id=one.native_id,
                is_main=place == main,
                holds_gil=one.holds_gil,
            )
            for place, one in enumerate(threads[start:end], start)
        )
        yield DumpedProcess(
            process.file,
            process.label,
            pid=threads[main].native_id,
            host=process.host,
            source="pystack",
            samples=[own],
        )


def _is_started(thread: StackThread) -> bool:
    file, functions = _BOOTSTRAP
    return bool(thread.frames) and thread.frames[-1].file.endswith(file) and thread.frames[-1].function in functions


def _merged(processes: Iterable[DumpedProcess]) -> list[DumpedProcess]:
    """Processes with the samples of all their dumps in a stream; one without a PID is never that of another dump."""
    kept: list[DumpedProcess] = []
    known: dict[tuple[object, ...], DumpedProcess] = {}
    for process in processes:
        # Processes of containers often have the same PID.
        key = (process.host, process.rank, process.pid)
        before = known.get(key) if process.pid or process.rank is not None else None
        if before is None:
            kept.append(process)
            known[key] = process
        else:
            join_samples(before, process)
    return kept


def join_samples(first: DumpedProcess, later: DumpedProcess) -> None:
    """Add the samples and what else is known of a process from a later dump."""
    first.samples = [*first.samples, *later.samples][-MOST_SAMPLES:]
    first.variables = {**later.variables, **first.variables}
    first.rank_locals = {**later.rank_locals, **first.rank_locals}
    first.rank = later.rank if first.rank is None else first.rank
    first.command = first.command or later.command
    first.refused = first.refused or later.refused
    first.seconds = later.seconds if first.seconds is None else first.seconds
