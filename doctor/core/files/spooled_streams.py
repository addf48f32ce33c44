"""Standard input, pipes and process substitution among the input files of a command. Their data are copied to a
temporary file, so that every reader of files can read them. Size, duration and idle time are bounded."""

from __future__ import annotations

import os
import re
import select
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from doctor.core.clock import monotonic
from doctor.core.errors import UnusableError

MOST_BYTES = 1 << 30
"""Maximum number of bytes of a stream."""
MOST_SECONDS = 120.0
"""Maximum duration of reading a stream, in seconds."""
SILENCE = 20.0
"""Maximum time without data, in seconds."""
_PIECE = 1 << 16
_DESCRIPTOR = re.compile(r"/(?:dev|proc/self)/fd/(\d{1,6})")


class SpooledPath(type(Path())):  # type: ignore[misc]
    """A file with the data of a stream. ``shown``: the name under which the user specified it; ``cut``: why the rest
    of it was not read."""

    shown: str
    cut: str | None


@contextmanager
def spooled_paths(
    paths: Iterable[Path], ending_of: Callable[[bytes], str] = lambda head: ""
) -> Iterator[tuple[Path, ...]]:
    """Yield the paths, with a file in place of each stream; the files are removed at the end. ``ending_of``: the file
    name extension for its first bytes.

    Raises:
        UnusableError: a stream sent nothing, or can't be stored.
    """
    folder: str | None = None
    found: list[Path] = []
    try:
        for number, path in enumerate(paths):
            descriptor = _stream_of(path)
            if descriptor is None:
                found.append(path)
                continue
            folder = folder or tempfile.mkdtemp(prefix="doctor-")
            found.append(_spooled(path, descriptor, Path(folder, f"stream-{number}"), ending_of))
        yield tuple(found)
    except OSError as error:
        raise UnusableError(f"cannot store standard input: {error.strerror or error}") from error
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _stream_of(path: Path) -> int | None:
    """A separate descriptor for a stream; ``None`` for anything else."""
    text = os.fspath(path)
    named = _DESCRIPTOR.fullmatch(text)
    if text in ("-", "/dev/stdin") or named:
        number = int(named[1]) if named else 0
        try:
            mode = os.fstat(number).st_mode
            if text == "-" or not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                return os.dup(number)
        except OSError as error:
            raise UnusableError(f"cannot read {text}: {error.strerror}") from None
        return None
    try:
        is_pipe = stat.S_ISFIFO(path.stat().st_mode)
        return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC) if is_pipe else None
    except OSError:
        return None


def _spooled(path: Path, descriptor: int, file: Path, ending_of: Callable[[bytes], str]) -> Path:
    shown = "standard input" if os.fspath(path) in ("-", "/dev/stdin") else os.fsencode(path).decode("utf-8", "replace")
    try:
        if os.isatty(descriptor):
            raise UnusableError(f"{shown} is a terminal: pipe a file into it")
        with file.open("xb") as kept:
            size, cut = _copied(descriptor, kept)
    finally:
        os.close(descriptor)
    if not size:
        raise UnusableError(f"{shown}: {cut or 'it is empty'}")
    with file.open("rb") as kept:
        ending = ending_of(kept.read(_PIECE))
    spooled: SpooledPath = SpooledPath(file.rename(file.with_suffix(ending)) if ending else file)
    spooled.shown = shown
    spooled.cut = cut and f"stopped reading {shown} after {size} bytes: {cut}"
    return spooled


def _copied(descriptor: int, kept: BinaryIO) -> tuple[int, str | None]:
    """Copy what a stream sends, and return its size and why it was not read to its end. A file is always ready."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    until = monotonic() + MOST_SECONDS
    size = 0
    while size < MOST_BYTES:
        if not (events := poll.poll(SILENCE * 1000)):
            return size, f"nothing was sent for {SILENCE:g} s"
        data: bytes | None
        try:
            data = os.read(descriptor, _PIECE)
        except BlockingIOError:
            data = b"" if events[0][1] & select.POLLHUP else None
        except OSError as error:
            return size, str(error.strerror)
        if data == b"":
            return size, None
        if data:
            kept.write(data)
            size += len(data)
        if monotonic() > until:
            return size, f"it was still sending after {MOST_SECONDS:g} s"
    return size, f"it was still sending after {MOST_BYTES >> 20} MiB"
