"""The user's settings: a doctor.toml, or ``[tool.doctor]`` in pyproject.toml; :mod:`doctor.core.files.settings_file`
finds it.

A file that can't be used is one sentence and exit 2, never a guess.
"""

from __future__ import annotations

import datetime
import fnmatch
import math
import os
import re
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from doctor.core.decoding import prepared
from doctor.core.errors import UnusableError
from doctor.core.files.settings_file import VARIABLE, SettingsFileSearch, UserSettingsFile, is_private
from doctor.core.report_document import FailOn, Ignored

if TYPE_CHECKING:
    # Ranks that do not judge read settings, too, and have no use for these.
    from doctor.core.check import Check
    from doctor.core.check_registry import CheckRegistry
    from doctor.core.finding import Finding

LEAST_TIMEOUT, MOST_TIMEOUT = 0.1, 3600.0
"""Seconds that a timeout may be."""


class HasId(Protocol):
    """A check or a rule over files, as patterns of settings name it."""

    @property
    def id(self) -> str:
        """Such as ``NET007``."""

    @property
    def family(self) -> str:
        """The word of its family."""


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

    def covers_file(self, rule: HasId, file: str, today: datetime.date) -> bool:
        """Whether what ``rule`` finds in ``file`` is accepted on that day."""
        if self.host is not None or not self._names(rule, today):
            return False
        path = file.replace(os.sep, "/").removeprefix("./")
        return self.path is None or any(fnmatch.fnmatchcase(path, one) for one in (self.path, f"*/{self.path}"))

    def _names(self, owner: HasId, today: datetime.date) -> bool:
        from doctor.core.check_registry import matches

        return matches(owner.id, owner.family, self.id) and (self.until is None or today <= self.until)


class _SettingsTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    """The table as it stands in the file."""

    select: list[str] = []
    ignore: list[IgnoreEntry] = []
    fail_on: FailOn = "error"
    timeout: float | None = None
    plugins: list[str] = []
    limits: dict[str, Any] = {}
    directories: dict[str, str] = {}


class Settings(msgspec.Struct, frozen=True):
    """Settings in force. ``select`` empty: all checks. ``directories``: pairs of role and path. ``withheld``: plugins
    that the file names and may not. ``notes``: sentences for stderr about files and plugins that do not count.
    ``typed``: patterns that come from the command line or the callback. ``commands``: show the
    arguments of other users' processes."""

    select: tuple[str, ...] = ()
    ignore: tuple[IgnoreEntry, ...] = ()
    fail_on: FailOn = "error"
    timeout: float = 30.0
    plugins: tuple[Path, ...] = ()
    limits: Mapping[str, float] = {}
    directories: tuple[tuple[str, str], ...] = ()
    commands: bool = False
    withheld: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    typed: frozenset[str] = frozenset()

    def to_be_known(self) -> list[str]:
        """The patterns of ``select`` and ``ignore`` that have to name something. Those of a file whose plugins are not
        loaded may be theirs."""
        patterns = [*self.select, *(entry.id for entry in self.ignore)]
        return [one for one in patterns if one in self.typed] if self.withheld else patterns

    def ignored(self, check: Check, _finding: Finding, hosts: tuple[str, ...]) -> Ignored | None:
        """Why a finding does not count, or ``None``."""
        today = datetime.date.today()
        entry = next((entry for entry in self.ignore if entry.covers(check, hosts, today)), None)
        return Ignored(entry.reason, entry.by) if entry else None

    def ignored_in(self, rule: HasId, file: str) -> Ignored | None:
        """Why what a rule finds in a file does not count, or ``None``."""
        today = datetime.date.today()
        entry = next((entry for entry in self.ignore if entry.covers_file(rule, file, today)), None)
        return Ignored(entry.reason, entry.by) if entry else None


def read_settings(start: Path, *, config: Path | None = None, isolated: bool = False) -> Settings:
    """The settings for a command started in ``start``; ``config``: the file that the user named; ``isolated``: none.

    Raises:
        UnusableError: the file is not TOML, holds a name or value that is not known, or names plugins although others
            may write to it.
    """
    if isolated:
        return Settings()
    search = SettingsFileSearch(start, os.environ)
    file = search.find(config)
    if file is None:
        return Settings(notes=tuple(search.notes))
    try:
        return _settings_in(file, search.notes)
    except RecursionError:
        raise UnusableError(f"{file.path}: nested too deeply") from None


def _settings_in(file: UserSettingsFile, notes: list[str]) -> Settings:
    path = file.path
    try:
        known = msgspec.convert(file.table, prepared(_SettingsTable))
    except msgspec.ValidationError as error:
        raise UnusableError(f"{path}: {_plain(error)}") from None
    if known.plugins and not file.may_name_code:
        notes = [*notes, _why_withheld(file, known.plugins)]
    return Settings(
        select=tuple(known.select),
        ignore=_located(known.ignore, file),
        fail_on=known.fail_on,
        timeout=_seconds(known.timeout, path),
        plugins=tuple(_trusted(plugin, path) for plugin in _plugins(known.plugins, path)) if file.may_name_code else (),
        limits=dict(_flat(known.limits, path)),
        directories=tuple(sorted(_directories(known.directories, path))),
        withheld=() if file.may_name_code else tuple(known.plugins),
        notes=tuple(notes),
    )


def _plugins(names: Iterable[str], path: Path) -> Iterable[Path]:
    for name in names:
        if "\0" in name or not name:
            raise UnusableError(f"{path}: {name!r} in plugins is not a path")
        yield path.absolute().parent / os.path.expanduser(name)  # noqa: PTH111 - Path.expanduser may raise


def _trusted(plugin: Path, settings: Path) -> Path:
    """The plugin. Who may write to it may run code here, however well the settings are kept.

    Raises:
        UnusableError: others own it, or may write to it.
    """
    try:
        seen = plugin.stat()
    except OSError:
        return plugin  # whoever loads it says so
    if not is_private(seen):
        raise UnusableError(f"{settings}: the plugin {plugin} is not loaded, because others own it or may write to it")
    return plugin


def _why_withheld(file: UserSettingsFile, plugins: list[str]) -> str:
    """Why the plugins of a file are not loaded, and how to have them.

    Raises:
        UnusableError: the user named the file, and relies on them.
    """
    path, names = file.path, ", ".join(plugins)
    if file.origin == "project":
        trust = f"pass --config {shlex.quote(str(path))} or set {VARIABLE}"
        return f"{path}: plugins not loaded ({names}), because the file was not named; to load them, {trust}"
    why = f"{path}: plugins not loaded ({names}), because others may write to the file or own it"
    way_out = f"chown {os.geteuid()} and chmod go-w it, or pass --plugin"
    if file.origin == "named":
        raise UnusableError(f"{why}; {way_out}")
    return f"{why}; {way_out}"


def _seconds(timeout: float | None, path: Path) -> float:
    if timeout is None:
        return Settings().timeout
    if not LEAST_TIMEOUT <= timeout <= MOST_TIMEOUT:
        raise UnusableError(f"{path}: the timeout is not within {LEAST_TIMEOUT:g} and {MOST_TIMEOUT:g} s")
    return timeout


def _directories(directories: Mapping[str, str], path: Path) -> Iterable[tuple[str, str]]:
    for role, where in directories.items():
        if "\0" in where or not where:
            raise UnusableError(f"{path}: the directory {role} is not a path")
        yield role, os.path.expanduser(where)  # noqa: PTH111 - Path.expanduser raises where there is no home


def _plain(error: msgspec.ValidationError) -> str:
    """Msgspec's words without its notation: ``$.ignore[0]`` becomes ``ignore[0]``."""
    return str(error).replace("`$.", "`").replace("Object ", "the table ").replace(" - at `$`", "")


def _located(entries: list[IgnoreEntry], file: UserSettingsFile) -> tuple[IgnoreEntry, ...]:
    """The entries with the line that names each; TOML readers do not keep lines, so the id is looked for."""
    lines: dict[str, list[int]] = {}
    for number, line in enumerate(file.text.splitlines(), 1):
        for match in _ENTRY_ID.finditer(line.partition("#")[0]):
            lines.setdefault(match["id"], []).append(number)
    return tuple(msgspec.structs.replace(entry, by=file.path.name + _line(lines.get(entry.id))) for entry in entries)


_ENTRY_ID = re.compile(r"""\bid["']?\s*=\s*(["'])(?P<id>[^"']*)\1""")


def _line(lines: list[int] | None) -> str:
    """The next line that names an id: two entries may name one, for different hosts."""
    return f":{lines.pop(0)}" if lines else ""


def _flat(limits: Mapping[str, Any], path: Path) -> Iterable[tuple[str, float]]:
    """``MEM003.used_share = 0.8`` is a table in TOML unless it is quoted; both mean the same."""
    for name, value in limits.items():
        if isinstance(value, dict):
            yield from ((f"{name}.{inner}", number) for inner, number in _flat(value, path))
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < math.inf:
            yield name, value
        else:
            raise UnusableError(f"{path}: the limit {name} is not a finite number")


def require_known_limits(settings: Settings, catalog: CheckRegistry) -> None:
    """Refuse thresholds that no check has; one of a check that is not there may be a withheld plugin's.

    Raises:
        UnusableError: with the nearest name there is.
    """
    known = [f"{check.id}.{name}" for check in catalog.checks for name in check.limits]
    for name in settings.limits:
        is_strange = bool(settings.withheld) and name.partition(".")[0] not in catalog.ids()
        if name not in known and not is_strange:
            raise UnusableError(f"no check has the limit {name}{suggestion(name, known)}")


def choose(catalog: CheckRegistry, select: Iterable[str]) -> CheckRegistry:
    """The checks named by ``select`` (ids, families, ``ALL``; nothing: all).

    Raises:
        UnusableError: no pattern names a check.
    """
    from doctor.core.check_registry import CheckRegistry, matches

    patterns = list(select)
    if not patterns:
        return catalog
    chosen = [c for c in catalog.checks if any(matches(c.id, c.family, pattern) for pattern in patterns)]
    if not chosen:
        require_known_patterns(catalog, patterns)
        raise UnusableError(f"{', '.join(patterns)}: no check is called so, rules of doctor lint are")
    return CheckRegistry(tuple(chosen), catalog.broken)


def require_known_patterns(catalog: CheckRegistry, patterns: Iterable[str]) -> None:
    """Refuse patterns that name no check.

    Raises:
        UnusableError: with the nearest names there are.
    """
    from doctor.core.check_registry import matches

    for pattern in patterns:
        known = pattern.upper() == "ALL" or any(matches(c.id, c.family, pattern) for c in catalog.checks)
        if not known and not is_built_in(pattern):
            names = [*catalog.ids(), *{c.family for c in catalog.checks}]
            raise UnusableError(f"no check or family is called {pattern}{suggestion(pattern, names)}")


def is_built_in(pattern: str) -> bool:
    """Whether a family is called so, or a check or rule of this distribution: every one has a page. One file of
    settings serves those who look at jobs and those who look at files."""
    from doctor.core.check import FAMILIES
    from doctor.core.check_registry import playbook_directory

    name = pattern.upper()
    if name in FAMILIES or name.lower() in FAMILIES.values():
        return True
    return name.isalnum() and (playbook_directory() / f"{name}.md").is_file()


def suggestion(name: str, known: Iterable[str]) -> str:
    """The nearest names there are, as they are written, as the end of a sentence; empty where none is near."""
    import difflib

    written = {item.upper(): item for item in known}
    near = difflib.get_close_matches(name.upper(), list(written), n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(written[item] for item in near)}?" if near else ""
