"""Finds checks: built-ins by walking ``doctor_checks``, plugins by entry points ``doctor.checks`` and by file.

A run reads an index of the built-in checks (``doctor_checks/index.json``) instead, and imports only the modules of
those that apply. ``python -m doctor.report.playbook`` writes it; a test compares it with the checks.

An exception at import, of a plugin or of a built-in module or package, becomes a :class:`BrokenPlugin` entry and a
``crash`` line in the report, which is then never ``pass``.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import os
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from itertools import chain
from pathlib import Path
from types import ModuleType

import msgspec

from doctor.core.check import FAMILIES, Case, Check, State
from doctor.core.decoding import prepared
from doctor.core.errors import UnusableError
from doctor.core.facts import SECTIONS
from doctor.core.finding import Scope, Severity, Verdict
from doctor.core.job import Job
from doctor.version import PACKAGE

ENTRY_POINTS = "doctor.checks"
INDEX = "index.json"
"""Name of the file, in the package of the checks."""
RULE_FAMILY = "code"
"""Family of the rules over files that belong to no check."""
CHECK_RULES = "rules"
"""Package of the rules over files that find the fault of a check."""
RULE_PACKAGES = (RULE_FAMILY, CHECK_RULES)
"""Packages of ``doctor_checks`` that hold rules instead of checks: a run imports none of their modules."""

LONGEST_SENTENCE = 300
"""Maximum number of characters of a plugin's exception that are reported."""


def sentence_of(error: BaseException) -> str:
    """Kind and message of a plugin's exception on one line; ``str`` of an exception may itself fail."""
    try:
        words = " ".join(str(error).split())
    except Exception:
        words = "it can't be printed"
    kind = type(error).__name__
    return f"{kind}: {words[:LONGEST_SENTENCE]}" if words else kind


class BrokenPlugin(msgspec.Struct, frozen=True):
    """An installed plugin or a built-in module that failed to load: which, and why."""

    name: str
    origin: str
    reason: str


class CheckRegistry(msgspec.Struct, frozen=True):
    """All checks in the order of reports, and the plugins and built-in modules that failed to load."""

    checks: tuple[Check, ...]
    broken: tuple[BrokenPlugin, ...] = ()

    def ids(self) -> tuple[str, ...]:
        """All ids."""
        return tuple(check.id for check in self.checks)


def load_registry(plugin_files: Iterable[Path] = (), *, plugins: bool = True, by_index: bool = False) -> CheckRegistry:
    """Built-ins, installed plugins, and the checks in ``plugin_files``.

    ``by_index``: the module of a built-in check is imported when the check is called; one that fails to load is then
    an error of the check.

    Raises:
        UnusableError: a plugin file can't be read, holds no check, or claims an id that is taken.
    """
    broken: list[BrokenPlugin] = []
    builtin = indexed_checks(broken) if by_index else builtin_checks(broken)
    checks = {check.id: check for check in builtin}
    for entry in entry_points(ENTRY_POINTS, broken) if plugins else ():
        broken.extend(_add_plugin(checks, entry))
    for path in plugin_files:
        _add_file(checks, path)
    families = {family: position for position, family in enumerate(FAMILIES.values())}
    order = sorted(checks.values(), key=lambda check: (families.get(check.family, len(families)), check.id))
    return CheckRegistry(tuple(order), tuple(broken))


def builtin_checks(broken: list[BrokenPlugin] | None = None) -> Iterator[Check]:
    """The checks of this distribution, each module imported once. Modules that fail to load are added to ``broken``.

    Raises:
        ValueError: two of them have the same id.
    """
    seen: dict[str, str] = {}
    for module in walk_modules(builtin_package(), broken, enters=lambda name: name not in RULE_PACKAGES):
        found = checks_in(module)
        # Cut short by a full disk, a source file may still be valid Python.
        if broken is not None and not found:
            broken.append(BrokenPlugin(module.__name__, "built-in", "it defines no check"))
        for check in found:
            if check.id in seen:
                raise ValueError(f"{check.id} is in {seen[check.id]} and in {module.__name__}")
            seen[check.id] = module.__name__
            yield check


def playbook_directory() -> Path:
    """The folder of the pages of ``doctor explain``: data of the installed package, else the folder in the checkout."""
    installed = Path(PACKAGE, "_playbooks")
    return installed if installed.is_dir() else _checkout() / "playbooks"


def _checkout() -> Path:
    """The folder that holds this package."""
    return Path(PACKAGE).resolve().parent


def builtin_package() -> ModuleType:
    """The package ``doctor_checks``; in a checkout it is in the folder ``checks`` beside this package."""
    try:
        return importlib.import_module("doctor_checks")
    except ModuleNotFoundError as error:
        shelf = _checkout() / "checks"
        if error.name != "doctor_checks" or not shelf.is_dir():
            raise
        sys.path.append(str(shelf))
        return importlib.import_module("doctor_checks")


def walk_modules(
    package: ModuleType, broken: list[BrokenPlugin] | None = None, *, enters: Callable[[str], bool] | None = None
) -> Iterator[ModuleType]:
    """The modules below ``package``, in the order of their names; ``enters`` says in which of its packages, by name.
    Modules and packages that fail to load are added to ``broken``; if that is ``None``, the error is raised."""
    for info in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        name = info.name.rpartition(".")[2]
        if name.startswith("_") if not info.ispkg else enters is not None and not enters(name):
            continue
        try:
            module = importlib.import_module(info.name)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            if broken is None:
                raise
            broken.append(BrokenPlugin(info.name, "built-in", sentence_of(error)))
            continue
        if not info.ispkg:
            yield module
        elif hasattr(module, "__path__"):
            yield from walk_modules(module, broken)


def checks_in(module: ModuleType) -> list[Check]:
    """The checks that a module defines at its top level."""
    return [value for value in vars(module).values() if isinstance(value, Check)]


def entry_points(group: str, broken: list[BrokenPlugin]) -> Iterable[importlib.metadata.EntryPoint]:
    """The plugins of all distributions; a malformed file of one distribution hides those after it.

    ``importlib.metadata.entry_points`` parses the files of all distributions, and a training image has hundreds. Those
    that do not contain the name of the group are only read.
    """
    found: dict[str, list[importlib.metadata.EntryPoint]] = {}
    try:
        for distribution in importlib.metadata.distributions():
            if group in (distribution.read_text("entry_points.txt") or ""):
                # Of several distributions with one name, Python uses the first.
                first = importlib.metadata.distribution(distribution.metadata["Name"])
                found[first.metadata["Name"]] = [entry for entry in first.entry_points if entry.group == group]
    except Exception as error:
        broken.append(BrokenPlugin("plugins", "entry points", sentence_of(error)))
    return chain.from_iterable(found.values())


def _add_plugin(checks: dict[str, Check], entry: importlib.metadata.EntryPoint) -> list[BrokenPlugin]:
    origin = origin_of(entry)
    try:
        loaded = entry.load()
        # Each check once: packages re-export what their modules define.
        below = {id(check): check for part in modules_of(loaded) for check in checks_in(part)}
        found = [loaded] if isinstance(loaded, Check) else list(below.values())
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return [BrokenPlugin(entry.name, origin, sentence_of(error))]
    ids = [check.id for check in found]
    taken = sorted({name for name in ids if name in checks or ids.count(name) > 1})
    if taken or not found:
        reason = f"{', '.join(taken)} is taken" if taken else "it holds no check"
        return [BrokenPlugin(entry.name, origin, reason)]
    checks.update({check.id: msgspec.structs.replace(check, origin=origin) for check in found})
    return []


def origin_of(entry: importlib.metadata.EntryPoint) -> str:
    """The name of the distribution, or of the module if its metadata are incomplete."""
    try:
        return str(entry.dist.name) if entry.dist is not None else entry.module
    except Exception:
        return entry.value


def modules_of(module: object) -> Iterator[ModuleType]:
    """A module and all its submodules."""
    if isinstance(module, ModuleType):
        yield module
        if hasattr(module, "__path__"):
            yield from walk_modules(module)


def _add_file(checks: dict[str, Check], path: Path) -> None:
    module = import_file(path)
    found = checks_in(module)
    if not found and not holds_rules(module):
        raise UnusableError(f"plugin {path} defines no check")
    for check in found:
        if check.id in checks:
            raise UnusableError(
                f"plugin {path} defines {check.id}, which is already defined by {checks[check.id].origin}"
            )
        checks[check.id] = msgspec.structs.replace(check, origin=os.fsencode(path).decode("utf-8", "replace"))


def holds_rules(module: ModuleType) -> bool:
    """Whether a plugin contains rules for ``doctor lint``; their type is not loaded otherwise."""
    kinds = (type(value) for value in vars(module).values())
    return any((kind.__module__, kind.__name__) == ("doctor.lint.engine.rule", "Rule") for kind in kinds)


def import_file(path: Path) -> ModuleType:
    """Import a plugin file as a module.

    Raises:
        UnusableError: it is not a Python file, or fails to load.
    """
    spec = importlib.util.spec_from_file_location(f"doctor_plugin_{path.stem}", path)
    if not os.path.exists(path):  # noqa: PTH110
        raise UnusableError(f"cannot load plugin {path}: no such file")
    if spec is None or spec.loader is None or not os.path.isfile(path):  # noqa: PTH113
        raise UnusableError(f"cannot load plugin {path}: not a readable Python file")
    module = importlib.util.module_from_spec(spec)
    # Registered before it runs: dataclasses and typing look their module up by name.
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise UnusableError(f"cannot load plugin {path}: {sentence_of(error)}") from error
    return module


def matches(check_id: str, family: str, pattern: str) -> bool:
    """Whether ``pattern`` matches the check: an id, the name or prefix of a family, or ``ALL``; case-insensitive."""
    pattern = pattern.upper()
    return pattern in (check_id, family.upper(), check_id.rstrip("0123456789"), "ALL")


class IndexedCheck(msgspec.Struct, frozen=True, omit_defaults=True):
    """The metadata of a check. ``needs`` and ``or_needs``: keys of sections. ``log_judges``: number of functions over
    log events."""

    module: str
    id: str
    name: str
    severity: Severity
    scope: Scope
    when: str
    compares_ranks: bool
    question: str
    effect: str
    fix: str
    needs: tuple[str, ...] = ()
    or_needs: tuple[str, ...] = ()
    limits: dict[str, int | float] = {}
    uses_baseline: bool = False
    needs_peers: bool = False
    last_resort: bool = False
    state: State = "stable"
    impacts: dict[str, str] = {}
    log_judges: int = 0

    def check(self) -> Check:
        """The check, whose module is imported when it is evaluated."""
        same = {name: getattr(self, name) for name in _SAME}
        return Check(
            **same,
            needs=tuple(SECTIONS[key] for key in self.needs),
            or_needs=tuple(SECTIONS[key] for key in self.or_needs),
            judge=partial(_judge, self.module, self.id),
            cases=partial(_cases, self.module, self.id),
            from_logs=tuple(partial(_judge_logs, self.module, self.id, number) for number in range(self.log_judges)),
        )


_SAME = tuple(
    name for name in IndexedCheck.__struct_fields__ if name not in ("module", "needs", "or_needs", "log_judges")
)
"""Fields that the check has as well."""


@cache
def _loaded(module: str, check_id: str) -> Check:
    """The check itself.

    Raises:
        ImportError: the module does not have it, because the index is that of another release.
    """
    for value in vars(importlib.import_module(module)).values():
        if isinstance(value, Check) and value.id == check_id:
            return value
    raise ImportError(f"{module} does not define {check_id}")


def _judge(module: str, check_id: str, job: Job, **limits: float) -> Iterable[Verdict]:
    return _loaded(module, check_id).judge(job, **limits)


def _judge_logs(module: str, check_id: str, number: int, job: Job) -> Iterable[Verdict]:
    return _loaded(module, check_id).from_logs[number](job)


def _cases(module: str, check_id: str) -> Iterable[Case]:
    return _loaded(module, check_id).cases()


def index_text(checks: Iterable[Check]) -> bytes:
    """The text of the index of these checks."""
    return msgspec.json.format(msgspec.json.encode([_described(check) for check in checks]), indent=1) + b"\n"


def _described(check: Check) -> IndexedCheck:
    return IndexedCheck(
        **{name: getattr(check, name) for name in _SAME},
        module=check.judge.__module__,
        needs=tuple(section.key for section in check.needs),
        or_needs=tuple(section.key for section in check.or_needs),
        log_judges=len(check.from_logs),
    )


def indexed_checks(broken: list[BrokenPlugin]) -> Iterable[Check]:
    """The checks of this distribution by their index, or by their modules if it cannot be read."""
    try:
        found = msgspec.json.decode(index_path().read_bytes(), type=prepared(list[IndexedCheck]))
        return [one.check() for one in found]
    except (OSError, msgspec.MsgspecError, KeyError, ValueError):
        return builtin_checks(broken)


def load_ahead(checks: Iterable[Check], most: int) -> None:
    """Import up to ``most`` modules of indexed checks that are not imported yet. One that fails is an error of its
    check once that is called."""
    judges = (check.judge for check in checks)
    names = (judge.args[0] for judge in judges if isinstance(judge, partial) and judge.func is _judge)
    for name in [name for name in names if name not in sys.modules][:most]:
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def index_path() -> Path:
    """The index of the built-in checks, beside them."""
    return Path(builtin_package().__path__[0], INDEX)
