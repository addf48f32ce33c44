"""The user's settings: a doctor.toml, or ``[tool.doctor]`` in pyproject.toml, as
:mod:`doctor.core.files.settings_file` finds it.

An unusable file ends the command with one sentence and exit code 2.
"""

from __future__ import annotations

import datetime
import fnmatch
import math
import os
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol, get_args

import msgspec
from msgspec import Meta

from doctor.core.clock import time
from doctor.core.decoding import prepared
from doctor.core.errors import UnusableError
from doctor.core.files.settings_file import VARIABLE, SettingsFileSearch, UserSettingsFile, is_private
from doctor.core.report_document import FailOn, Ignored
from doctor.core.text import lazy_compile

if TYPE_CHECKING:
    # Ranks that do not run checks read settings too, and do not need these modules.
    from doctor.core.check import Check
    from doctor.core.check_registry import CheckRegistry
    from doctor.core.finding import Finding

LEAST_TIMEOUT, MOST_TIMEOUT = 0.1, 3600.0
"""The range of a timeout, in seconds."""


class HasId(Protocol):
    """A check or a rule, as the patterns of settings select it."""

    @property
    def id(self) -> str:
        """The id, such as ``NET007``."""

    @property
    def family(self) -> str:
        """The name of its family."""


class IgnoreEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Accepted findings: ``id`` (or family), the reason, the hosts or files (patterns), and the expiry date. A pattern
    of files matches the path as it was specified, or its end: ``examples/*``."""

    id: Annotated[str, Meta(description="The id or the family of the findings that are accepted.")]
    reason: Annotated[str, Meta(description="Why they are accepted; it is shown in the report.")]
    host: Annotated[str | None, Meta(description="Only on hosts whose name matches this pattern.")] = None
    until: Annotated[datetime.date | None, Meta(description="The last day on which they are accepted.")] = None
    by: str = ""
    path: Annotated[
        str | None, Meta(description="Only in files whose path, or its end, matches this pattern (`doctor lint`).")
    ] = None

    def covers(self, check: Check, hosts: tuple[str, ...], today: datetime.date) -> bool:
        """Whether a finding of ``check`` on ``hosts`` is accepted on that day."""
        if self.path is not None or not self._names(check, today):
            return False
        return self.host is None or (bool(hosts) and all(fnmatch.fnmatchcase(host, self.host) for host in hosts))

    def covers_file(self, rule: HasId, file: str, today: datetime.date) -> bool:
        """Whether a finding of ``rule`` in ``file`` is accepted on that day."""
        if self.host is not None or not self._names(rule, today):
            return False
        path = file.replace(os.sep, "/").removeprefix("./")
        return self.path is None or any(fnmatch.fnmatchcase(path, one) for one in (self.path, f"*/{self.path}"))

    def _names(self, owner: HasId, today: datetime.date) -> bool:
        from doctor.core.check_registry import matches

        return matches(owner.id, owner.family, self.id) and (self.until is None or today <= self.until)


_Location = Annotated[str, Meta(extra_json_schema={"minLength": 1})]


class LintTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    """Settings of ``doctor lint`` alone."""

    tests: Annotated[bool, Meta(description="Report findings in files that a test runner finds, too.")] = False


class SettingsTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    """Settings of rankdoctor."""

    select: Annotated[list[str], Meta(description="Checks to run: ids, families or ALL. Default: all.")] = []
    ignore: Annotated[
        list[IgnoreEntry], Meta(description="Accepted findings. They stay visible and do not change the exit code.")
    ] = []
    fail_on: Annotated[FailOn, Meta(description="The severity from which the exit code is 1.")] = "error"
    preview: Annotated[bool, Meta(description="Report findings of `doctor lint` that are in preview, too.")] = False
    lint: Annotated[LintTable, Meta(description="Settings of `doctor lint` alone.")] = LintTable()
    timeout: Annotated[
        float | None,
        Meta(
            description="Seconds that ranks wait for each other, and that a collector may take.",
            extra_json_schema={"minimum": LEAST_TIMEOUT, "maximum": MOST_TIMEOUT},
        ),
    ] = None
    plugins: Annotated[
        list[_Location],
        Meta(description="Python files with checks; loaded only from a settings file that you name or that is yours."),
    ] = []
    limits: Annotated[dict[str, Any], Meta(description="Thresholds of checks, such as MEM003.used_share.")] = {}
    directories: Annotated[
        dict[str, _Location], Meta(description="Folders of the job to check, by role, such as checkpoint.")
    ] = {}


class Settings(msgspec.Struct, frozen=True):
    """The settings in effect. ``select`` empty: all checks. ``directories``: pairs of role and path. ``withheld``:
    plugins that the file names but is not trusted to load. ``notes``: sentences for stderr about files and plugins
    that are ignored. ``typed``: patterns from the command line or the callback. ``commands``: show the arguments of
    other users' processes. ``replaced``: patterns of the file that the command line overrides; a typing error in them
    is reported, too. ``preview``: report findings over files that are in preview; ``tests``: those in tests."""

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
    replaced: tuple[str, ...] = ()
    preview: bool = False
    tests: bool = False

    def to_be_known(self) -> list[str]:
        """The patterns of ``select`` and ``ignore`` that must match something. Those of a file whose plugins are not
        loaded may refer to these plugins."""
        patterns = [*self.select, *self.replaced, *(entry.id for entry in self.ignore)]
        return [one for one in patterns if one in self.typed] if self.withheld else patterns

    def ignored(self, check: Check, _finding: Finding, hosts: tuple[str, ...]) -> Ignored | None:
        """Why a finding is ignored, or ``None``."""
        today = datetime.date.fromtimestamp(time())
        entry = next((entry for entry in self.ignore if entry.covers(check, hosts, today)), None)
        return Ignored(entry.reason, entry.by) if entry else None

    def ignored_in(self, rule: HasId, file: str) -> Ignored | None:
        """Why a finding of a rule in a file is ignored, or ``None``."""
        today = datetime.date.fromtimestamp(time())
        entry = next((entry for entry in self.ignore if entry.covers_file(rule, file, today)), None)
        return Ignored(entry.reason, entry.by) if entry else None


def read_settings(start: Path, *, config: Path | None = None, isolated: bool = False) -> Settings:
    """Return the settings for a command started in ``start``; ``config``: the file that the user named; ``isolated``:
    none.

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
        known = msgspec.convert(file.table, prepared(SettingsTable))
    except msgspec.ValidationError as error:
        raise UnusableError(f"{path}: {_plain(str(error))}") from None
    if known.plugins and not file.may_name_code:
        notes = [*notes, _why_withheld(file, known.plugins)]
    return Settings(
        select=tuple(known.select),
        ignore=_located(known.ignore, file),
        fail_on=known.fail_on,
        preview=known.preview,
        tests=known.lint.tests,
        timeout=_seconds(known.timeout, path),
        plugins=tuple(_plugins(known.plugins, path)) if file.may_name_code else (),
        limits=dict(_flat(known.limits, path)),
        directories=tuple(sorted(_directories(known.directories, path))),
        withheld=() if file.may_name_code else tuple(known.plugins),
        notes=tuple(notes),
    )


_UNKNOWN_KEY = lazy_compile(r"Object contains unknown field `(?P<key>.*)`")
_INVALID_VALUE = lazy_compile(r"Invalid enum value '(?P<value>.*)'")


def _plain(message: str) -> str:
    """Return a message of msgspec in the terms of a settings file, with what was expected: ``$.ignore[0]`` becomes
    ``ignore[0]``."""
    what, _, where = message.partition(" - at `$")
    where = where.removeprefix(".").removesuffix("`")
    kind = IgnoreEntry if where.startswith("ignore[") else SettingsTable
    if found := _UNKNOWN_KEY.match(what):
        keys = [field.encode_name for field in msgspec.structs.fields(kind) if field.name != "by"]
        near = suggestion(found["key"], keys) or f"; known are {', '.join(keys)}"
        return f"unknown key {found['key']!r}{f' in {where}' if where else ''}{near}"
    if found := _INVALID_VALUE.match(what):
        return f"{where}: {found['value']!r} is not one of {', '.join(get_args(FailOn))}"
    if what.startswith("Invalid RFC3339"):
        return f"{where}: not a date such as 2026-12-31"
    return f"{what}{f' - at `{where}`' if where else ''}".replace("Object ", "the table ")


def _plugins(names: Iterable[str], path: Path) -> Iterable[Path]:
    """Whoever can write to a plugin can execute code here, even if the settings file is protected."""
    for name in names:
        if "\0" in name or not name:
            raise UnusableError(f"{path}: {name!r} in plugins is not a path")
        plugin = path.absolute().parent / os.path.expanduser(name)  # noqa: PTH111 - Path.expanduser may raise
        try:
            is_trusted = is_private(plugin.stat())
        except OSError:
            is_trusted = True  # reported when it is loaded
        if not is_trusted:
            raise UnusableError(f"{path}: the plugin {plugin} is not loaded, because others own it or may write to it")
        yield plugin


def _why_withheld(file: UserSettingsFile, plugins: list[str]) -> str:
    """Why the plugins of a file are not loaded, and how to enable them.

    Raises:
        UnusableError: the user named the file, and relies on them.
    """
    path, names = file.path, ", ".join(plugins)
    if file.origin == "project":
        trust = f"pass --config {shlex.quote(str(path))} or set {VARIABLE}"
        return f"{path}: plugins not loaded ({names}), because the file was not named; to load them, {trust}"
    why = f"{path}: plugins not loaded ({names}), because others may write to the file or own it"
    remedy = f"chown {os.geteuid()} and chmod go-w it, or pass --plugin"
    if file.origin == "named":
        raise UnusableError(f"{why}; {remedy}")
    return f"{why}; {remedy}"


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


def _located(entries: list[IgnoreEntry], file: UserSettingsFile) -> tuple[IgnoreEntry, ...]:
    """The entries with the line of each; TOML readers do not keep line numbers, so the id is searched. Two entries may
    have the same id for different hosts."""
    places: dict[str, list[str]] = {}
    for number, line in enumerate(file.text.splitlines(), 1):
        for match in _ENTRY_ID.finditer(line.partition("#")[0]):
            places.setdefault(match["id"], []).append(f"{file.path.name}:{number}")
    return tuple(
        msgspec.structs.replace(entry, by=found.pop(0) if (found := places.get(entry.id)) else file.path.name)
        for entry in entries
    )


_ENTRY_ID = lazy_compile(r"""\bid["']?\s*=\s*(["'])(?P<id>[^"']*)\1""")


def _flat(limits: Mapping[str, Any], path: Path) -> Iterable[tuple[str, float]]:
    """Join nested tables: ``MEM003.used_share = 0.8`` is a table in TOML unless it is quoted; accept both."""
    for name, value in limits.items():
        if isinstance(value, dict):
            yield from ((f"{name}.{inner}", number) for inner, number in _flat(value, path))
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < math.inf:
            yield name, value
        else:
            raise UnusableError(f"{path}: the limit {name} is not a finite number")


def require_known_limits(settings: Settings, catalog: CheckRegistry) -> None:
    """Raise :exc:`UnusableError` with the nearest name for a threshold that no check has. A check that is not installed
    may come from a withheld plugin."""
    known = [f"{check.id}.{name}" for check in catalog.checks for name in check.limits]
    for name in settings.limits:
        is_strange = bool(settings.withheld) and name.partition(".")[0] not in catalog.ids()
        if name not in known and not is_strange:
            raise UnusableError(f"unknown limit {name!r}{suggestion(name, known)}")


def choose(catalog: CheckRegistry, select: Iterable[str]) -> CheckRegistry:
    """Return the checks that ``select`` names (ids, families, ``ALL``; empty: all).

    Raises:
        UnusableError: no pattern names a check.
    """
    from doctor.core.check_registry import CheckRegistry, matches

    patterns = list(select)
    if not patterns:
        return catalog
    chosen = [c for c in catalog.checks if any(matches(c.id, c.family, pattern) for pattern in patterns)]
    # What could not be loaded may be what was selected: its crash line is the answer then.
    if not chosen and not catalog.broken:
        require_known_patterns(catalog, patterns)
        raise UnusableError(f"{', '.join(patterns)}: not a check, but a rule of doctor lint")
    return CheckRegistry(tuple(chosen), catalog.broken)


def require_known_patterns(catalog: CheckRegistry, patterns: Iterable[str]) -> None:
    """Raise :exc:`UnusableError` with the nearest names for a pattern that matches no check."""
    from doctor.core.check_registry import matches

    for pattern in patterns:
        known = pattern.upper() == "ALL" or any(matches(c.id, c.family, pattern) for c in catalog.checks)
        if not known and not is_built_in(pattern) and not catalog.broken:
            names = [*catalog.ids(), *{c.family for c in catalog.checks}]
            near = suggestion(pattern, names) or ". Run 'doctor list' to see all checks"
            raise UnusableError(f"unknown check or family {pattern!r}{near}")


def is_built_in(pattern: str) -> bool:
    """Whether it is a built-in family, check or rule: each has a playbook page. One settings file serves both the
    checks of jobs and the rules over files."""
    from doctor.core.check import FAMILIES
    from doctor.core.check_registry import playbook_directory

    name = pattern.upper()
    if name in FAMILIES or name.lower() in FAMILIES.values():
        return True
    return name.isalnum() and (playbook_directory() / f"{name}.md").is_file()


def suggestion(name: str, known: Iterable[str]) -> str:
    """The nearest known names, as they are written, as the end of a sentence; empty if none is near."""
    import difflib

    written = {item.upper(): item for item in known}
    near = difflib.get_close_matches(name.upper(), list(written), n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(written[item] for item in near)}?" if near else ""
