"""Timestamps of logs as seconds since the epoch.

Timestamps without a zone are read as UTC: only the order within a job matters, whose hosts nearly always share a zone.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import re

ISO = r"\d{4}[-/.]\d\d[-/.]\d\d[T _-]\d\d:\d\d:\d\d(?:[.,:]\d{1,9})?(?: ?(?:Z|UTC|GMT|[+-]\d\d:?\d\d)(?![\w:]))?"
"""``2024-01-02T03:04:05.678Z``, ``2024/01/02 03:04:05,678``, ``2024-01-02_03:04:05``: the year first."""
AMERICAN = r"\d\d/\d\d/\d{4} \d\d:\d\d:\d\d(?:[.,]\d{1,9})?"
"""``01/02/2024 03:04:05``: what transformers' examples set up."""
MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
SYSLOG = rf"(?:{'|'.join(MONTHS)}) [ \d]\d \d\d:\d\d:\d\d(?:\.\d{{1,9}})?"
"""``Nov 22 04:23:18``: syslog and journalctl, without a year."""
DATED_SYSLOG = rf"(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) (?:{'|'.join(MONTHS)}) [ \d]\d \d\d:\d\d:\d\d(?:\.\d{{1,9}})? \d{{4}}"
"""``Fri Nov 22 04:23:18 2024``: ``dmesg -T``."""

_DAY = re.compile(r"(\d{4})[-/.](\d\d)[-/.](\d\d)")
_CLOCK = re.compile(r"(\d\d):(\d\d):(\d\d)(?:[.,:](\d{1,9}))?(?: ?(Z|UTC|GMT|[+-]\d\d:?\d\d))?")


class Calendar:
    """Parses timestamps, and infers the year of those without one.

    It is the last year in which the day is not later than ``modified``, the time of the last write to the log in
    seconds since the epoch; else the year of the first timestamp of this log with a year; else 1970, so that at least
    the order within one log is right.
    """

    def __init__(self, modified: float | None = None) -> None:
        self._last: datetime.datetime | None = None
        if modified is not None:
            # The day after, because the writer's zone may be ahead of UTC.
            with contextlib.suppress(OverflowError, OSError, ValueError):
                self._last = datetime.datetime.fromtimestamp(modified + 86400, datetime.timezone.utc)
        self._year = 1970

    def dated(self, text: str) -> float | None:
        """Parse :data:`ISO`."""
        found = _DAY.match(text)
        return self._at(int(found[1]), int(found[2]), int(found[3]), text[11:]) if found else None

    def american(self, text: str) -> float | None:
        """Parse :data:`AMERICAN`."""
        return self._at(int(text[6:10]), int(text[:2]), int(text[3:5]), text[11:])

    def dated_syslog(self, text: str) -> float | None:
        """Parse :data:`DATED_SYSLOG`."""
        return self._at(int(text[-4:]), MONTHS.index(text[4:7]) + 1, int(text[8:10]), text[11:-5])

    def syslog(self, text: str) -> float | None:
        """Parse :data:`SYSLOG`."""
        return self.yearless(MONTHS.index(text[:3]) + 1, int(text[4:6]), text[7:])

    def yearless(self, month: int, day: int, clock: str) -> float | None:
        """Return the time of a day without its year."""
        year, last = self._year, self._last
        if last is not None:
            year = last.year - ((month, day) > (last.month, last.day))
        day_start = _day(year, month, day)
        return None if day_start is None else _with_clock(day_start, clock)

    def _at(self, year: int, month: int, day: int, clock: str) -> float | None:
        day_start = _day(year, month, day)
        if day_start is None:
            return None
        if self._year == 1970:
            self._year = year
        return _with_clock(day_start, clock)


@functools.lru_cache(maxsize=256)
def _day(year: int, month: int, day: int) -> float | None:
    try:
        return datetime.datetime(year, month, day, tzinfo=datetime.timezone.utc).timestamp()
    except (ValueError, OverflowError):
        return None


def _with_clock(day: float, text: str) -> float | None:
    found = _CLOCK.match(text)
    if not found:
        return None
    hour, minute, second, fraction, zone = found.groups()
    seconds = int(hour) * 3600 + int(minute) * 60 + int(second)
    part = int(fraction) / 10 ** len(fraction) if fraction else 0.0
    ahead = 0
    if zone and zone[0] in "+-":
        digits = zone[1:].replace(":", "")
        ahead = int(zone[0] + digits[:2]) * 3600 + int(zone[0] + digits[2:]) * 60
    return day + seconds + part - ahead
