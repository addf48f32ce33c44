"""The collector of a section, the machine that it reads, and readers that return nothing instead of raising."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from doctor.core.facts import Section


class NotPresent(Exception):
    """The machine lacks what the collector reads: the section is absent, and checks that need it skip."""


class NotVisible(Exception):
    """It exists, but this process may not read it: checks that need it end as unknown."""

    def __init__(self, reason: str, unhide: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.unhide = unhide


class Machine(msgspec.Struct, frozen=True):
    """The trees and variables that collectors read; tests pass recorded ones.

    ``directories``: pairs of role and path from the user's settings (``checkpoint``, ``/data/runs``). ``outputs``: the
    same for directories that a run creates on its first write. ``commands``: arguments of other users' processes may
    become facts.
    """

    environ: Mapping[str, str] = msgspec.field(default_factory=lambda: dict(os.environ))
    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    etc: Path = Path("/etc")
    dev: Path = Path("/dev")
    directories: tuple[tuple[str, str], ...] = ()
    outputs: tuple[tuple[str, str], ...] = ()
    commands: bool = False


class Collector(msgspec.Struct, frozen=True):
    """A section, the function that reads it, and its time limit in seconds.

    ``isolated``: the call may block in a driver, so it runs in a process that is killed at the deadline. ``present``
    runs first, in this process, and raises :class:`NotPresent` if there is nothing to read.
    """

    section: type[Section]
    collect: Callable[[Machine], Section]
    deadline: float = 5.0
    isolated: bool = False
    present: Callable[[Machine], None] | None = None

    @property
    def key(self) -> str:
        """Key of its section."""
        return self.section.key

    def within(self, seconds: float) -> Collector:
        """Return the same collector with a deadline of at most ``seconds``."""
        return msgspec.structs.replace(self, deadline=min(self.deadline, seconds))


COLLECTORS: dict[str, Collector] = {}
"""The collectors of the modules that are loaded, by the key of their section."""

Collect = TypeVar("Collect", bound=Callable[[Machine], Section])


def collector(
    section: type[Section],
    *,
    deadline: float = 5.0,
    isolated: bool = False,
    present: Callable[[Machine], None] | None = None,
) -> Callable[[Collect], Collect]:
    """Register the decorated function as the :class:`Collector` of ``section``."""

    def register(collect: Collect) -> Collect:
        COLLECTORS[section.key] = Collector(section, collect, deadline, isolated, present)
        return collect

    return register


def listed(folder: Path) -> list[str]:
    """Return the sorted names in ``folder``; none if it is missing or may not be read."""
    try:
        return sorted(os.listdir(folder))  # noqa: PTH208 - a tenth of the time of iterdir
    except OSError:
        return []


def link_target(path: Path) -> str | None:
    """Return the target of the symbolic link ``path``, or ``None``."""
    try:
        return str(path.readlink())
    except OSError:
        return None


def read_text(path: Path, limit: int = 1 << 20) -> str | None:
    """Return the stripped text of a small file, or ``None`` if it is missing or may not be read."""
    data = read_bytes(path, limit)
    return None if data is None else data.decode("utf-8", "replace").strip()


def read_bytes(path: Path | str, limit: int = 1 << 20) -> bytes | None:
    """Return a small file, or ``None`` if it is missing or may not be read. Without the objects of Python's streams,
    which take several times as long as the kernel does for a file of /proc."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        parts: list[bytes] = []
        while limit > 0 and (part := os.read(file, min(limit, _PART))):
            parts.append(part)
            limit -= len(part)
        return b"".join(parts)
    except OSError:
        return None
    finally:
        os.close(file)


_PART = 1 << 16


def read_rows(path: Path, limit: int = 1 << 20) -> list[list[str]]:
    """Return the lines of a file, split at blanks; none if it cannot be read."""
    return [line.split() for line in (read_text(path, limit) or "").splitlines()]


def read_pairs(path: Path, separator: str, limit: int = 1 << 20) -> dict[str, str]:
    """Return the lines ``name<separator>value`` of a file, stripped; of several with one name the first."""
    found: dict[str, str] = {}
    for line in (read_text(path, limit) or "").splitlines():
        name, _, value = line.partition(separator)
        found.setdefault(name.strip(), value.strip())
    return found


def first_known(*numbers: int | None) -> int | None:
    """Return the first of ``numbers`` that is not ``None``."""
    return next((number for number in numbers if number is not None), None)


def read_int(path: Path) -> int | None:
    """Return the integer in a file, or ``None``."""
    return parse_int(read_text(path))


def parse_int(text: str | None) -> int | None:
    """Return the decimal integer in ``text``, or ``None``; also for more than 18 digits."""
    if text is None or len(text.strip()) > 18:
        return None
    try:
        return int(text.strip())
    except ValueError:
        return None
