"""Scanner that turns logs of any kind and size into events.

The bytes are searched for the cues of all known messages at once, and only lines that contain one, or continue a
traceback or a table, are parsed.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path

from doctor.analysis.logs.root_event import CRASH, EXCEPTION
from doctor.core.errors import UnusableError
from doctor.core.facts import Event, LogFile
from doctor.core.files.read_deadline import NO_DEADLINE, ReadBudget, ReadDeadline
from doctor.core.files.timed_file import TimedFile
from doctor.postmortem.logs import elastic_table, printed_findings, rank_attribution, software_messages, tracebacks
from doctor.postmortem.logs.deduplication import DeferredLine, ProgressBarStates, RepeatedInfoLines, RepeatedLines
from doctor.postmortem.logs.event_store import EventStore, ParsedException, StoredEvent, Values
from doctor.postmortem.logs.exports import PlainLines
from doctor.postmortem.logs.lines import LONG, blocks_of, text_of, windows_of
from doctor.postmortem.logs.outcome_marks import marks
from doctor.postmortem.logs.outcome_marks import step_lines as step_lines_module
from doctor.postmortem.logs.outcome_marks.cue_budget import CueBudget
from doctor.postmortem.logs.pattern_index import IndexedPattern, index
from doctor.postmortem.logs.possible_causes import Possibilities
from doctor.postmortem.logs.prefixes import UNKNOWN_ORIGIN, LineOrigin, PrefixedLine, PrefixStyle, parse_line, style_of
from doctor.postmortem.logs.timestamps import Calendar
from doctor.postmortem.sandbox.decompression import Readable, Unpacked

SAMPLED = 1000
"""Lines at the beginning of a log from which its prefixes are inferred; of later blocks :data:`SAMPLED_LATER` each."""
SAMPLED_LATER = 60
MANY = 16
"""Exceptions of one process from which on those that differ only in numbers are counted as repetitions."""
NEAR = 8
"""Maximum number of lines without a prefix that may continue one with a prefix."""
_LINE_FEED, _RETURN = b"\n\r"
_HEAD = 400
TAIL_BYTES = 1 << 14
"""Bytes at the end of a log that are searched again for marks."""
MOST_NOT_READ = 2000
"""Lines with irrelevant cues after which it is cheaper to search for fewer cues."""
LINES_PER_CLOCK_CHECK = 16
WHAT = "end.what"
"""The text of a C++ exception that nothing caught."""
HARMLESS = ".harmless"
"""Suffix of the kinds of messages that look like errors and are not."""
MOST_HOSTS = 4096
"""Maximum number of hosts of one log that are kept."""
_FAR = 1 << 16
LONG_TRACEBACK = 400
"""Maximum number of lines of a traceback, including those of other processes in between."""


def read_log(path: Path, name: str, budget: ReadBudget | None = None) -> tuple[list[Event], LogFile]:
    """Return the events and the description of a log, compressed or not. Raises :class:`UnusableError`."""
    try:
        with TimedFile(path) as stream:
            size, modified = stream.status.st_size, stream.status.st_mtime
            deadline = budget.for_file(size) if budget is not None else NO_DEADLINE
            return read_stream(stream, size, name, modified, deadline)
    except OSError as error:
        raise UnusableError(f"{name} can't be read: {error.strerror or error}") from error


def read_stream(
    stream: Readable, size: int, name: str, modified: float | None = None, deadline: ReadDeadline = NO_DEADLINE
) -> tuple[list[Event], LogFile]:
    """Read the first ``size`` bytes of an open log, last written at ``modified`` (Unix time)."""
    pieces = Unpacked(stream, size, deadline)
    scan = _LogScan(name, modified, deadline)
    lines = PlainLines(pieces)
    scan.read(lines)
    if scan.is_stopped or pieces.is_stopped:
        seconds = f"{deadline.seconds:.3g} s"
        return scan.result(f"stopped reading {name} after {seconds} ({pieces.taken} of {size} bytes)")
    return scan.result(pieces.cut or lines.cut)


def read_lines(lines: Iterable[str], name: str) -> tuple[list[Event], LogFile]:
    """Read the lines of a log; return its events and its description."""
    scan = _LogScan(name, None)
    scan.read(_pieces_of(lines))
    return scan.result(None)


def _pieces_of(lines: Iterable[str]) -> Iterator[bytes]:
    rest = iter(lines)
    while batch := list(islice(rest, 10_000)):
        yield b"".join(line.encode("utf-8", "replace").rstrip(b"\n") + b"\n" for line in batch)


_COLLAPSED = b"last): "
"""What a line has that holds a traceback as a whole."""
_GLUED = re.compile(r"\]Traceback \(most recent call last\)")
"""A traceback after a progress bar without a line break: the bar is a message of its own."""
_CODE = re.compile(
    r"\s*(?:\d+ +)?(?:raise [\w.]+\(|assert |print\(|(?:\+{1,3} )?(?:echo|printf) |-+> \d+ |>>> |//|"
    r"#(?!SBATCH|PBS|BSUB|\$| Out of bounds)|(?:[\w.]+\.)?(?:log|logger|logging|warnings)\.\w+\(|"
    r"(?:el)?if .*:$|except .*:$|return (?:[\w.]+\(|f?[\"'])|[\w.]+ = r?f?[\"']|│ +(?:❱ +)?\d+ │)"
)
"""Printed source code: messages in it were not logged."""
_NUMBERS = re.compile(r"\d+")
_OF_OTHERS = ("elastic.", "exit.")
"""Kinds of messages of a launcher about its processes."""
_WITH_RANK = ("pl.init_dist", "torch.nccl.storekey", "torch.nccl.init_opts", "ddp.diff_shape")
"""Messages whose field ``rank`` is that of their own process."""


class _LogScan:
    def __init__(self, name: str, modified: float | None, deadline: ReadDeadline = NO_DEADLINE) -> None:
        self._name = name
        self._deadline = deadline
        self.is_stopped = False
        self._calendar = Calendar(modified)
        self._style = PrefixStyle()
        self._index = index()
        self._processes = rank_attribution.LogProcesses(name)
        self._store = EventStore()
        self._marks = marks.Marks()
        self._budget = CueBudget(self._index.may_mark)
        self._cues = self._index.cues
        self._not_read = 0
        self._possibilities = Possibilities()
        self._recognized = self._steps = 0
        self._known: set[int] = set()
        self._tracebacks = tracebacks.Tracebacks(self._raised)
        self._tables = elastic_table.ElasticTables(self._entry)
        self._own = printed_findings.OwnFindings(self._own_finding)
        self._waiting = (self._tracebacks.waiting, self._tables.waiting, self._own.waiting)
        self._often = RepeatedInfoLines()
        self._bars = ProgressBarStates()
        self._crowd = RepeatedLines()
        self._number = 1
        self._head = b""
        self._bytes = 0
        self._ended = True
        self._first_at: float | None = None
        self._last_at: float | None = None
        self._noticed: set[tuple[LineOrigin, int | None]] = set()
        self._heads: dict[LineOrigin, bytes] = {}
        self._stamps: dict[LineOrigin, tuple[int, float]] = {}
        self._raised_last: StoredEvent | None = None
        self._neighbour = (-NEAR, PrefixedLine(UNKNOWN_ORIGIN, None, "", ""))

    def read(self, pieces: Iterable[bytes]) -> None:
        """Read the log to its end."""
        last, start = b"", self._number
        for block in blocks_of(self._counted(pieces)):
            if last:
                self._count_steps(last, start, is_last=False)
            start = self._number
            self._sample(block, SAMPLED if not last else SAMPLED_LATER)
            self._search(block)
            last = block
            if self.is_stopped:
                break
        self._count_steps(last, start, is_last=True)
        self._read_tail(last)
        self._catch_up()
        self._tables.close()
        self._tracebacks.close(self._number)
        for line in last[-SAMPLED_LATER * 200 :].splitlines()[-SAMPLED_LATER:]:
            self._notice(text_of(line[:2000]))
        self._processes.settle()

    def result(self, cut: str | None) -> tuple[list[Event], LogFile]:
        """Return the events and the description of the log."""
        self._count_often()
        self._recognize_exceptions()
        # torchrun's table may repeat an exception that the process itself logged.
        own = {_essence(kept) for kept in self._store if kept.origin.tag != elastic_table.TAG}
        events = [
            kept.event(self._name, self._processes)
            for kept in self._store
            if kept.origin.tag != elastic_table.TAG or _essence(kept) not in own
        ]
        lines = self._number - self._ended
        # Ranks that logged a line, without those only named by a launcher.
        stored = (
            (kept.origin, kept.weak_rank)
            for kept in self._store
            if kept.origin.tag != elastic_table.TAG and not kept.kind.startswith(_OF_OTHERS)
        )
        logged = {self._processes.of(*one).rank for one in (*self._noticed, *stored)}
        ranks = tuple(sorted(rank for rank in logged if rank is not None))
        recognized = min(self._recognized, lines)
        hosts = tuple(sorted(self._processes.hosts)[:MOST_HOSTS])
        file = LogFile(self._name, lines, self._bytes, self._first_at, self._last_at, ranks, cut, recognized, hosts)
        raised = {event.line for event in events if event.kind in (EXCEPTION, CRASH)}
        found = (mark for mark in self._marks.events(self._name, self._processes) if mark.line not in raised)
        return sorted([*events, *found], key=lambda event: event.line), file

    def _recognize_exceptions(self) -> None:
        """Store the known messages of exceptions whose text no pattern matched."""
        stored = list(self._store)
        matched = {kept.line for kept in stored if kept.kind in self._index.declared}
        for kept in stored:
            if kept.kind in (EXCEPTION, WHAT) and kept.line not in matched:
                text, file = kept.values.get("message", kept.text), next((frame.file for frame in kept.frames), "")
                found = software_messages.message_of_exception(text, file)
                if found is not None:
                    event = StoredEvent(found.kind, kept.text, kept.line, kept.origin, kept.at, found.values)
                    event.weak_rank, event.count, event.last_at = kept.weak_rank, kept.count, kept.last_at
                    self._store.keep(event, found.values)

    def _counted(self, pieces: Iterable[bytes]) -> Iterator[bytes]:
        for piece in pieces:
            self._bytes += len(piece)
            yield piece

    def _sample(self, block: bytes, most: int) -> None:
        lines = [text_of(_first_part(line)) for line in block[: most * 400].split(b"\n", most)[:most] if line.strip()]
        if len(lines) >= SAMPLED_LATER // 3 or most == SAMPLED:
            self._style = style_of(parse_line(line, self._calendar).text for line in lines)
        for line in lines:
            self._notice(line)

    def _notice(self, line: str) -> None:
        parsed = parse_line(line, self._calendar, self._style)
        if parsed.origin != UNKNOWN_ORIGIN or parsed.weak_rank is not None:
            self._processes.learn(parsed)
            if len(self._noticed) < rank_attribution.MOST:
                self._noticed.add((parsed.origin, parsed.weak_rank))
        if parsed.at is not None:
            self._first_at = parsed.at if self._first_at is None else min(self._first_at, parsed.at)
            self._last_at = parsed.at if self._last_at is None else max(self._last_at, parsed.at)

    def _search(self, block: bytes) -> None:
        if self._not_read > MOST_NOT_READ:  # stop the search for cues whose lines are not read anyway
            self._not_read = 0
            self._cues = self._index.cues.without(self._index.marks & self._budget.spent)
        if self._often.is_full:
            self._count_often()
        hits = deque(self._index.hits(block, self._cues))
        position, size = 0, len(block)
        returns = b"\r" in block
        tracebacks_wait, tables_wait, own_waits = self._waiting
        lines = 0
        while position < size:
            lines += 1
            if lines % LINES_PER_CLOCK_CHECK == 1 and self._deadline.is_over:
                self.is_stopped = True
                break
            waits = bool(tracebacks_wait or tables_wait or own_waits)
            if waits:
                start = position
            elif hits:
                hit = hits[0][1]
                start = block.rfind(b"\n", position, hit) + 1 or position
                start = (block.rfind(b"\r", start, hit) + 1 or start) if returns else start
            else:
                break
            self._number += block.count(b"\n", position, start)
            end = block.find(b"\n", start)
            end = size if end < 0 else end
            back = block.find(b"\r", start, end) if returns else -1
            end = end if back < 0 else back
            cues: dict[int, int] = {}
            while hits and hits[0][1] < end:
                cue, place = hits.popleft()
                cues.setdefault(cue, place - start)
            if not self._is_skipped(block, start, end, cues, waits):
                self._head = _line_head(block, start) if returns else b""
                self._line(block[start:end], cues)
            position = end
            if position < size:
                self._number += block[position] == _LINE_FEED
                position += 1
        self._number += block.count(b"\n", position)
        self._ended = block.endswith(b"\n")

    def _count_steps(self, block: bytes, start: int, *, is_last: bool) -> None:
        """Read the lines of a block that count steps; its first line has the number ``start``."""
        sample: list[tuple[bytes, bool]] = []
        for place, raw in step_lines_module.step_lines(block, self._steps, is_last=is_last):
            is_late = place > len(block) // 2
            number = self._number - block.count(b"\n", place) if is_late else start + block.count(b"\n", 0, place)
            self._steps += 1
            line = text_of(raw)
            parsed = parse_line(line, self._calendar, self._style)
            counts = not _CODE.match(parsed.body) and self._marks.read_step(parsed, line, number)
            sample.append((raw, counts and number not in self._known))
        self._recognized += len(self._known) + step_lines_module.estimate(block, sample)
        self._known.clear()

    def _read_tail(self, block: bytes) -> None:
        """Search the last lines of a log for marks whose cues are spent."""
        if not self._budget.spent:
            return
        tail = block[-TAIL_BYTES:].split(b"\n")
        for number, raw in enumerate(tail, self._number - len(tail) + 1):
            cues = {cue for cue, _, _ in self._index.cues.find(raw[:LONG])}
            marking = cues & self._index.may_mark
            if not raw or (marking and self._budget.active.issuperset(marking)):
                continue
            line = text_of(raw[:LONG])
            parsed = parse_line(line, self._calendar, self._style)
            messages = (message for cue in cues for message in self._index.messages[cue])
            is_harmless = any(one.kind.endswith(HARMLESS) and one.pattern.search(parsed.text) for one in messages)
            if not is_harmless and not _CODE.match(parsed.body):
                self._marks.read(parsed, line, number)

    def _line(self, line: bytes, cues: Mapping[int, int]) -> None:
        if len(line) <= LONG:
            self._read(line, cues)
            return
        order = sorted(cues, key=cues.__getitem__)
        for window, shown in windows_of(line, [cues[cue] for cue in order]):
            self._read(window, [order[place] for place in shown])

    def _is_skipped(self, block: bytes, start: int, end: int, cues: dict[int, int], waits: bool) -> bool:
        """Return whether a line need not be read now. ``waits``: a traceback or table is unfinished."""
        index = self._index
        if not cues:
            return not self._own.waiting and self._is_of_others(block, start)
        if not waits:
            if index.marks.issuperset(cues):
                is_spent = self._budget.active.isdisjoint(cues)
                self._not_read += is_spent
                return is_spent
            if index.bars.issuperset(cues):
                return self._recognize_if(
                    self._bars.keeps(DeferredLine(self._number, block[start : min(end, start + LONG)], cues))
                )
        if self._bars.is_waiting:
            self._catch_up()
        is_one_of_many = not waits and index.alone.isdisjoint(cues)
        return self._recognize_if(
            self._often.leaves_out(block, start, end, cues) or (is_one_of_many and self._crowd.leaves_out(cues))
        )

    def _recognize_if(self, is_known: bool) -> bool:
        """Count the current line as recognized, once."""
        if is_known:
            self._known.add(self._number)
        return is_known

    def _catch_up(self) -> None:
        for waiting in self._bars.take():
            now, self._number, self._head = self._number, waiting.number, b""
            self._line(waiting.line, waiting.cues)
            self._number = now

    def _is_of_others(self, block: bytes, start: int) -> bool:
        waiting = (*self._tracebacks.waiting, *self._tables.waiting)
        heads = tuple(self._heads.get(origin, b"") for origin in waiting)
        if block.startswith(heads, start):
            return False
        self._tracebacks.pass_over()
        self._tables.pass_over()
        return True

    def _read(self, raw: bytes, cues: Collection[int]) -> None:
        collapsed = tracebacks.lines_of_collapsed(text_of(raw)) if _COLLAPSED in raw else None
        for line in [raw] if collapsed is None else (one.encode() for one in collapsed):
            self._read_line(line, cues)

    def _read_line(self, raw: bytes, cues: Collection[int]) -> None:
        structured = any(self._waiting) or not self._index.structure.isdisjoint(cues)
        line = self._possibilities.without(text_of(raw), self._number)
        messages = [message for cue in cues for message in self._index.messages[cue] if message.may_be(line)]
        marked = not self._budget.active.isdisjoint(cues)
        software = [self._cues.texts[cue] for cue in self._index.software.intersection(cues)]
        if marked and not software:
            software = [cue for cue in software_messages.chatty_components() if cue in line]
        if not structured and not messages and not marked and not software:
            return
        parsed = parse_line(line, self._calendar, self._style)
        if self._head and parsed.origin == UNKNOWN_ORIGIN:
            # A progress bar that overwrites the line does not repeat the launcher's prefix.
            parsed = parsed._replace(origin=parse_line(text_of(self._head), self._calendar, self._style).origin)
        self._processes.learn(parsed)
        if structured and self._is_structure(parsed, raw) and not _GLUED.search(line):
            self._recognize_if(True)
            return
        if (messages or marked or software) and not _CODE.match(parsed.body):
            process = self._tables.process_of(parsed.origin)
            attributed = parsed if process is None else parsed._replace(origin=process)
            kinds = self._match(dict.fromkeys(messages), attributed, line)
            if software and not any(kind.endswith(HARMLESS) or kind in self._index.declared for kind in kinds):
                kinds += self._match_software(software, attributed, line)
            is_harmless = any(kind.endswith(HARMLESS) for kind in kinds)
            is_mark = marked and not is_harmless and self._marks.read(attributed, line, self._number)
            self._budget.charge(cues, is_mark=is_mark)
            self._recognize_if(bool(kinds) or is_mark)
        if parsed.record and parsed.origin != UNKNOWN_ORIGIN:
            self._neighbour = self._number, parsed

    def _is_structure(self, parsed: PrefixedLine, raw: bytes) -> bool:
        """Return whether a line is part of a traceback, table or finding, and not a message itself."""
        if self._own.read(parsed, self._number):
            return True
        if parsed.origin not in self._heads and len(self._heads) < tracebacks.MOST_STREAMS:
            # The bytes that all lines of a process begin with; none if they contain the time.
            body = parsed.body.encode()
            has_head = body and raw.endswith(body) and not parsed.record
            self._heads[parsed.origin] = raw[: -len(body)].rstrip() if has_head else b""
        origin, text = self._tables.read(parsed.origin, parsed.body, self._number) or (parsed.origin, parsed.body)
        if parsed.at is not None:
            # The line may begin a traceback, whose other lines have no time.
            if len(self._stamps) >= tracebacks.MOST_STREAMS:
                self._stamps.clear()
            self._stamps[origin] = self._number, parsed.at
        return self._tracebacks.read(origin, text, self._number, parsed.record, parsed.mild)

    def _match(self, messages: Iterable[IndexedPattern], parsed: PrefixedLine, line: str) -> list[str]:
        line = line if parsed.message is None else parsed.message
        texts = dict.fromkeys((parsed.text, parsed.body, line))
        kinds: list[str] = []
        for message in messages:
            for text in texts:
                if found := message.pattern.search(text):
                    values = tuple((key, value) for key, value in found.groupdict().items() if value is not None)
                    self._keep_message(message.kind, parsed, line if text is line else parsed.text, values)
                    kinds.append(message.kind)
                    break
        return kinds

    def _match_software(self, cues: Iterable[str], parsed: PrefixedLine, line: str) -> list[str]:
        found = software_messages.message_in_line(line, cues)
        if found is None:
            return []
        self._keep_message(found.kind, parsed, parsed.text, found.values)
        return [found.kind]

    def _keep_message(self, kind: str, parsed: PrefixedLine, text: str, values: Values) -> None:
        origin, at, weak = parsed.origin, parsed.at, parsed.weak_rank
        near, neighbour = self._neighbour
        if origin == UNKNOWN_ORIGIN and not parsed.record and self._number - near <= NEAR:
            # Messages of C++ continue a line with a prefix.
            origin, at, weak = neighbour.origin, neighbour.at, neighbour.weak_rank
        named = dict(values)
        event = StoredEvent(kind, text.strip(), self._number, _process_named(origin, kind, named), at, values)
        event.weak_rank = _number(named.get("rank")) if weak is None and kind in _WITH_RANK else weak
        if self._raised_last is not None and self._raised_last.line == self._number:
            self._raised_last.weak_rank = event.weak_rank
        self._store.keep(event, values)

    def _raised(self, origin: LineOrigin, raised: ParsedException, line: int) -> StoredEvent:
        """Store an exception; its text is the line that ends the traceback."""
        values: Values = (
            (("type", raised.type), ("message", raised.message)) if raised.type else (("what", raised.message),)
        )
        values += (("source_line", raised.code),) if raised.code else ()
        text = f"{raised.type}: {raised.message}" if raised.type and raised.message else raised.type or raised.message
        number, at = self._stamps.get(origin, (0, None))
        reach = LONG_TRACEBACK if origin != UNKNOWN_ORIGIN else 4 * len(raised.frames) + NEAR
        event = StoredEvent(raised.kind, text, line, origin, at if self._number - number <= reach else None, values)
        event.frames = list(raised.frames)
        self._raised_last = event
        same = self._store.like(event.kind, origin, values) if not raised.frames else None
        if same is not None:
            # Processes that write at the same time without a prefix: the frames were added to the first of them.
            same.again(event.at)
            return same
        where = tuple((frame.file, str(frame.line)) for frame in raised.frames[:1])
        many = self._store.number_of(event.kind, origin) >= MANY
        parsed = _NUMBERS.sub("0", raised.message) if many else raised.message
        return self._store.keep(event, ((raised.type, parsed), *where))

    def _entry(self, origin: LineOrigin, entry: elastic_table.Entry, line: int) -> None:
        values = tuple(entry.items())
        rank, local_rank, pid = (int(entry[name]) if name in entry else None for name in ("rank", "local_rank", "pid"))
        of = LineOrigin(rank, local_rank, entry.get("host") or origin.host, pid)
        at = self._calendar.dated(entry.get("time", ""))
        if rank is not None and local_rank is not None:
            self._processes.learn_place(of)
        shown = ", ".join(f"{name} {entry[name]}" for name in ("exitcode", "pid", "host") if name in entry)
        text = f"{shown}: {entry['message']}" if entry.get("message") else shown
        self._store.keep(StoredEvent("elastic.entry", text, line, of, at, values), values)

    def _own_finding(self, parsed: PrefixedLine, line: int, values: dict[str, str]) -> StoredEvent:
        """Store a printed finding. It is never a repetition, because its other lines may differ."""
        fields = tuple(values.items())
        event = StoredEvent(printed_findings.KIND, parsed.text.strip(), line, parsed.origin, parsed.at, fields)
        return self._store.keep(event, (*fields, ("line", str(line))))

    def _count_often(self) -> None:
        """Add lines that were only counted to the first event of their kind."""
        for head, cue, times in self._often.take():
            origin = parse_line(f"{text_of(head)} NCCL INFO -", self._calendar, self._style).origin
            for message in self._index.messages[cue]:
                self._store.repeat(message.kind, origin, times)
        for cue, times in self._crowd.take():
            for message in self._index.messages[cue]:
                self._store.repeat(message.kind, None, times)


def _process_named(origin: LineOrigin, kind: str, values: Mapping[str, str]) -> LineOrigin:
    """Return the process that a launcher reports as failed, or else the origin."""
    if origin.rank is not None or not kind.startswith(_OF_OTHERS):
        return origin
    local_rank, pid = _number(values.get("local_rank", values.get("lr"))), _number(values.get("pid"))
    return origin._replace(
        local_rank=origin.local_rank if local_rank is None else local_rank, pid=origin.pid if pid is None else pid
    )


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() and len(text) < 10 else None


def _essence(kept: StoredEvent) -> tuple[str | int | None, ...]:
    return kept.kind, kept.origin.rank, kept.values.get("type"), kept.values.get("message", "").partition("\n")[0]


def _first_part(line: bytes) -> bytes:
    return line[:2000].lstrip(b"\r").partition(b"\r")[0]


def _line_head(block: bytes, start: int) -> bytes:
    """Return the line up to its first carriage return, if an offset is after one."""
    if start == 0 or block[start - 1] != _RETURN:
        return b""
    line = block.rfind(b"\n", max(start - _FAR, 0), start) + 1
    if line == 0 and start > _FAR:
        return b""
    return _first_part(block[line : min(line + _HEAD, start)])
