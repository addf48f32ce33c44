"""Walks through folders: which folder a thread is in, and whether it contains itself by a symbolic link.

``os.walk(followlinks=True)``, ``glob("**", recursive=True)`` and functions of the user that list folders by themselves
follow such a link until the path has 40 of them (path_resolution(7)); with two links that is 2**40 folders. A path
shows it: two of the folders on the way to it are the same one.
"""

from __future__ import annotations

import collections
import itertools
import os
from collections.abc import Hashable, Iterator
from types import FrameType
from typing import Any

import msgspec

from doctor.core.background import BackgroundCall
from doctor.core.facts.telemetry import WALK
from doctor.core.text import lazy_compile
from doctor.monitor.telemetry.stacks.loop_exits import variables_of

_NEAR, _MOST_VARIABLES = 6, 32
"""Innermost frames whose variables are looked at, and variables of each."""
_WALKS = lazy_compile(r"(?:^<frozen os>|/lib(?:64)?/python\d+\.\d+/(?:os|glob|pathlib|pathlib/\w+)\.py)$")
_LISTS = lazy_compile(r"walk|glob|scandir|iter|select|list")
"""Functions of these files that list folders."""
OFTEN, DEADLINE = 3, 0.5
"""How often a name is in a path that may lead in a circle, and seconds for the questions to the file system."""


class FolderLoop(msgspec.Struct, frozen=True):
    """A folder that contains itself, as ``link``: another path to it, below it."""

    folder: str
    link: str


def folder_loop(frame: FrameType | None) -> FolderLoop | None:
    """Return the folder that the paths in the innermost frames lead through twice; ``None`` if there is none."""
    paths = {path for one in _innermost(frame) for path in _paths_in(one) if _repeats(path)}
    if not paths:
        return None
    try:  # a file server may not answer
        return BackgroundCall(lambda: next(filter(None, map(_loop_on, sorted(paths, key=len))), None)).result(DEADLINE)
    except (TimeoutError, RuntimeError):
        return None


def walk_in_words(frame: FrameType | None) -> str:
    """Return ``the end of a walk through /data, which contains itself as /data/train``, or of one through the folder
    that the stack shows; empty if it shows none."""
    loop = folder_loop(frame)
    if loop is not None:
        return f"{WALK}{loop.folder}, which contains itself as {loop.link}"
    for one in _innermost(frame):
        if _WALKS.search(one.f_code.co_filename) and _LISTS.search(one.f_code.co_name):
            return next((f"{WALK}{path}" for path in sorted(_paths_in(one), key=len)), "")
    return ""


def _innermost(frame: FrameType | None) -> Iterator[FrameType]:
    for _ in range(_NEAR):
        if frame is None:
            return
        yield frame
        frame = frame.f_back


def _paths_in(frame: FrameType) -> list[str]:
    """Return the absolute paths among the variables of a frame: texts, paths, and entries of a folder."""
    with variables_of(frame) as variables:
        values = list(itertools.islice(variables.values(), _MOST_VARIABLES))
    return [path for value in values if (path := _path_of(value)).startswith("/") and len(path) > 1]


def _path_of(value: Any) -> str:
    if type(value) is str:
        return value
    if isinstance(value, os.DirEntry):
        return value.path if isinstance(value.path, str) else ""
    is_path = type(value).__module__.partition(".")[0] == "pathlib"
    return str(value) if is_path else ""


def _repeats(path: str) -> bool:
    return path.count("/") >= 2 * OFTEN and max(collections.Counter(path.split("/")).values()) >= OFTEN


def _loop_on(path: str) -> FolderLoop | None:
    """Return the first folder on the way to a path that is one of those before it."""
    seen: dict[Hashable, str] = {}
    parts = path.split("/")
    for end in range(2, len(parts) + 1):
        folder = "/".join(parts[:end])
        try:
            found = os.stat(folder)  # noqa: PTH116 - a text of any length
        except (OSError, ValueError):
            return None
        first = seen.setdefault((found.st_dev, found.st_ino), folder)
        if first != folder:
            return FolderLoop(first, folder)
    return None
