"""The structure of the tree: rooms, import cycles, names and sizes.

    python benchmarks/structure.py

``ROOMS`` says what each room may import; ``tests/test_architecture.py`` holds the tree to it. Prints what breaks the
rules (imports against that table, an import cycle between modules, class names used twice, folders with too many
modules), and the numbers of modules flat in ``doctor/``, of names in ``doctor.api`` and of lines.
"""

from __future__ import annotations

import ast
import importlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from itertools import chain
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
CHECKS = "doctor_checks"
RULES = "doctor_checks.rules"
MOST_MODULES_IN_A_FOLDER = 20

EXAMINE = "core core.check core.check_registry core.check_runner"
CHECK = (
    "api facts testing core.text analysis.interface_choice analysis.logs analysis.missing_sections analysis.stats"
    " analysis.visible_devices"
)
ROOMS: dict[str, str] = {
    "doctor": "core core.check monitor monitor.autostart monitor.sinks session version",
    "doctor.__main__": "cli core monitor.autostart report version",
    "doctor.version": "",
    "doctor.knowledge": "core.decoding core.text",
    "doctor.core": "core.check core.check_registry knowledge version",
    "doctor.core.check": "core",
    "doctor.core.check_registry": "core core.check version",
    "doctor.core.check_runner": "core core.check core.check_registry",
    "doctor.analysis": "core knowledge",
    "doctor.collectors": "core knowledge",
    "doctor.probes": "core knowledge analysis collectors",
    "doctor.postmortem": "core knowledge analysis",
    "doctor.testing": "core analysis postmortem lint.engine.rule",
    "doctor.api": "core core.check analysis knowledge.releases lint",
    "doctor.facts": "core.facts",
    "doctor.cluster": "core knowledge cluster.membership cluster.transport analysis collectors probes version",
    "doctor.cluster.membership": "core cluster.transport",
    "doctor.cluster.transport": "core",
    "doctor.session": f"{EXAMINE} analysis collectors probes cluster cluster.transport",
    "doctor.lint": f"{EXAMINE} knowledge",
    "doctor.attach": "core knowledge analysis collectors monitor.telemetry.stacks.stack_files "
    "monitor.watchdog.local_peers.stack_dump monitor.watchdog.local_peers.stack_request "
    "postmortem.flight_recorder.loader_processes postmortem.ras",
    "doctor.estimate": "core core.check_registry knowledge probes.runtime session version",
    "doctor.report": "core core.check core.check_registry knowledge.log_patterns lint.engine.registry lint.engine.rule "
    "estimate.data_model version",
    "doctor.monitor": f"{EXAMINE} knowledge analysis collectors cluster cluster.transport session version "
    "monitor.sinks monitor.telemetry monitor.watchdog",
    "doctor.monitor.autostart": "core report collectors.host.launched_ranks monitor monitor.integrations "
    "monitor.telemetry monitor.watchdog.store_discovery",
    "doctor.monitor.telemetry": "core collectors",
    "doctor.monitor.watchdog": "core collectors analysis.launch_origin cluster.membership "
    "cluster.rendezvous.process_identity cluster.transport monitor.telemetry monitor.watch_options",
    "doctor.monitor.sinks": "core report",
    "doctor.cli": f"{EXAMINE} knowledge.sites attach cluster postmortem lint estimate probes session report version "
    "monitor.autostart monitor.watch_options",
    "doctor_checks": "",
    "doctor_checks._trial_conclusions": "api facts analysis.trial_selection",
    "doctor_checks.code": "api testing knowledge lint.engine.rule lint.fix.trainer_arguments lint.launch lint.python",
    "doctor_checks.data": f"{CHECK} analysis.call_sites analysis.hang",
    "doctor_checks.devices": f"{CHECK} analysis.device_speed analysis.fabric knowledge",
    "doctor_checks.host": f"{CHECK} knowledge analysis.storage_speed",
    "doctor_checks.launch": f"{CHECK} knowledge.launcher_index analysis.launch_origin",
    "doctor_checks.memory": f"{CHECK} knowledge analysis.call_sites analysis.effective_settings",
    "doctor_checks.nccl": f"{CHECK} knowledge analysis.effective_settings",
    "doctor_checks.network": f"{CHECK} knowledge analysis.fabric lint.launch",
    "doctor_checks.progress": f"{CHECK} analysis.call_sites analysis.gpu_activity analysis.hang",
    "doctor_checks.rules": "api testing knowledge analysis lint.launch lint.python",
    "doctor_checks.software": f"{CHECK} knowledge",
}
"""Each room, a package or a module, and what of ``doctor`` it may import beside itself: rooms, or modules of them by
name. A part of a room that has a line of its own is a room of its own. A family of checks may import
modules whose names begin with ``_``: its own, and those that all families share; a rule, the module of its check."""


class Import(NamedTuple):
    """One import of a module of ours by another."""

    source: str
    line: int
    target: str
    typing_only: bool


class Module(NamedTuple):
    """A parsed file and its dotted name; a package is the module of its ``__init__.py``."""

    name: str
    path: Path
    tree: ast.Module


def modules(*folders: Path) -> dict[str, Module]:
    """All modules below the packages ``folders``, by dotted name."""
    found = {}
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder.parent).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = Module(name, path, ast.parse(path.read_text(encoding="utf-8"), str(path)))
    return found


def imports(module: Module, known: dict[str, Module]) -> Iterator[Import]:
    """The imports in a module, those in functions included; ``from package import module`` is one of the module."""
    typing_only = {
        id(node)
        for block in ast.walk(module.tree)
        if isinstance(block, ast.If) and ast.unparse(block.test).endswith("TYPE_CHECKING")
        for statement in block.body
        for node in ast.walk(statement)
    }
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.name.split(".")[: None if module.path.name == "__init__.py" else -1]
                base = ".".join(filter(None, [*package[: len(package) - node.level + 1], base]))
            targets = [f"{base}.{alias.name}" if f"{base}.{alias.name}" in known else base for alias in node.names]
        else:
            continue
        for target in dict.fromkeys(targets):
            if target in known and target != module.name:
                yield Import(module.name, node.lineno, target, id(node) in typing_only)


def room_of(module: str) -> str:
    """The line of ``ROOMS`` for a module: its own, or that of the nearest package above but ``doctor``.

    Raises:
        KeyError: it has none.
    """
    room = module
    while room not in ROOMS:
        room, _, _ = room.rpartition(".")
        if "." not in room:
            raise KeyError(module)
    return room


def is_below(module: str, package: str) -> bool:
    """Whether a module is the package or in it."""
    return f"{module}.".startswith(f"{package}.")


def is_allowed(found: Import) -> bool:
    """Whether ``ROOMS`` has this import."""
    source, target = room_of(found.source), room_of(found.target)
    if is_below(source, CHECKS) and is_below(target, CHECKS):
        package, _, name = found.target.rpartition(".")
        of_its_check = source == RULES and name == found.source.rpartition(".")[2]
        return of_its_check or (name.startswith("_") and (source == target or package == CHECKS))
    if source == target:
        return True
    named = (f"doctor.{name}" for name in ROOMS[source].split())
    return any(is_below(found.target, name) and room_of(name) == target for name in named)


class Structure:
    """What the rules are about, of the tree as it is on disk."""

    def __init__(self) -> None:
        self.doctor = modules(ROOT / "doctor")
        self.checks = modules(ROOT / "checks" / CHECKS)
        self.all = self.doctor | self.checks
        self.imports = list(chain.from_iterable(imports(module, self.all) for module in self.all.values()))

    @property
    def against(self) -> list[str]:
        """The imports that ``ROOMS`` does not have."""
        return [
            f"{each.source}:{each.line} imports {each.target}" + " (typing only)" * each.typing_only
            for each in self.imports
            if not is_allowed(each)
        ]

    @property
    def cycle(self) -> list[str]:
        """The first import cycle that is found, of modules that import each other when they are loaded or called."""
        arrows = defaultdict(set)
        for each in self.imports:
            if not each.typing_only:
                arrows[each.source].add(each.target)
        try:
            TopologicalSorter(arrows).prepare()
        except CycleError as error:
            return [str(name) for name in error.args[1]]
        return []

    @property
    def repeated_classes(self) -> list[str]:
        """Names of classes, nested ones too, that are defined more than once, with the modules."""
        owners = defaultdict(list)
        for module in self.all.values():
            for node in ast.walk(module.tree):
                if isinstance(node, ast.ClassDef):
                    owners[node.name].append(module.name)
        return [f"{name}  {' '.join(where)}" for name, where in sorted(owners.items()) if len(where) > 1]

    @property
    def large_folders(self) -> list[str]:
        """Folders with more modules than ``MOST_MODULES_IN_A_FOLDER``, ``__init__.py`` aside, with their number."""
        paths = (module.path for module in self.all.values() if module.path.name != "__init__.py")
        count = Counter(str(path.parent.relative_to(ROOT)) for path in paths)
        return [f"{folder}  {size}" for folder, size in sorted(count.items()) if size > MOST_MODULES_IN_A_FOLDER]

    @property
    def flat(self) -> list[str]:
        """The modules that lie in ``doctor/`` itself."""
        return sorted(path.name for path in (ROOT / "doctor").glob("*.py"))


def show(title: str, found: Iterable[str]) -> None:
    """Print how many were found, and each on a line."""
    lines = list(found)
    print(f"{title}: {len(lines)}")
    for line in lines:
        print(f"  {line}")


def main() -> None:
    """Print the measures."""
    tree = Structure()
    show("imports against the table of rooms", tree.against)
    show("modules of an import cycle", tree.cycle)
    show("class names used twice", tree.repeated_classes)
    for package in ("doctor", "checks"):
        beyond = [folder for folder in tree.large_folders if folder.startswith(package)]
        show(f"folders of {package}/ with more than {MOST_MODULES_IN_A_FOLDER} modules", beyond)
    print(f"modules flat in doctor/: {len(tree.flat)}")
    names = [name for name in dir(importlib.import_module("doctor.api")) if not name.startswith("_")]
    print(f"names in doctor.api: {len(names)}")
    lines = sum(len(module.path.read_bytes().splitlines()) for module in tree.all.values())
    print(f"lines of doctor and checks: {lines}")


if __name__ == "__main__":
    main()
