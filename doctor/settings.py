"""The user's settings: ``[tool.doctor]`` in pyproject.toml or a doctor.toml, in this directory or one above it.

A file that can't be used is one sentence and exit 2, never a guess.
"""

from __future__ import annotations

import datetime
import fnmatch
import math
import os
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from doctor.errors import UnusableError
from doctor.result import Ignored

if TYPE_CHECKING:
    # Ranks that do not judge read settings, too, and have no use for these.
    from doctor.catalog import Catalog
    from doctor.checking import Check
    from doctor.finding import Finding
    from doctor.lint.rule import Rule

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FailOn = Literal["error", "warning", "never"]

LEAST_TIMEOUT, MOST_TIMEOUT = 0.1, 3600.0
"""Seconds that a timeout may be."""

_OUR_TABLE = re.compile(rb"""^\s*\[+\s*["']?tool["']?\s*\.\s*["']?doctor["']?\s*(?:[.\]]|$)""", re.MULTILINE)


class IgnoreEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Findings that are known and accepted: ``id`` (or family), why, on which hosts or in which files (patterns), until
    when. A pattern of files matches the path as it was given, or its end: ``examples/*``."""

    id: str
    reason: str
    host: str | None = None
    until: datetime.date | None = None
    by: str = ""
    path: str | None = None

    def covers(self, check: Check, hosts: tuple[str, ...], today: datetime.date) -> bool:
        """Whether a finding of ``check`` on ``hosts`` is accepted on that day."""
        if self.path is not None or not self._names(check, today):
            return False
        return self.host is None or (bool(hosts) and all(fnmatch.fnmatchcase(host, self.host) for host in hosts))

    def covers_file(self, rule: Rule, file: str, today: datetime.date) -> bool:
        """Whether what ``rule`` finds in ``file`` is accepted on that day."""
        if self.host is not None or not self._names(rule, today):
            return False
        path = file.replace(os.sep, "/").removeprefix("./")
        return self.path is None or any(fnmatch.fnmatchcase(path, one) for one in (self.path, f"*/{self.path}"))

    def _names(self, owner: Check | Rule, today: datetime.date) -> bool:
        from doctor.catalog import matches

        return matches(owner.id, owner.family, self.id) and (self.until is None or today <= self.until)


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    """The table as it stands in the file."""

    select: list[str] = []
    ignore: list[IgnoreEntry] = []
    fail_on: FailOn = "error"
    timeout: float | None = None
    plugins: list[str] = []
    limits: dict[str, Any] = {}
    directories: dict[str, str] = {}


class Settings(msgspec.Struct, frozen=True):
    """Settings in force. ``select`` empty: all checks. ``directories``: pairs of role and path."""

    select: tuple[str, ...] = ()
    ignore: tuple[IgnoreEntry, ...] = ()
    fail_on: FailOn = "error"
    timeout: float = 30.0
    plugins: tuple[Path, ...] = ()
    limits: Mapping[str, float] = {}
    directories: tuple[tuple[str, str], ...] = ()

    def ignored(self, check: Check, _finding: Finding, hosts: tuple[str, ...]) -> Ignored | None:
        """Why a finding does not count, or ``None``."""
        today = datetime.date.today()
        entry = next((entry for entry in self.ignore if entry.covers(check, hosts, today)), None)
        return Ignored(entry.reason, entry.by) if entry else None

    def ignored_in(self, rule: Rule, file: str) -> Ignored | None:
        """Why what a rule finds in a file does not count, or ``None``."""
        today = datetime.date.today()
        entry = next((entry for entry in self.ignore if entry.covers_file(rule, file, today)), None)
        return Ignored(entry.reason, entry.by) if entry else None


def find_settings_file(start: Path) -> Path | None:
    """The nearest doctor.toml, or pyproject.toml that has ``[tool.doctor]``, from ``start`` upwards."""
    for directory in (start, *start.parents):
        if os.path.isfile(directory / "doctor.toml"):  # noqa: PTH113 - Path.is_file raises where it may not look
            return directory / "doctor.toml"
        project = directory / "pyproject.toml"
        if os.path.isfile(project) and _is_ours(project):  # noqa: PTH113
            return project
    return None


def _is_ours(project: Path) -> bool:
    """Whether a pyproject.toml has our table. One that is no TOML and does not name it is not ours to complain of."""
    try:
        tools = _load(project).get("tool")
    except UnusableError:
        if _OUR_TABLE.search(project.read_bytes() if os.access(project, os.R_OK) else b""):
            raise
        return False
    return isinstance(tools, dict) and "doctor" in tools


def read_settings(start: Path) -> Settings:
    """The settings for a command started in ``start``.

    Raises:
        UnusableError: the file is not TOML, or holds a name or value that is not known.
    """
    path = find_settings_file(start)
    if path is None:
        return Settings()
    content = _load(path)
    table = content if path.name == "doctor.toml" else content["tool"]["doctor"]
    try:
        known = msgspec.convert(table, _Table)
    except msgspec.ValidationError as error:
        raise UnusableError(f"{path}: {_plain(error)}") from None
    return Settings(
        select=tuple(known.select),
        ignore=_located(known.ignore, path),
        fail_on=known.fail_on,
        timeout=_seconds(known.timeout, path),
        plugins=tuple(path.parent / os.path.expanduser(plugin) for plugin in known.plugins),  # noqa: PTH111
        limits=dict(_flat(known.limits, path)),
        directories=tuple(sorted(_directories(known.directories, path))),
    )


def _seconds(timeout: float | None, path: Path) -> float:
    if timeout is None:
        return Settings().timeout
    if not LEAST_TIMEOUT <= timeout <= MOST_TIMEOUT:
        raise UnusableError(f"{path}: the timeout is not within {LEAST_TIMEOUT:g} and {MOST_TIMEOUT:g} s")
    return timeout


def _directories(directories: Mapping[str, str], path: Path) -> Iterable[tuple[str, str]]:
    for role, where in directories.items():
        if "\0" in where or not where:
            raise UnusableError(f"{path}: the directory {role} is no path")
        yield role, os.path.expanduser(where)  # noqa: PTH111 - Path.expanduser raises where there is no home


def _load(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UnusableError(f"{path} can't be read: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UnusableError(f"{path} is no TOML: {error or 'nested too deeply'}") from None


def _plain(error: msgspec.ValidationError) -> str:
    """Msgspec's words without its notation: ``$.ignore[0]`` becomes ``ignore[0]``."""
    return str(error).replace("`$.", "`").replace("Object ", "the table ").replace(" - at `$`", "")


def _located(entries: list[IgnoreEntry], path: Path) -> tuple[IgnoreEntry, ...]:
    """The entries with the line that names each; TOML readers do not keep lines, so the id is looked for."""
    lines: dict[str, list[int]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        for match in _ENTRY_ID.finditer(line.partition("#")[0]):
            lines.setdefault(match["id"], []).append(number)
    return tuple(msgspec.structs.replace(entry, by=path.name + _line(lines.get(entry.id))) for entry in entries)


_ENTRY_ID = re.compile(r"""\bid["']?\s*=\s*(["'])(?P<id>[^"']*)\1""")


def _line(lines: list[int] | None) -> str:
    """The next line that names an id: two entries may name one, for different hosts."""
    return f":{lines.pop(0)}" if lines else ""


def _flat(limits: Mapping[str, Any], path: Path) -> Iterable[tuple[str, float]]:
    """``MEM003.used_share = 0.8`` is a table in TOML unless it is quoted; both are meant alike."""
    for name, value in limits.items():
        if isinstance(value, dict):
            yield from ((f"{name}.{inner}", number) for inner, number in _flat(value, path))
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < math.inf:
            yield name, value
        else:
            raise UnusableError(f"{path}: the limit {name} is no number")


def require_known_limits(limits: Mapping[str, float], catalog: Catalog) -> None:
    """Refuse thresholds that no check has.

    Raises:
        UnusableError: with the nearest name there is.
    """
    known = [f"{check.id}.{name}" for check in catalog.checks for name in check.limits]
    for name in limits:
        if name not in known:
            raise UnusableError(f"no check has the limit {name}{suggestion(name, known)}")


def choose(catalog: Catalog, select: Iterable[str]) -> Catalog:
    """The checks named by ``select`` (ids, families, ``ALL``; nothing: all).

    Raises:
        UnusableError: a pattern names no check; with the nearest names there are.
    """
    from doctor.catalog import Catalog, matches

    patterns = list(select)
    require_known_patterns(catalog, patterns)
    if not patterns:
        return catalog
    chosen = [c for c in catalog.checks if any(matches(c.id, c.family, pattern) for pattern in patterns)]
    if not chosen:
        raise UnusableError(f"{', '.join(patterns)}: no check is called so, rules of doctor lint are")
    return Catalog(tuple(chosen), catalog.broken)


def require_known_patterns(catalog: Catalog, patterns: Iterable[str]) -> None:
    """Refuse patterns that name no check.

    Raises:
        UnusableError: with the nearest names there are.
    """
    from doctor.catalog import matches

    for pattern in patterns:
        known = pattern.upper() == "ALL" or any(matches(c.id, c.family, pattern) for c in catalog.checks)
        if not known and not is_built_in(pattern):
            names = [*catalog.ids(), *{c.family for c in catalog.checks}]
            raise UnusableError(f"no check or family is called {pattern}{suggestion(pattern, names)}")


def is_built_in(pattern: str) -> bool:
    """Whether a family is called so, or a check or rule of this distribution: every one has a page. One file of
    settings serves those who look at jobs and those who look at files."""
    from doctor.checking import FAMILIES
    from doctor.playbook import playbook_directory

    name = pattern.upper()
    if name in FAMILIES or name.lower() in FAMILIES.values():
        return True
    return name.isalnum() and (playbook_directory() / f"{name}.md").is_file()


def suggestion(name: str, known: list[str]) -> str:
    """The nearest names there are, as the end of a sentence; empty where none is near."""
    import difflib

    near = difflib.get_close_matches(name.upper(), [item.upper() for item in known], n=3, cutoff=0.5)
    return f"; near: {', '.join(near)}" if near else ""
