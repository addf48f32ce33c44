"""Temporary files with the members of archives, so that every reader of files can read them."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType

from doctor.core.errors import UnusableError
from doctor.core.files.spooled_streams import SpooledPath
from doctor.postmortem.filenames import name_of
from doctor.postmortem.sandbox.archives import copy_members

MOST_DEPTH = 2
"""Maximum depth of archives in archives."""
MOST_BYTES = 1 << 30
"""Maximum bytes of all members of all archives of a command."""
MOST_SECONDS, ALL_SECONDS = 60.0, 120.0
"""Maximum seconds for one archive, and for all together unless the user specifies them."""


class UnpackedArchives(AbstractContextManager["UnpackedArchives"]):
    """Copies of the members of all archives of a command, which are removed at its end."""

    def __init__(self, seconds: float | None = None) -> None:
        """Set up; ``seconds``: time for all archives together."""
        self._folder: Path | None = None
        self._count = 0
        self._left = MOST_BYTES
        self._until = time.monotonic() + (ALL_SECONDS if seconds is None else seconds)

    def members_of(self, archive: Path, *, named: bool) -> tuple[list[tuple[Path, str | None]], str | None]:
        """Return the members, each with the reason why it was not copied, and why the archive was not read to its end.

        Raises:
            UnusableError: the archive cannot be read.
        """
        try:
            self._folder = self._folder or Path(tempfile.mkdtemp(prefix="doctor-"))
            self._count += 1
            folder = self._folder / str(self._count)
            folder.mkdir(mode=0o700)
        except OSError as error:
            raise UnusableError(f"it can't be unpacked: {error.strerror or error}") from None
        seconds = min(MOST_SECONDS, self._until - time.monotonic())
        if seconds <= 0 or self._left <= 0:
            raise UnusableError("other archives took the time or the size that all may take together")
        try:
            contents = copy_members(archive, folder, most=self._left, seconds=seconds, named=named)
        except UnusableError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self._left -= contents.size
        shown = name_of(archive)
        return [
            (alias(folder / str(member.number), f"{shown}/{member.name}"), member.why) for member in contents.members
        ], contents.cut and f"{shown}: {contents.cut}"

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Remove the copies."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def alias(path: Path, shown: str, cut: str | None = None) -> Path:
    """Return the path with another name for users, and what was not read of it."""
    named: SpooledPath = SpooledPath(os.fspath(path))
    named.shown = shown
    named.cut = cut
    return named
