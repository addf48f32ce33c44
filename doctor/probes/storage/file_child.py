"""Write or read one file of known bytes; run as a script, in a process that can be abandoned if a mount does not
answer.

Only the standard library, so that it starts in milliseconds. ``write FOLDER NAME BYTES SECONDS`` prints its timing as a
line of JSON and keeps the file until its input ends; ``read FOLDER NAME BYTES`` prints what it found. A second process
waits for the end of the writer, however that ends, and removes the file.
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
"""Seconds until another host sees a new file: NFS clients cache directories for some time (nfs(5), acdirmin), though
names that were never looked up are looked up at once."""

FileRecord = dict[str, Any]


def chunk(name: str, number: int) -> bytes:
    """Return a piece of the file, unique in every file and position, so that nothing compresses or deduplicates it."""
    return number.to_bytes(8, "big") + _noise(name)[8:]


@functools.lru_cache(maxsize=1)
def _noise(name: str) -> bytes:
    return hashlib.shake_256(name.encode()).digest(CHUNK)


def write(folder: str, name: str, size: int, seconds: float) -> None:
    """Write as many bytes of the file as fit into ``seconds``, print the result, keep the file until stdin ends, remove
    it.

    An existing file is left as it is.
    """
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
    """Start a process that removes ``path`` once the pipe, whose other end is returned, closes without data.

    It has its own session, so that killing this process group does not kill both.
    """
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
    """Print whether the file of another host is here and complete."""
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
    """Return a descriptor of a regular file, without following links or blocking."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "not a regular file")


def _own_name(name: str) -> str:
    """Return the name, which another host may have chosen; others than probe files are refused."""
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
