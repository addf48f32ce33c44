"""A line on stderr that says what a long command is doing, from a second on."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from doctor.core.background import start_daemon

PERIOD = 1.0
"""Seconds until the line is first shown, and between updates in a terminal."""
RARE = 10.0
"""Seconds between lines where each is kept: in a file or a log."""
WIDTH = 78


class ProgressLine:
    """What is being done, with its seconds: one line in a terminal, occasionally a new line elsewhere."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._began = time.monotonic()
        self._words = ""
        self._shown = 0.0
        self._ended = threading.Event()
        self._writing = threading.Lock()

    def tell(self, words: str) -> None:
        """Set what is being done."""
        self._words = words

    def show(self) -> None:
        """Update the line every second until :meth:`close`."""
        while not self._ended.wait(PERIOD):
            with self._writing:
                if not self._ended.is_set():
                    self._write()

    def _write(self) -> None:
        now = time.monotonic()
        line = f"doctor: {self._words} … {now - self._began:.0f} s"
        if self._stream.isatty():
            self._stream.write(f"\r\x1b[2K{line[:WIDTH]}")
        elif not self._shown or now - self._shown >= RARE:
            self._stream.write(f"{line}\n")
        else:
            return
        self._shown = now
        self._stream.flush()

    def close(self) -> None:
        """Clear the line of a terminal."""
        with self._writing:
            self._ended.set()
            if self._shown and self._stream.isatty():
                self._stream.write("\r\x1b[2K")
                self._stream.flush()


@contextmanager
def progress_line() -> Iterator[ProgressLine]:
    """Show a line on stderr while the block runs, if it takes more than a second."""
    line = ProgressLine(sys.stderr)
    start_daemon("doctor-progress", line.show)
    try:
        yield line
    finally:
        line.close()
