"""Exports of log stores as one JSON document or a CSV table, converted to lines with time and origin.

Forms: responses of CloudWatch Logs (GetLogEvents, FilterLogEvents, GetQueryResults) and of Loki (query_range), arrays
of entries (Grafana, ``gcloud logging read --format=json``), and tables with a header (CloudWatch, Grafana). Documents
with one JSON value a line need no conversion. Most of these list the newest entry first.
"""

from __future__ import annotations

import codecs
import csv
import datetime
import itertools
import json
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from doctor.postmortem.logs.prefixes import TEXTS, TIMES, host_in, time_in
from doctor.postmortem.logs.timestamps import Calendar

MOST_ELEMENT = 32 << 20
"""Maximum characters of one element of a document: Loki responds with all lines of a stream in one."""
MOST_REVERSED = 128 << 20
"""Maximum characters of the entries of a document that begins with the newest one."""
_HEAD = 1 << 16
_PEEKED = 256
_BATCH = 4096
"""Entries of a piece: many small pieces are slow to join."""
_COLUMNS = frozenset({"message", "Message", "@message", "line", "Line", "log", "_raw", "textPayload", "MESSAGE"})
_ARRAYS = (
    re.compile(r'^\s*\{(?=.{0,4000}"resultType"\s*:\s*"streams").{0,4000}?"result"\s*:\s*\[(?=\s*\{)', re.DOTALL),
    re.compile(r'^\s*\{.{0,4000}?"events"\s*:\s*\[(?=\s*\{.{0,4000}?"(?:message|timestamp)"\s*:)', re.DOTALL),
    re.compile(r'^\s*\{.{0,4000}?"results"\s*:\s*\[(?=\s*\[\s*\{\s*"field"\s*:)', re.DOTALL),
)
"""The arrays of entries in the documents of Loki and CloudWatch."""
_LIST = re.compile(r"^\s*\[(?=\s*\{)")
_KEY = re.compile(r'"([@\w]{1,40})"\s*:\s*(?=["\d])')
_HOST = re.compile(r"[a-z0-9][\w.-]{0,252}")


class _Entry(NamedTuple):
    at: float | None
    host: str | None
    text: str

    @property
    def lines(self) -> str:
        """The lines of the entry, each with its time and origin as ``kubectl logs --prefix`` writes it."""
        time = "" if self.at is None else f"{_iso(self.at)} "
        origin = f"[pod/{self.host}/-] " if self.host and _HOST.fullmatch(self.host) else ""
        return "".join(f"{time}{origin}{line}\n" for line in self.text.rstrip("\r\n").split("\n"))


def _iso(at: float) -> str:
    moment = datetime.datetime.fromtimestamp(at, datetime.timezone.utc)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def looks_like_export(head: bytes) -> bool:
    """Return whether a file with this beginning is an export that needs conversion."""
    text = head.decode("utf-8-sig", "replace")
    return _array_in(text) is not None or bool(_header_in(text))


def _array_in(text: str) -> int | None:
    """Return the offset of the first element of the array of entries."""
    found = next((match for form in _ARRAYS if (match := form.match(text))), None)
    if found is None and (array := _LIST.match(text)):
        keys = set(_KEY.findall(text[:8000]))
        found = array if keys & set(TEXTS) and keys & set(TIMES) else None
    return found.end() if found else None


def _header_in(text: str) -> list[str]:
    """Return the columns of a table of log entries."""
    first, _, rest = text.partition("\n")
    if not rest or "," not in first or len(first) > 4000:
        return []
    try:
        columns = next(csv.reader([first.strip()]), [])
    except csv.Error:
        return []
    is_log = "@message" in columns or (_COLUMNS & set(columns) and set(TIMES) & set(columns))
    return columns if is_log and all(columns) else []


class PlainLines:
    """The bytes of a log; those of an export as lines. ``cut``: why an export was not converted to its end."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = iter(pieces)
        self.cut: str | None = None

    def __iter__(self) -> Iterator[bytes]:
        """Iterate over the pieces, once."""
        head = b""
        for piece in self._pieces:
            head += piece
            if len(head) >= _HEAD:
                break
        self._pieces = itertools.chain((head,), self._pieces)
        if not head or not looks_like_export(head[:_HEAD]):
            yield from self._pieces
            return
        lines = (entry.lines.encode("utf-8", "replace") for entry in self._in_order(self._entries(head)))
        while batch := b"".join(itertools.islice(lines, _BATCH)):
            yield batch

    def _entries(self, head: bytes) -> Iterator[_Entry]:
        decoder = codecs.getincrementaldecoder("utf-8-sig")("replace")
        texts = (decoder.decode(piece).replace("\0", "") for piece in self._pieces)
        calendar = Calendar()
        is_table = bool(_header_in(head[:_HEAD].decode("utf-8-sig", "replace")))
        for value in self._rows(texts) if is_table else self._elements(texts):
            yield from _entries_in(value, calendar)

    def _elements(self, texts: Iterator[str]) -> Iterator[object]:
        """Parse the elements of the array one by one."""
        buffer = next(texts, "")
        place = _array_in(buffer) or 0
        decoder = json.JSONDecoder()
        wanted = 0
        while True:
            place = _SEPARATOR.match(buffer, place).end()  # type: ignore[union-attr]
            if buffer.startswith("]", place):
                return
            try:
                value, place = decoder.raw_decode(buffer, place)
                yield value
            except RecursionError:
                self.cut = "its JSON is nested too deeply"
                return
            except ValueError:
                buffer, place = buffer[place:], 0
                wanted = max(2 * len(buffer), _HEAD)
                while len(buffer) < wanted and (more := next(texts, "")):
                    buffer += more
                if len(buffer) < wanted and not self._may_parse(decoder, buffer):
                    self.cut = "its JSON ends too early or is damaged"
                    return
                if len(buffer) > 2 * MOST_ELEMENT:
                    self.cut = f"an element of its JSON has more than {MOST_ELEMENT >> 20} MiB"
                    return

    @staticmethod
    def _may_parse(decoder: json.JSONDecoder, buffer: str) -> bool:
        place = _SEPARATOR.match(buffer).end()  # type: ignore[union-attr]
        if buffer.startswith("]", place):
            return True
        try:
            decoder.raw_decode(buffer, place)
        except (ValueError, RecursionError):
            return False
        return True

    def _rows(self, texts: Iterator[str]) -> Iterator[object]:
        """Parse the rows of the table; a field may have several lines."""
        rows = csv.reader(_lines_of(texts))
        try:
            columns = next(rows, [])
            for row in rows:
                yield dict(zip(columns, row, strict=False))
        except csv.Error as error:
            self.cut = f"its CSV is damaged: {error}"

    def _in_order(self, entries: Iterator[_Entry]) -> Iterator[_Entry]:
        """Yield the oldest entry first."""
        first = list(itertools.islice(entries, _PEEKED))
        times = [entry.at for entry in first if entry.at is not None]
        is_reversed = len(times) > 1 and times[0] > times[-1] and all(a >= b for a, b in itertools.pairwise(times))
        if not is_reversed:
            yield from first
            yield from entries
            return
        size = sum(len(entry.text) for entry in first)
        for entry in entries:
            size += len(entry.text)
            if size > MOST_REVERSED:
                self.cut = f"only its newest {MOST_REVERSED >> 20} MiB were read"
                break
            first.append(entry)
        yield from reversed(first)


_SEPARATOR = re.compile(r"[\s,]*")


def _lines_of(texts: Iterable[str]) -> Iterator[str]:
    rest = ""
    for text in texts:
        *lines, rest = (rest + text).split("\n")
        yield from (f"{line}\n" for line in lines)
        if len(rest) > MOST_ELEMENT:
            return
    if rest:
        yield rest


def _entries_in(value: object, calendar: Calendar) -> Iterator[_Entry]:
    """Yield the entries in an element of a document, or in a row of a table."""
    if isinstance(value, list):  # a row of CloudWatch Logs Insights
        value = {str(one.get("field")): one.get("value") for one in value[:64] if isinstance(one, dict)}
    if not isinstance(value, dict):
        return
    if isinstance(lines := value.get("values"), list):  # a stream of Loki
        own = [_of_pair(pair, value, calendar) for pair in lines if isinstance(pair, list) and len(pair) > 1]
        times = [entry.at or 0.0 for entry in own]
        yield from reversed(own) if times and times[0] > times[-1] else own
        return
    text = next((value[key] for key in (*TEXTS, *_COLUMNS) if isinstance(value.get(key), str)), None)
    if text is not None:
        yield _Entry(time_in(value, calendar), host_in(value), text)


def _of_pair(pair: list[object], stream: dict[str, object], calendar: Calendar) -> _Entry:
    return _Entry(time_in({"timestamp": pair[0]}, calendar), host_in(stream), str(pair[1]))
