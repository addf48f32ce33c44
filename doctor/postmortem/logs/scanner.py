"""Logs of any kind and size into events: a stream of bytes is searched for the texts of all known messages at once, and
only lines that hold one of them, or continue a traceback or a table, are looked at."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from doctor.core.errors import UnusableError
from doctor.core.facts import Event, LogFile
from doctor.core.files.read_deadline import NO_DEADLINE, ReadBudget, ReadDeadline
from doctor.core.files.timed_file import TimedFile
from doctor.postmortem.logs import elastic_table, printed_findings, rank_attribution, tracebacks
from doctor.postmortem.logs.deduplication import DeferredLine, ProgressBarStates, RepeatedInfoLines, RepeatedLines
from doctor.postmortem.logs.event_store import EventStore, StoredEvent, Values
from doctor.postmortem.logs.lines import LONG, blocks_of, text_of, windows_of
from doctor.postmortem.logs.outcome_marks import marks
from doctor.postmortem.logs.outcome_marks import step_lines as step_lines_module
from doctor.postmortem.logs.outcome_marks.cue_budget import CueBudget
from doctor.postmortem.logs.pattern_index import IndexedPattern, index
from doctor.postmortem.logs.possible_causes import Possibilities
from doctor.postmortem.logs.prefixes import UNKNOWN_ORIGIN, LineOrigin, PrefixedLine, PrefixStyle, parse_line, style_of
from doctor.postmortem.logs.timestamps import Calendar
from doctor.postmortem.sandbox.decompression import CHUNK, Readable, Unpacked

SAMPLED = 1000
"""Lines at the begin of a log by which its prefixes are judged; :data:`SAMPLED_LATER` of every further block."""
SAMPLED_LATER = 60
MANY = 16
"""Exceptions of one process from which on those that differ in numbers alone are taken for one that is tried again."""
NEAR = 8
"""Lines without a prefix after one with it that may continue it."""
_LINE_FEED, _RETURN = b"\n\r"
_HEAD = 400
TAIL_BYTES = 1 << 14
"""Bytes at the end of a log that are looked at once more for marks."""
MOST_NOT_READ = 2000
"""Lines whose cues were found and did not matter: then it is cheaper to search for fewer."""
LINES_A_LOOK = 16
"""Lines between two looks at the clock."""
HARMLESS = ".harmless"
"""How the kinds of messages end that look like errors and are not."""
_FAR = 1 << 16
LONG_TRACEBACK = 400
"""Lines between the first and the last of a traceback, with those of others between them."""


def read_log(path: Path, name: str, allowance: ReadBudget | None = None) -> tuple[list[Event], LogFile]:
    """The events in a log, packed or not, and what is known of it; ``name`` stands for the file in both. Bytes that are
    appended meanwhile are not read.

    Raises:
        UnusableError: it can't be opened.
    """
    try:
        with TimedFile(path) as stream:
            size, modified = stream.status.st_size, stream.status.st_mtime
            deadline = allowance.for_file(size) if allowance is not None else NO_DEADLINE
            return read_stream(stream, size, name, modified, deadline)
    except OSError as error:
        raise UnusableError(f"{name} can't be read: {error.strerror or error}") from error


def read_stream(
    stream: Readable, size: int, name: str, modified: float | None = None, deadline: ReadDeadline = NO_DEADLINE
) -> tuple[list[Event], LogFile]:
    """The same of the first ``size`` bytes of an open file, which was last written at ``modified``, seconds since the
    epoch. What is not read by the ``deadline`` is left out, and ``LogFile.cut`` says so."""
    pieces = Unpacked(stream, size, deadline)
    reading = _LogScan(name, modified, deadline)
    reading.read(pieces)
    if reading.is_stopped or pieces.is_stopped:
        seconds = f"{deadline.seconds:.3g} s"
        return reading.result(f"stopped reading {name} after {seconds} ({pieces.taken} of {size} bytes)")
    return reading.result(pieces.cut)


def read_lines(lines: Iterable[str], name: str) -> tuple[list[Event], LogFile]:
    """The events in lines of a log, and what is known of it."""
    reading = _LogScan(name, None)
    reading.read(_pieces_of(lines))
    return reading.result(None)


def _pieces_of(lines: Iterable[str]) -> Iterator[bytes]:
    batch: list[bytes] = []
    size = 0
    for line in lines:
        batch.append(line.encode("utf-8", "replace").rstrip(b"\n"))
        size += len(batch[-1])
        if size > CHUNK:
            yield b"\n".join(batch) + b"\n"
            batch, size = [], 0
    if batch:
        yield b"\n".join(batch) + b"\n"


_GLUED = re.compile(r"\]Traceback \(most recent call last\)")
"""A traceback behind a progress bar, which has no line end of its own: the bar says something by itself."""
_CODE = re.compile(
    r"\s*(?:\d+ +)?(?:raise [\w.]+\(|assert |print\(|(?:\+{1,3} )?(?:echo|printf) |-+> \d+ |>>> |//|"
    r"#(?!SBATCH|PBS|BSUB|\$| Out of bounds)|(?:[\w.]+\.)?(?:log|logger|logging|warnings)\.\w+\(|"
    r"(?:el)?if .*:$|except .*:$|return (?:[\w.]+\(|f?[\"'])|[\w.]+ = r?f?[\"'])"
)
"""Source code that was printed: what stands in it was not said."""
_NUMBERS = re.compile(r"\d+")
_OF_OTHERS = ("elastic.", "exit.")
"""Kinds with which a launcher speaks of its processes."""
_OF_ITS_OWN = {
    "pl.init_dist": "rank",
    "torch.nccl.storekey": "rank",
    "torch.nccl.init_opts": "rank",
    "ddp.diff_shape": "rank",
}
"""Messages that name the rank which says them."""


class _LogScan:
    """One log, from its first byte to its last."""

    def __init__(self, name: str, modified: float | None, deadline: ReadDeadline = NO_DEADLINE) -> None:
        self._name = name
        self._deadline = deadline
        self.is_stopped = False
        self._calendar = Calendar(modified)
        self._style = PrefixStyle()
        self._index = index()
        self._processes = rank_attribution.LogProcesses(name)
        self._keeper = EventStore()
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
        self._neighbour: tuple[int, PrefixedLine] | None = None

    def read(self, pieces: Iterable[bytes]) -> None:
        """Read all of it."""
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
        self._sample_end(last)
        self._processes.settle()

    def result(self, cut: str | None) -> tuple[list[Event], LogFile]:
        """The events, and what is known of the log."""
        self._count_often()
        events = [kept.event(self._name, self._processes) for kept in self._told()]
        lines = self._number - self._ended
        ranks = tuple(sorted(self._speaking()))
        recognized = min(self._recognized, lines)
        file = LogFile(self._name, lines, self._bytes, self._first_at, self._last_at, ranks, cut, recognized)
        raised = {event.line for event in events if event.kind in ("python.exception", "python.fatal")}
        found = (mark for mark in self._marks.events(self._name, self._processes) if mark.line not in raised)
        return sorted([*events, *found], key=lambda event: event.line), file

    def _speaking(self) -> set[int]:
        """The ranks that wrote a line; not those of which a launcher writes."""
        heard = (
            (kept.speaker, kept.weak_rank)
            for kept in self._keeper
            if kept.speaker.tag != elastic_table.TAG and not kept.kind.startswith(_OF_OTHERS)
        )
        ranks = (self._processes.of(*one).rank for one in (*self._noticed, *heard))
        return {rank for rank in ranks if rank is not None}

    def _told(self) -> Iterator[StoredEvent]:
        """What is kept; torchrun's table may repeat an exception that the process itself wrote."""
        own = {_essence(kept) for kept in self._keeper if kept.speaker.tag != elastic_table.TAG}
        return (kept for kept in self._keeper if kept.speaker.tag != elastic_table.TAG or _essence(kept) not in own)

    def _counted(self, pieces: Iterable[bytes]) -> Iterator[bytes]:
        for piece in pieces:
            self._bytes += len(piece)
            yield piece

    def _sample(self, block: bytes, most: int) -> None:
        """Judge the prefixes of a log by some of its lines, and see who speaks in it and since when."""
        lines = [text_of(_first_part(line)) for line in block[: most * 400].split(b"\n", most)[:most] if line.strip()]
        if len(lines) >= SAMPLED_LATER // 3 or most == SAMPLED:
            self._style = style_of(parse_line(line, self._calendar).text for line in lines)
        for line in lines:
            self._notice(line)

    def _sample_end(self, block: bytes) -> None:
        for line in block[-SAMPLED_LATER * 200 :].splitlines()[-SAMPLED_LATER:]:
            self._notice(text_of(line[:2000]))

    def _notice(self, line: str) -> PrefixedLine:
        said = parse_line(line, self._calendar, self._style)
        if said.speaker != UNKNOWN_ORIGIN or said.weak_rank is not None:
            self._processes.learn(said)
            if len(self._noticed) < rank_attribution.MOST:
                self._noticed.add((said.speaker, said.weak_rank))
        if said.at is not None:
            self._first_at = said.at if self._first_at is None else min(self._first_at, said.at)
            self._last_at = said.at if self._last_at is None else max(self._last_at, said.at)
        return said

    def _search(self, block: bytes) -> None:
        """Look at the lines of a block that matter."""
        self._choose_cues()
        if self._often.is_full:
            self._count_often()
        hits = deque(self._index.hits(block, self._cues))
        position, size = 0, len(block)
        returns = b"\r" in block
        tracebacks_wait, tables_wait, own_waits = self._waiting
        lines = 0
        while position < size:
            lines += 1
            if lines % LINES_A_LOOK == 1 and self._deadline.is_over:
                self.is_stopped = True
                break
            waits = bool(tracebacks_wait or tables_wait or own_waits)
            if waits:
                start = position
            elif hits:
                start = _line_start(block, position, hits[0][1], returns)
            else:
                break
            self._number += block.count(b"\n", position, start)
            end = _line_end(block, start, size, returns)
            cues: dict[int, int] = {}
            while hits and hits[0][1] < end:
                cue, place = hits.popleft()
                cues.setdefault(cue, place - start)
            if not self._is_passed_over(block, start, end, cues, waits):
                self._head = _line_head(block, start) if returns else b""
                self._line(block[start:end], cues)
            position = end
            if position < size:
                self._number += block[position] == _LINE_FEED
                position += 1
        self._number += block.count(b"\n", position)
        self._ended = block.endswith(b"\n")

    def _choose_cues(self) -> None:
        """Stop the search for texts that only lead to lines which are not read."""
        if self._not_read > MOST_NOT_READ:
            self._not_read = 0
            self._cues = self._index.cues.without(self._index.marks & self._budget.spent)

    @property
    def _is_waiting(self) -> bool:
        """Whether the next lines matter whatever stands in them."""
        return any(self._waiting)

    def _count_steps(self, block: bytes, start: int, *, is_last: bool) -> None:
        """Look at the lines of a block that count steps; its first line has the number ``start``."""
        sample: list[tuple[bytes, bool]] = []
        for place, line in step_lines_module.step_lines(block, self._steps, is_last=is_last):
            is_late = place > len(block) // 2
            number = self._number - block.count(b"\n", place) if is_late else start + block.count(b"\n", 0, place)
            self._steps += 1
            sample.append((line, self._mark(line, number) and number not in self._known))
        self._recognized += len(self._known) + step_lines_module.estimate(block, sample)
        self._known.clear()

    def _read_tail(self, block: bytes) -> None:
        """Look for marks in the last lines of a log, although their cues are spent."""
        if not self._budget.spent:
            return
        tail = block[-TAIL_BYTES:].split(b"\n")
        for number, raw in enumerate(tail, self._number - len(tail) + 1):
            cues = {cue for cue, _, _ in self._index.cues.find(raw[:LONG])}
            marking = cues & self._index.may_mark
            if raw and not (marking and self._budget.active.issuperset(marking)):
                self._read_last(text_of(raw[:LONG]), cues, number)

    def _read_last(self, line: str, cues: Iterable[int], number: int) -> None:
        said = parse_line(line, self._calendar, self._style)
        if not _CODE.match(said.body) and not self._is_harmless(said, cues):
            self._marks.read(said, line, number)

    def _is_harmless(self, said: PrefixedLine, cues: Iterable[int]) -> bool:
        messages = (message for cue in cues for message in self._index.messages[cue])
        return any(one.kind.endswith(HARMLESS) and one.pattern.search(said.text) for one in messages)

    def _mark(self, raw: bytes, number: int) -> bool:
        line = text_of(raw)
        said = parse_line(line, self._calendar, self._style)
        return not _CODE.match(said.body) and self._marks.read_step(said, line, number)

    def _line(self, line: bytes, cues: Mapping[int, int]) -> None:
        if len(line) <= LONG:
            self._read(line, cues)
            return
        order = sorted(cues, key=cues.__getitem__)
        for window, shown in windows_of(line, [cues[cue] for cue in order]):
            self._read(window, [order[place] for place in shown])

    def _is_passed_over(self, block: bytes, start: int, end: int, cues: dict[int, int], waits: bool) -> bool:
        """Whether a line need not be looked at now. ``waits``: the next lines matter whatever stands in them."""
        index = self._index
        if not cues:
            return not self._own.waiting and self._is_of_others(block, start)
        if not waits:
            if index.marks.issuperset(cues):
                return self._is_spent(cues)
            if index.bars.issuperset(cues):
                return self._recognize_if(
                    self._bars.keeps(DeferredLine(self._number, block[start : min(end, start + LONG)], cues))
                )
        if self._bars.is_waiting:
            self._catch_up()
        is_known = self._often.leaves_out(block, start, end, cues) or (not waits and self._is_one_of_many(cues))
        if is_known:
            self._known.add(self._number)
        return is_known

    def _is_spent(self, cues: Iterable[int]) -> bool:
        """Whether none of these cues of marks may be read any longer."""
        is_spent = self._budget.active.isdisjoint(cues)
        self._not_read += is_spent
        return is_spent

    def _recognize_if(self, is_known: bool) -> bool:
        """Count the line that is being read among those that are known, once."""
        if is_known:
            self._known.add(self._number)
        return is_known

    def _is_one_of_many(self, cues: dict[int, int]) -> bool:
        """Whether a line that begins and continues no traceback is one of very many like it."""
        return self._index.alone.isdisjoint(cues) and self._crowd.leaves_out(cues)

    def _catch_up(self) -> None:
        """Look at the progress bars that wait."""
        for waiting in self._bars.take():
            now, self._number, self._head = self._number, waiting.number, b""
            self._line(waiting.line, waiting.cues)
            self._number = now

    def _is_of_others(self, block: bytes, start: int) -> bool:
        """Whether a line begins as those of no process that is writing a traceback or a table."""
        waiting = (*self._tracebacks.waiting, *self._tables.waiting)
        heads = tuple(self._heads.get(speaker, b"") for speaker in waiting)
        if block.startswith(heads, start):
            return False
        self._tracebacks.pass_over()
        self._tables.pass_over()
        return True

    def _read(self, raw: bytes, cues: Iterable[int]) -> None:
        """Look at a line. ``cues``: numbers of the texts in it."""
        structured = self._is_waiting or not self._index.structure.isdisjoint(cues)
        line = self._possibilities.without(text_of(raw), self._number)
        messages = [told for cue in cues for told in self._index.messages[cue] if told.may_be(line)]
        marked = not self._budget.active.isdisjoint(cues)
        if not structured and not messages and not marked:
            return
        said = self._take_apart(line)
        self._processes.learn(said)
        if structured and self._is_structure(said, raw) and not _GLUED.search(line):
            self._recognize_if(True)
            return
        if (messages or marked) and not _CODE.match(said.body):
            process = self._tables.process_of(said.speaker)
            told = said if process is None else said._replace(speaker=process)
            kinds = self._match(dict.fromkeys(messages), told, line)
            is_harmless = any(kind.endswith(HARMLESS) for kind in kinds)
            is_mark = marked and not is_harmless and self._marks.read(told, line, self._number)
            self._budget.charge(cues, is_mark=is_mark)
            self._recognize_if(bool(kinds) or is_mark)
        if said.record and said.speaker != UNKNOWN_ORIGIN:
            self._neighbour = self._number, said

    def _take_apart(self, line: str) -> PrefixedLine:
        """Launchers put who says it before a line once, whatever is written over it later."""
        said = parse_line(line, self._calendar, self._style)
        if said.speaker != UNKNOWN_ORIGIN or not self._head:
            return said
        return said._replace(speaker=parse_line(text_of(self._head), self._calendar, self._style).speaker)

    def _is_structure(self, said: PrefixedLine, raw: bytes) -> bool:
        """Whether a line is part of a traceback, a table or a finding, and says nothing by itself."""
        if self._own.read(said, self._number):
            return True
        if said.speaker not in self._heads and len(self._heads) < tracebacks.MOST_STREAMS:
            self._heads[said.speaker] = _head_of(raw, said)
        speaker, body = self._tables.read(said.speaker, said.body, self._number) or (said.speaker, said.body)
        if said.at is not None:
            self._stamp(speaker, said.at)
        return self._tracebacks.read(speaker, body, self._number, said.record, said.mild)

    def _stamp(self, speaker: LineOrigin, at: float) -> None:
        """Keep the time of a line that may begin a traceback, whose other lines have none."""
        if len(self._stamps) >= tracebacks.MOST_STREAMS:
            self._stamps.clear()
        self._stamps[speaker] = self._number, at

    def _stamp_of(self, speaker: LineOrigin, frames: int) -> float | None:
        """The time at which a traceback of so many frames began, if its first line has one."""
        number, at = self._stamps.get(speaker, (0, None))
        reach = LONG_TRACEBACK if speaker != UNKNOWN_ORIGIN else 4 * frames + NEAR
        return at if self._number - number <= reach else None

    def _match(self, messages: Iterable[IndexedPattern], said: PrefixedLine, line: str) -> list[str]:
        """Keep the messages that a line is; their kinds."""
        texts = dict.fromkeys((said.text, said.body, line))
        kinds: list[str] = []
        for message in messages:
            for text in texts:
                if found := message.pattern.search(text):
                    values = tuple((key, value) for key, value in found.groupdict().items() if value is not None)
                    self._keep_message(message.kind, said, line if text is line else said.text, values)
                    kinds.append(message.kind)
                    break
        return kinds

    def _keep_message(self, kind: str, said: PrefixedLine, text: str, values: Values) -> None:
        speaker, at, weak = said.speaker, said.at, said.weak_rank
        if speaker == UNKNOWN_ORIGIN and not said.record and (neighbour := self._near()):
            speaker, at, weak = neighbour.speaker, neighbour.at, neighbour.weak_rank
        named = dict(values)
        event = StoredEvent(kind, text.strip(), self._number, _process_named(speaker, kind, named), at, values)
        event.weak_rank = _number(named.get(_OF_ITS_OWN.get(kind, ""))) if weak is None else weak
        if self._raised_last is not None and self._raised_last.line == self._number:
            self._raised_last.weak_rank = event.weak_rank
        self._keeper.keep(event, values)

    def _near(self) -> PrefixedLine | None:
        """The line with a prefix that one without may continue: messages of C++ have several lines."""
        if self._neighbour is None or self._number - self._neighbour[0] > NEAR:
            return None
        return self._neighbour[1]

    def _raised(self, speaker: LineOrigin, raised: tracebacks.ParsedException, line: int) -> StoredEvent:
        """An exception: its text is the line that ends the traceback."""
        values: Values = (
            (("type", raised.type), ("message", raised.message)) if raised.type else (("what", raised.message),)
        )
        text = f"{raised.type}: {raised.message}" if raised.type and raised.message else raised.type or raised.message
        event = StoredEvent(raised.kind, text, line, speaker, self._stamp_of(speaker, len(raised.frames)), values)
        event.frames = list(raised.frames)
        self._raised_last = event
        same = self._keeper.like(event.kind, speaker, values) if not raised.frames else None
        if same is not None:
            # Processes that write at the same time without a prefix: the frames went to the first of them.
            same.again(event.at)
            return same
        where = tuple((frame.file, str(frame.line)) for frame in raised.frames[:1])
        many = self._keeper.number_of(event.kind, speaker) >= MANY
        said = _NUMBERS.sub("0", raised.message) if many else raised.message
        return self._keeper.keep(event, ((raised.type, said), *where))

    def _entry(self, speaker: LineOrigin, entry: elastic_table.Entry, line: int) -> None:
        """A process that torchrun names as failed."""
        values = tuple(entry.items())
        rank, local_rank, pid = (int(entry[name]) if name in entry else None for name in ("rank", "local_rank", "pid"))
        of = LineOrigin(rank, local_rank, entry.get("host") or speaker.host, pid)
        at = self._calendar.dated(entry.get("time", ""))
        if rank is not None and local_rank is not None:
            self._processes.learn_place(of)
        shown = ", ".join(f"{name} {entry[name]}" for name in ("rank", "exitcode", "pid", "host") if name in entry)
        text = f"{shown}: {entry['message']}" if entry.get("message") else shown
        self._keeper.keep(StoredEvent("elastic.entry", text, line, of, at, values), values)

    def _own_finding(self, said: PrefixedLine, line: int, values: dict[str, str]) -> StoredEvent:
        """A finding that the doctor printed. Each stands for itself: its other lines say what it is about."""
        key = (*values.items(), ("line", str(line)))
        kept = StoredEvent(printed_findings.KIND, said.text.strip(), line, said.speaker, said.at, tuple(values.items()))
        return self._keeper.keep(kept, key)

    def _count_often(self) -> None:
        """Add what was only counted to the first event of its kind."""
        for head, cue, times in self._often.take():
            speaker = parse_line(f"{text_of(head)} NCCL INFO -", self._calendar, self._style).speaker
            for message in self._index.messages[cue]:
                self._keeper.said_again(message.kind, speaker, times)
        for cue, times in self._crowd.take():
            for message in self._index.messages[cue]:
                self._keeper.said_again(message.kind, None, times)


def _process_named(speaker: LineOrigin, kind: str, values: Mapping[str, str]) -> LineOrigin:
    """Launchers say of a process that it failed: that process counts."""
    if speaker.rank is not None or not kind.startswith(_OF_OTHERS):
        return speaker
    local_rank, pid = _number(values.get("local_rank", values.get("lr"))), _number(values.get("pid"))
    return speaker._replace(
        local_rank=speaker.local_rank if local_rank is None else local_rank, pid=speaker.pid if pid is None else pid
    )


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() and len(text) < 10 else None


def _head_of(raw: bytes, said: PrefixedLine) -> bytes:
    """The bytes with which the next lines of the same process begin too; none where they hold the time."""
    body = said.body.encode()
    return raw[: -len(body)].rstrip() if body and raw.endswith(body) and not said.record else b""


def _essence(kept: StoredEvent) -> tuple[str | int | None, ...]:
    return kept.kind, kept.speaker.rank, kept.values.get("type"), kept.values.get("message", "").partition("\n")[0]


def _first_part(line: bytes) -> bytes:
    """What a progress bar wrote first."""
    return line[:2000].lstrip(b"\r").partition(b"\r")[0]


def _line_head(block: bytes, start: int) -> bytes:
    """What stands before the first carriage return of the line, where a place is behind one."""
    if start == 0 or block[start - 1] != _RETURN:
        return b""
    line = block.rfind(b"\n", max(start - _FAR, 0), start) + 1
    if line == 0 and start > _FAR:
        return b""
    return _first_part(block[line : min(line + _HEAD, start)])


def _line_start(block: bytes, position: int, hit: int, returns: bool) -> int:
    start = block.rfind(b"\n", position, hit) + 1 or position
    return (block.rfind(b"\r", start, hit) + 1 or start) if returns else start


def _line_end(block: bytes, start: int, size: int, returns: bool) -> int:
    end = block.find(b"\n", start)
    end = size if end < 0 else end
    if returns:
        back = block.find(b"\r", start, end)
        return end if back < 0 else back
    return end
