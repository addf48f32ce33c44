"""The structure of the tree: rooms, import cycles, names and sizes.

    python benchmarks/structure.py

A room is a folder of ``doctor/``, and ``ROOMS`` names the rooms that each may import. Prints what breaks the rules:
imports against that order, import cycles between modules, class names used twice, folders with too many modules; and
the number of modules flat in ``doctor/``, of names in ``doctor.api`` and of lines.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
MOST_MODULES_IN_A_FOLDER = 20
ANY = frozenset({"*"})

# The rooms that a room may import, itself aside. ``version`` is data that every room may read.
ROOMS: dict[str, frozenset[str]] = {
    "version": frozenset(),
    "knowledge": frozenset(),
    "core": frozenset({"knowledge"}),
    "analysis": frozenset({"core", "knowledge"}),
    "collectors": frozenset({"core", "knowledge"}),
    "probes": frozenset({"core", "knowledge", "analysis", "collectors"}),
    "postmortem": frozenset({"core", "knowledge", "analysis"}),
    "testing": frozenset({"core", "analysis", "postmortem"}),
    "api": frozenset({"core", "knowledge", "analysis", "postmortem", "testing"}),
    "cluster": frozenset({"core", "analysis", "collectors", "probes"}),
    "session": frozenset({"core", "analysis", "collectors", "probes", "cluster"}),
    "lint": frozenset({"core", "knowledge"}),
    "estimate": frozenset({"core", "knowledge", "probes", "session"}),
    "report": frozenset({"core", "lint.engine.rule", "lint.engine.registry", "estimate.data_model"}),
    "monitor": frozenset({"core", "analysis", "collectors", "postmortem", "cluster", "session", "report"}),
    "cli": ANY,
    "__init__": ANY,
    "__main__": ANY,
}


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
    """The room of a module of ``doctor``: the first part of its path below the package."""
    return module.split(".")[1] if "." in module else "__init__"


def allowed(found: Import, room: Callable[[str], str]) -> bool:
    """Whether the order of rooms has this import; checks are another package with contracts of its own."""
    source, target = room(found.source), room(found.target)
    if source == target or target == "version":
        return True
    inside = found.target.split(".", 1)[1] if "." in found.target else target
    named = ROOMS.get(source, frozenset())
    return named == ANY or any(inside == entry or target == entry or inside.startswith(f"{entry}.") for entry in named)


def cycles(arrows: dict[str, set[str]]) -> list[list[str]]:
    """The strongly connected groups of more than one module (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for target in sorted(arrows.get(name, ())):
            if target not in index:
                visit(target)
                low[name] = min(low[name], low[target])
            elif target in stack:
                low[name] = min(low[name], index[target])
        if low[name] == index[name]:
            at = stack.index(name)
            if len(stack) - at > 1:
                groups.append(sorted(stack[at:]))
            del stack[at:]

    for name in sorted(arrows):
        if name not in index:
            visit(name)
    return groups


def repeated_classes(found: dict[str, Module]) -> dict[str, list[str]]:
    """The names of top-level classes that two modules or more define."""
    owners = defaultdict(list)
    for module in found.values():
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef):
                owners[node.name].append(module.name)
    return {name: where for name, where in sorted(owners.items()) if len(where) > 1}


def large_folders(found: dict[str, Module]) -> dict[str, int]:
    """The folders with more modules than ``MOST_MODULES_IN_A_FOLDER``, ``__init__.py`` aside."""
    paths = (module.path for module in found.values() if module.path.name != "__init__.py")
    count = Counter(str(path.parent.relative_to(ROOT)) for path in paths)
    return {folder: modules for folder, modules in sorted(count.items()) if modules > MOST_MODULES_IN_A_FOLDER}


def main(room: Callable[[str], str] = room_of) -> int:
    """Print the measures; the number of broken rules is the exit status."""
    sys.setrecursionlimit(5000)
    doctor = modules(ROOT / "doctor")
    both = doctor | modules(ROOT / "checks" / "doctor_checks")
    found = list(chain.from_iterable(imports(module, doctor) for module in doctor.values()))
    against = [each for each in found if not allowed(each, room)]
    arrows = defaultdict(set)
    for each in found:
        if not each.typing_only:
            arrows[each.source].add(each.target)
    rings, repeated, large = cycles(arrows), repeated_classes(both), large_folders(both)

    print(f"imports against the order of rooms: {len(against)}")
    for each in against:
        kind = "  (typing only)" if each.typing_only else ""
        print(f"  {room(each.source)} -> {room(each.target)}  {each.source}:{each.line} -> {each.target}{kind}")
    print(f"import cycles: {len(rings)}")
    for ring in rings:
        print(f"  {' '.join(ring)}")
    print(f"class names used twice: {len(repeated)}")
    for name, where in repeated.items():
        print(f"  {name}  {' '.join(where)}")
    print(f"folders with more than {MOST_MODULES_IN_A_FOLDER} modules: {len(large)}")
    for folder, size in large.items():
        print(f"  {folder}  {size}")
    print(f"modules flat in doctor/: {len(list((ROOT / 'doctor').glob('*.py')))}")
    print(f"names in doctor.api: {len(importlib.import_module('doctor.api').__all__)}")
    print(f"lines of doctor and checks: {sum(len(module.path.read_bytes().splitlines()) for module in both.values())}")
    return min(len(against) + len(rings) + len(repeated) + len(large), 100)


if __name__ == "__main__":
    sys.exit(main())
