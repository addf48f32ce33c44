"""Writes or reads one file of known bytes; run as a script, in a process that can be given up when a mount does not
answer. Only the standard library, so that it starts in milliseconds.

``write FOLDER NAME BYTES SECONDS`` prints what it took as a line of JSON and keeps the file until its input ends;
``read FOLDER NAME BYTES`` prints what it saw. The file never stays: a second process waits for the end of the one that
wrote, however that comes, and removes it.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import os
import re
import stat
import sys
import time
from pathlib import Path
from typing import Any

CHUNK = 1 << 20
PATIENCE = 2.0
"""Seconds in which a new file is seen by another host: clients of NFS keep what they know of a directory for some time
(nfs(5), acdirmin), though names that were never asked for are asked at once."""

FileRecord = dict[str, Any]


def chunk(name: str, number: int) -> bytes:
    """A piece of the file: other bytes in every file and place, so that nothing compresses or shares them."""
    return number.to_bytes(8, "big") + _noise(name)[8:]


@functools.lru_cache(maxsize=1)
def _noise(name: str) -> bytes:
    return hashlib.shake_256(name.encode()).digest(CHUNK)


def write(folder: str, name: str, size: int, seconds: float) -> None:
    """Write the file, within ``seconds`` as many bytes as go; say it, hold the file until stdin ends, and remove it.
    What exists already is left as it is."""
    path = Path(folder, _own_name(name))
    keeper, pipe = _start_keeper(path)
    try:
        seen = _timed_write(path, name, size, seconds)
    except OSError as error:
        seen = {"error": error.strerror or str(error)}
        if isinstance(error, FileExistsError):
            os.write(pipe, b"not ours")
    if "error" in seen:
        _remove(keeper, pipe)
        _say(seen)
        return
    _say(seen)
    sys.stdin.read()
    _remove(keeper, pipe)


def _timed_write(path: Path, name: str, size: int, seconds: float) -> FileRecord:
    began = time.monotonic()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
    try:
        done = 0
        while done < size and time.monotonic() - began < seconds:
            done += _write_all(descriptor, chunk(name, done // CHUNK)[: size - done])
        written = time.monotonic()
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return {"bytes": done, "write": written - began, "sync": time.monotonic() - written}


def _write_all(descriptor: int, data: bytes) -> int:
    done = 0
    while done < len(data):
        done += os.write(descriptor, data[done:])
    return done


def _start_keeper(path: Path) -> tuple[int, int]:
    """A process that removes ``path`` once the pipe, whose other end is returned, has ended without a word. It is in a
    session of its own, so that whoever kills this one does not kill both."""
    inner, outer = os.pipe()
    ready, say_ready = os.pipe()
    child = os.fork()
    if child:
        os.close(inner)
        os.close(say_ready)
        os.read(ready, 1)
        os.close(ready)
        return child, outer
    try:
        os.setsid()
        os.close(outer)
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(nothing, number)
        os.close(say_ready)
        if not os.read(inner, 1):
            path.unlink()
    except OSError:  # it was never made
        pass
    finally:
        os._exit(0)


def _remove(keeper: int, pipe: int) -> None:
    os.close(pipe)
    os.waitpid(keeper, 0)


def read(folder: str, name: str, size: int) -> None:
    """Say whether the file that another host wrote is here, whole."""
    began = time.monotonic()
    while True:
        seen = _look(Path(folder, _own_name(name)), name, size)
        if seen["outcome"] != "absent" or time.monotonic() - began > PATIENCE:
            break
        time.sleep(0.2)
    _say({**seen, "seconds": time.monotonic() - began})


def _look(path: Path, name: str, size: int) -> FileRecord:
    try:
        with open(_opened(path), "rb", buffering=0) as stream:
            for done in range(0, size, CHUNK):
                expected = chunk(name, done // CHUNK)[: size - done]
                if stream.read(len(expected)) != expected:
                    return {"outcome": "other"}
            return {"outcome": "other" if stream.read(1) else "whole"}
    except FileNotFoundError:
        return {"outcome": "absent"}
    except OSError as error:
        return {"outcome": "other", "error": error.strerror or str(error)}


def _opened(path: Path) -> int:
    """A descriptor of a regular file. No link is followed, and nothing is waited for."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "not a regular file")


def _own_name(name: str) -> str:
    """The name, which another host may have chosen: only such a file is ever made and removed."""
    if re.fullmatch(r"\.rankdoctor-probe-[A-Za-z0-9._-]{1,128}", name) is None:
        raise SystemExit(2)
    return name


def _say(seen: FileRecord) -> None:
    sys.stdout.write(json.dumps(seen) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    if sys.argv[1] == "write":
        write(sys.argv[2], sys.argv[3], int(sys.argv[4]), float(sys.argv[5]))
    else:
        read(sys.argv[2], sys.argv[3], int(sys.argv[4]))
