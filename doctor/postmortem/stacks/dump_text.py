"""The text of a file of stacks, without what terminals, mails and parallel shells add to its lines."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain, islice, pairwise
from typing import NamedTuple

from doctor.core.facts.attached import StackSource
from doctor.postmortem.stacks.faulthandler_text import FaulthandlerReader
from doctor.postmortem.stacks.gdb_text import GdbReader
from doctor.postmortem.stacks.headings import heading_of, variable_of
from doctor.postmortem.stacks.line_kinds import (
    FrameLine,
    LineKind,
    LineReader,
    NativeLine,
    ProcessLine,
    ThreadLine,
    VariableLine,
)
from doctor.postmortem.stacks.py_spy_text import PySpyReader
from doctor.postmortem.stacks.pystack_text import PystackReader

LONGEST = 16384
"""Characters of a line that are read: names of C++ templates have thousands."""
MOST_LINES = 4_000_000
MOST_STREAMS = 4096
LEAST_SHARE = 0.8
"""Least share that lines of a tool have among themselves and lines of a log."""
LEAST_SHARE_OF_TEXT = 0.6
"""Least share that lines of a tool have in a text. Others are headings, prompts and notes."""
_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_QUOTE = re.compile(r"> ?")
_PREFIX = re.compile(
    r"(?:(?P<label>[A-Za-z0-9][\w.-]{0,252}(?: (?:out|err))?|\[[\w.,-]{1,64}\](?:<std(?:out|err)>)?): ?"
    r"|(?P<service>[a-z0-9][\w.-]{0,252}) *\| ?"
    r"|(?P<actor>\[pod/[\w./-]{1,400}\]|\([\w.:<>-]{1,100} pid=\d{1,10}(?:, ip=[\w.:]{1,64})?\)) ?)(?P<line>.*)",
    re.DOTALL,
)
"""The label that pdsh, ``srun --label``, ``mpirun --tag-output``, ``docker compose logs``, ``kubectl logs --prefix``,
Ray (ray/_private/worker.py) and scripts put before each line."""
_FOUND_BY_GREP = re.compile(r"(?P<name>[\w./-]{1,252}?\.\w{1,8}):(?=\S)")
"""The file that ``grep -A`` puts before a line that it found; before the lines that follow it stands a dash."""
_GREP_RULE = "--"
"""The line that ``grep -A`` puts between its findings."""
_FENCE = re.compile(r"\s{0,8}(?:> ?)?\s{0,8}(?:`{3,}|~{3,})[\w+-]*$")
"""The line before and after a block of code in Markdown."""
_INDENTED = " " * 4
_INDENTED_DUMP = re.compile(r" {4,8}(?:Thread |Process \d|Current thread |Traceback for thread |Stack dump for |#0 )")
"""The beginning of a dump in a block of Markdown that is marked by indentation alone."""
_OPENING = re.compile(r"`(?=[^`\s])[^`]*$")
"""A mark of Markdown that begins code and isn't closed on its line."""
_SEVERAL = re.compile(r"rank\D{0,3}\d+ ?(?:[-\u2013~,/]|to|and) ?\d|ranks\b", re.IGNORECASE)
LONGEST_TITLE = 120
"""Characters of a line of prose that may say whose stack follows."""


class ReadLine(NamedTuple):
    """A line, what it says (``None``: nothing that a tool printed), and the tool."""

    text: str
    kind: LineKind | None
    source: StackSource = ""


def streams_of(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the lines of each host or task of a text, with the label of its lines; without labels, all with ``""``."""
    passages = _passages(text)
    if len(passages) > 1:
        pairs = pairwise([[], *passages])
        dumps = [_titled(passage, before) for before, passage in pairs if _is_dump(_counts(passage))]
        passages = dumps or [list(chain.from_iterable(passages))]
    for passage in passages:
        yield from _labelled(passage)


def _passages(text: str) -> list[list[str]]:
    """The lines of a text, parted at the fences of Markdown, and around dumps in its indented blocks."""
    passages: list[list[str]] = [[]]
    for line in islice(text.splitlines(), MOST_LINES):
        line = _ESCAPES.sub("", line[:LONGEST]).rstrip().replace("&lt;", "<").replace("&gt;", ">")
        if _FENCE.match(line):
            passages.append([])
        else:
            passages[-1].append(line[1:] if line.startswith("`") and _OPENING.match(line) else line)
    return [block for passage in passages for block in _blocks(passage)]


def _blocks(lines: Sequence[str]) -> Iterator[list[str]]:
    block: list[str] = []
    is_indented, before = False, ""
    for line in lines:
        begins = not is_indented and not before and bool(_INDENTED_DUMP.match(line))
        if begins or (is_indented and line and not line.startswith(_INDENTED)):
            is_indented = begins
            if block:
                yield block
                block = []
        block.append(line)
        before = line
    if block:
        yield block


def _titled(passage: list[str], before: Sequence[str]) -> list[str]:
    """The lines of a block of code; before them the line of the prose above that says whose stacks these are."""
    title = next((line.strip() for line in reversed(before) if line.strip()), "")
    is_heading = len(title) <= LONGEST_TITLE and heading_of(title) is not None and not _SEVERAL.search(title)
    return [title, *_unquoted(passage)] if is_heading else passage


def _labelled(lines: list[str]) -> Iterator[tuple[str, list[str]]]:
    lines = [line for line in _unquoted(lines) if line != _GREP_RULE]
    grepped = _of_grep(lines)
    labelled = [] if grepped else [_PREFIX.fullmatch(line) for line in lines if line]
    labels = {_label_of(found) for found in labelled if found}
    if grepped:
        yield from grepped.items()
    elif labelled and all(labelled) and len(labels) * 4 <= len(labelled) and len(labels) <= MOST_STREAMS:
        streams: dict[str, list[str]] = {}
        for found in labelled:
            if found:
                streams.setdefault(_label_of(found), []).append(found["line"])
        yield from streams.items()
    else:
        yield "", lines


def _label_of(found: re.Match[str]) -> str:
    label = found["label"] or found["service"]
    return label.removesuffix(" out").removesuffix(" err").partition("<")[0] if label else found["actor"]


def _of_grep(lines: Sequence[str]) -> dict[str, list[str]]:
    """The lines of each file that ``grep -A`` searched, by its name; empty if the lines are none of its."""
    streams: dict[str, list[str]] = {}
    name = ""
    for line in filter(None, lines):
        if name and line.startswith(f"{name}-"):
            streams[name].append(line[len(name) + 1 :])
        elif found := _FOUND_BY_GREP.match(line):
            name = found["name"]
            if len(streams) < MOST_STREAMS or name in streams:
                streams.setdefault(name, []).append(line[found.end() :])
        else:
            return {}
    return streams


def _unquoted(lines: list[str]) -> list[str]:
    """The lines without the marks of a quotation and without common indentation."""
    filled = [line for line in lines if line]
    if filled and all(line.startswith(">") for line in filled):
        lines = [_QUOTE.sub("", line, count=1) for line in lines]
        filled = [line for line in lines if line]
    indent = min((len(line) - len(line.lstrip(" ")) for line in filled), default=0)
    return [line[indent:] for line in lines] if indent else lines


def read_lines(lines: Sequence[str]) -> Iterator[ReadLine]:
    """Yield what each line says that is not empty."""
    readers: list[LineReader] = [PySpyReader(), PystackReader(), GdbReader(), FaulthandlerReader()]
    for line in lines:
        if not line.strip():
            continue
        place, kind = next(
            ((place, kind) for place, reader in enumerate(readers) if (kind := reader.read(line)) is not None),
            (0, None),
        )
        if kind is not None:
            # The tool of the last line comes first: others would take the indented lines that follow.
            readers.insert(0, readers.pop(place))
            if place:
                _leave(readers[1:])
            yield ReadLine(line, kind, readers[0].source)
            continue
        kind = variable_of(line) or heading_of(line)
        if isinstance(kind, ProcessLine):
            _leave(readers)
        yield ReadLine(line, kind)


def _leave(readers: Sequence[LineReader]) -> None:
    for reader in readers:
        reader.leave()


def looks_like_stacks(head: str, *, is_whole: bool = True) -> bool:
    """Return whether a text with this beginning is what tools print about stacks, and no log that quotes some of it.

    ``is_whole``: it does not end within a line. A log that contains a dump has other lines too, and a crash that
    faulthandler reports is part of a log. In Markdown, blocks of code are judged each; the prose between them is not.
    """
    if not _MAY_BE.search(head):
        return False
    lines = head.splitlines() if is_whole else head.splitlines()[:-1]
    counts = [_counts(passage) for passage in _passages("\n".join(lines))]
    printed = sum(each["printed"] for each in counts if _is_dump(each))
    logged = sum(each["logged"] for each in counts)
    prose = 0 if any(_FENCE.match(line) for line in lines) else sum(each["other"] for each in counts)
    return printed > 0 and _is_most(printed, prose, logged)


def quotes_stacks(head: str) -> bool:
    """Return whether a text of stacks with this beginning has so many other lines that some may be of a log."""
    counts = sum((_counts(passage) for passage in _passages(head)), Counter[str]())
    others = counts["other"] + counts["logged"]
    return others > (1 - LEAST_SHARE) * (counts["printed"] + others)


def _counts(passage: list[str]) -> Counter[str]:
    return Counter(kind for _, stream in _labelled(passage) for kind in _tallied(stream))


def _is_dump(counts: Counter[str]) -> bool:
    """Whether lines with these kinds are what tools print about stacks."""
    printed, others, logged = counts["printed"], counts["other"], counts["logged"]
    if not counts["frame"] or counts["heading"] * 2 > printed:
        return False
    # The stacks of faulthandler are often among the lines of a log, and other programs print names and lines too.
    if counts["faulthandler"] or counts["bare"] * 2 > counts["frame"]:
        return others + logged == 0 and counts["frame"] > 1
    return _is_most(printed, others, logged)


def _is_most(printed: int, others: int, logged: int) -> bool:
    of_text = LEAST_SHARE_OF_TEXT * (printed + others + logged)
    return printed >= of_text and logged <= (1 - LEAST_SHARE) * (printed + logged)


def looks_like_json_stacks(head: str) -> bool:
    """Return whether a JSON text with this beginning is the output of ``py-spy dump --json``."""
    return bool(_JSON.match(head))


_JSON = re.compile(r'\s*\[\s*\{\s*"pid": ?\d{1,10},\s*"thread_id": ?\d{1,20},\s*"thread_name": ?')


def _tallied(lines: Sequence[str]) -> Iterator[str]:
    in_stack = False
    for line in read_lines(lines):
        kind = line.kind
        if _is_logged(line.text):
            yield "logged"
        elif kind is None:
            yield "other"
        elif isinstance(kind, (ProcessLine, VariableLine)) and not line.source:
            yield "heading"
        else:
            yield "printed"
            in_stack = in_stack or isinstance(kind, ThreadLine) or bool(_NUMBERED.match(line.text))
            if isinstance(kind, (FrameLine, NativeLine)):
                yield "frame"
                yield line.source if in_stack else "bare"


_NUMBERED = re.compile(r"#(?:0 |\d{1,5} +(?:0x[0-9a-f]+ in |Frame 0x))")
_MAY_BE = re.compile(
    r"^\W{0,8}(?:.{0,80}[: ])?(?:Thread |Current thread |Traceback for thread |#\d{1,5} +0x[0-9a-f]|#0 "
    r"|\w{1,99} \([^\s()]{1,400}\.py:\d)",
    re.MULTILINE,
)
_LOGGED = re.compile(
    r"Fatal Python error|\[E\d|\[W\d|\b(?:INFO|WARNING|ERROR|DEBUG)\b|\d\d:\d\d:\d\d"
    r"|Traceback \(most recent call last\):$|^\w[\w.]*(?:Error|Exception)\b"
)


def _is_logged(text: str) -> bool:
    return not text.startswith((" ", "#", "Process ", "Stack dump", "===", "Timeout (")) and bool(_LOGGED.search(text))
