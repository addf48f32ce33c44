"""Finds the settings file in effect, and decides how far it is trusted.

Exactly one file is used: the one that ``--config`` names, else the one that DOCTOR_CONFIG names, else that of the
project, else that of the user. All are data. A file may name code (``plugins``) only if the user or root owns it,
nobody else can write to it, and it was named explicitly or is the user's own: a downloaded folder may contain a
doctor.toml.
"""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from doctor.core.errors import UnusableError
from doctor.core.text import lazy_compile

VARIABLE = "DOCTOR_CONFIG"
"""The variable with the absolute path of a settings file: a relative path would mean another file in every folder."""

LARGEST = 1 << 18
"""Maximum size of a settings file in bytes; the largest pyproject.toml of well-known projects has a quarter of it."""
MOST_DOTS = 100
"""Maximum number of parts of a key on one line: the time that tomllib takes for a key is quadratic in them."""

_OUR_TABLE = lazy_compile(
    rb"""^[ \t]*\[+[ \t]*["']?tool["']?[ \t]*\.[ \t]*["']?(?:rank)?doctor["']?[ \t]*(?:[.\]]|$)""", re.MULTILINE
)
_OUR_KEY = lazy_compile(rb"""doctor["']?[ \t]*(?:[.\]]|=(?!=))""")
"""Every other form of our table has such a key; a requirement on the package is none."""
_STRING = lazy_compile(r""""[^"\n]*"|'[^'\n]*'""")

Origin = Literal["named", "project", "user"]


class UserSettingsFile(msgspec.Struct, frozen=True):
    """A settings file: our table in it, its text, its location, and whether only the user or root can write to it."""

    path: Path
    table: Mapping[str, Any]
    text: str
    origin: Origin
    is_private: bool

    @property
    def may_name_code(self) -> bool:
        """Whether its plugins are loaded."""
        return self.is_private and self.origin != "project"


class SettingsFileSearch(msgspec.Struct):
    """The search for the file in effect. ``notes``: sentences about files that were skipped."""

    start: Path
    environ: Mapping[str, str]
    notes: list[str] = msgspec.field(default_factory=list)

    def find(self, config: Path | None = None) -> UserSettingsFile | None:
        """Return the file in effect; ``config``: the file that the user named.

        Raises:
            UnusableError: it can't be used.
        """
        if config is None and self.environ.get(VARIABLE):
            config = Path(os.path.expanduser(self.environ[VARIABLE]))  # noqa: PTH111 - Path.expanduser may raise
            if not config.is_absolute():
                raise UnusableError(f"{VARIABLE}={config} is not an absolute path")
        if config is not None:
            return _opened(config, "named")
        return self._of_project() or self._of_user()

    def _of_project(self) -> UserSettingsFile | None:
        for directory in project_directories(self.start, _home(self.environ)):
            for name in ("doctor.toml", "pyproject.toml"):
                if found := self._taken(directory / name, "project"):
                    return found
        return None

    def _of_user(self) -> UserSettingsFile | None:
        base, home = self.environ.get("XDG_CONFIG_HOME", ""), _home(self.environ)
        if not os.path.isabs(base):  # noqa: PTH117 - as the XDG Base Directory Specification says of relative paths
            if home is None:
                return None
            base = str(home / ".config")
        return self._taken(Path(base, "rankdoctor", "doctor.toml"), "user")

    def _taken(self, path: Path, origin: Origin) -> UserSettingsFile | None:
        """The file, unless it is absent, has no table of ours, or is skipped."""
        try:
            owners = {path.lstat().st_uid, path.stat().st_uid}
        except OSError:
            return None
        strange = sorted(owners - trusted_users())
        if path.name == "pyproject.toml" and not _names_us(path):
            return None
        if strange:
            self.notes.append(f"{path} ignored: it belongs to uid {strange[0]}; to use it, pass --config {path}")
            return None
        return _opened(path, origin)


def project_directories(start: Path, home: Path | None) -> Iterator[Path]:
    """``start`` and its parents up to the root of the project or the home directory, as long as the user or root owns
    them."""
    for directory in (start, *start.parents):
        try:
            if directory != start and directory.stat().st_uid not in trusted_users():
                return
        except OSError:
            return
        yield directory
        if directory == home or any(os.path.lexists(directory / name) for name in (".git", "pyproject.toml")):
            return


def trusted_users() -> set[int]:
    """The numbers of this user and of root."""
    return {os.geteuid(), 0}


def is_private(status: os.stat_result) -> bool:
    """Whether only the user or root can have written a file."""
    return status.st_uid in trusted_users() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _home(environ: Mapping[str, str]) -> Path | None:
    home = environ.get("HOME") or os.path.expanduser("~")  # noqa: PTH111 - Path.home raises where there is none
    return Path(os.path.realpath(home)) if os.path.isabs(home) else None  # noqa: PTH117


def _names_us(project: Path) -> bool:
    """Whether a pyproject.toml may contain our table. Errors in other files are not reported."""
    try:
        content, _ = _content(project)
    except UnusableError:
        return False
    if _OUR_TABLE.search(content):
        return True
    if not _OUR_KEY.search(content):
        return False
    try:
        return not {"doctor", "rankdoctor"}.isdisjoint(_tools(_parsed(project, content)[0]))
    except UnusableError:
        return False


def _opened(path: Path, origin: Origin) -> UserSettingsFile:
    content, status = _content(path)
    table, text = _parsed(path, content)
    if path.name == "pyproject.toml":
        tools = _tools(table)
        if "rankdoctor" in tools:
            raise UnusableError(f"{path}: [tool.rankdoctor] is not read; name the table [tool.doctor]")
        if "doctor" not in tools:
            raise UnusableError(f"{path} has no table [tool.doctor]")
        table = tools["doctor"]
    return UserSettingsFile(path, table, text, origin, is_private(status))


def _tools(table: Mapping[str, Any]) -> Mapping[str, Any]:
    tools = table.get("tool")
    return tools if isinstance(tools, dict) else {}


def _content(path: Path) -> tuple[bytes, os.stat_result]:
    """The content of a regular file, and its status at that time. Never blocks: another type may be a FIFO or a
    device."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise UnusableError(f"{path} is not a regular file")
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
        with open(descriptor, "rb") as stream:  # noqa: PTH123 - it is open
            status = os.fstat(descriptor)
            content = stream.read(LARGEST + 1) if stat.S_ISREG(status.st_mode) else None
    except OSError as error:
        raise UnusableError(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError:  # a path with a null character
        raise UnusableError(f"{path!r} is not a path") from None
    if content is None:  # just replaced, or like /proc/kmsg, which claims to be regular and has no data yet
        raise UnusableError(f"{path} is not a regular file")
    if len(content) > LARGEST:
        raise UnusableError(f"{path} is larger than {LARGEST >> 10} KiB")
    return content, status


def _parsed(path: Path, content: bytes) -> tuple[dict[str, Any], str]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib

    try:
        text = content.decode("utf-8")
        if any(line.count(".") > MOST_DOTS for line in _STRING.sub("", text).splitlines()):
            raise UnusableError(f"{path} is not usable TOML: a line has more than {MOST_DOTS} dots")
        return tomllib.loads(text), text
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise UnusableError(f"{path} is not valid TOML: {reason}") from None
