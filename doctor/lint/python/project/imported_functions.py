"""Finds functions that a script imports from its project, and the collectives that they run."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import NamedTuple

from doctor.lint.engine.rule import FlowStep
from doctor.lint.python.script import FunctionNode, ProjectModules, Script, per_script

MOST_IMPORTS = 4
"""Imports in a row that a name or a call is followed through."""
MOST_FUNCTIONS = 60
"""Functions that are looked at for one call."""


class FunctionSummary(NamedTuple):
    """A function or method. ``word``: the collective that it runs whenever it is called, ``steps``: the calls down to
    it; ``reached``: all collectives that it may run; ``gathering``: its parameters that must be used by all ranks if
    they are wrapped models, with the method; ``calls``: functions that it calls on all ranks whenever it is called;
    ``tests_rank``: it returns whether this is a certain rank; ``starts_nccl``: it joins a job over NCCL."""

    name: str
    line: int
    parameters: tuple[str, ...]
    word: str
    certain: bool
    steps: tuple[FlowStep, ...]
    reached: frozenset[str]
    gathering: Mapping[str, str]
    calls: tuple[tuple[str, FlowStep], ...]
    tests_rank: bool
    starts_nccl: bool


class ModuleSummary(NamedTuple):
    """A module: its ``location`` (the absolute path), its ``functions`` by name (``Class().method``), what it
    ``imports``, the modules that it imports all names of (``stars``), whether it ties processes to their GPUs, whether
    it reads the rank of the process, its namespaces ``of_one_rank`` (``world_size=1``), and its classes of datasets
    whose items are random numbers."""

    location: str
    functions: Mapping[str, FunctionSummary]
    imports: Mapping[str, str]
    stars: tuple[str, ...]
    binds_device: bool
    reads_rank: bool
    of_one_rank: frozenset[str]
    random_datasets: frozenset[str]


class ImportedFunction(NamedTuple):
    """A function and its module."""

    function: FunctionSummary
    module: ModuleSummary


class ReachedCollective(NamedTuple):
    """A collective that a function runs whenever it is called, and the calls down to it."""

    word: str
    certain: bool
    steps: tuple[FlowStep, ...]


@per_script
def imports_project(script: Script) -> bool:
    """Whether a script imports a module of its project."""
    modules = script.modules
    names = [one.name for node in script.all(ast.Import) for one in node.names]
    for node in script.all(ast.ImportFrom):
        package = "." * node.level + (node.module or "")
        names += [package] if node.module else []
        names += [f"{package}{'.' if node.module else ''}{one.name}" for one in node.names]
    return modules is not None and any(modules.has(script.location, name) for name in names)


def imported_function(script: Script, node: ast.expr, *, whole: bool = False) -> ImportedFunction | None:
    """The function of another module of the project that an expression names; of modules without a word of collectives
    only if ``whole``."""
    if script.modules is None or not imports_project(script) or script.definition(node) is not None:
        return None
    name = script.name(node)
    return _resolved(script.modules, script.location, name, whole=whole) if name else None


def called_function(script: Script, call: ast.Call) -> tuple[Script, FunctionNode] | None:
    """The function of a module that a call runs, and the script that defines it."""
    own = script.definition(call.func)
    if own is not None:
        return (script, own) if isinstance(script.parent(own), ast.Module) else None
    imported = imported_function(script, call.func, whole=True)
    if imported is None or script.modules is None:
        return None
    name, line, location = imported.function.name, imported.function.line, imported.module.location
    for shown, text in script.modules.mentioning(f"def {name}("):
        try:
            other = Script(shown, text, modules=script.modules, location=location)
        except (SyntaxError, ValueError, RecursionError):
            continue
        for one in other.tree.body:
            if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef)) and (one.name, one.lineno) == (name, line):
                return other, one
    return None


def may_be_imported(script: Script, name: str) -> bool:
    """Whether another file of the project may import a function of this one."""
    if script.modules is None:
        return False
    stem = PurePath(script.path).stem
    module = re.escape(stem)
    of_package = re.compile(rf"^[ \t]*from\s+([.\w]+)\s+import\b[^#\n]*\b{module}\b", re.MULTILINE)
    of_module = re.compile(rf"^[ \t]*(?:from|import)\s+([.\w]*\b{module})\b", re.MULTILINE)

    def imports(text: str) -> Iterator[str]:
        yield from (f"{found[1]}.{stem}" for found in of_package.finditer(text))
        yield from (found[1] for found in of_module.finditer(text))

    return any(
        shown != script.path
        and re.search(rf"\b{re.escape(name)}\b", text)
        and any(_may_be_of_script(script, dotted) for dotted in imports(text))
        for shown, text in script.modules.mentioning(stem)
    )


def _may_be_of_script(script: Script, dotted: str) -> bool:
    """Whether an import may be of this file: the folders in its name are those above the file."""
    place = PurePath(script.location or script.path).with_suffix("")
    named = [one for one in dotted.split(".") if one]
    return all(map(str.__eq__, reversed(named), reversed(place.parts)))


def may_be_of_project(modules: ProjectModules, importer: str, name: str) -> bool:
    """Whether a dotted name begins with a module of the project, or is defined in the importing file."""
    dots = len(name) - len(name.lstrip("."))
    parts = name[dots:].split(".")
    return dots > 0 or any(modules.has(importer, ".".join(parts[:count])) for count in range(len(parts) - 1, 0, -1))


def _resolved(modules: ProjectModules, importer: str, name: str, *, whole: bool) -> ImportedFunction | None:
    key = ("function", str(whole), importer.rpartition("/")[0] if not name.startswith(".") else importer, name)
    if key not in modules.memo:
        modules.memo[key] = _found(modules, importer, name, whole=whole)
    found: ImportedFunction | None = modules.memo[key]
    return found


def _found(
    modules: ProjectModules, importer: str, name: str, *, whole: bool, depth: int = MOST_IMPORTS
) -> ImportedFunction | None:
    dots = len(name) - len(name.lstrip("."))
    parts = name[dots:].split(".")
    for count in range(len(parts) - 1, 0, -1):
        module = "." * dots + ".".join(parts[:count])
        if "(" in module or not modules.has(importer, module):
            continue
        summary: ModuleSummary | None = modules.find(importer, module, whole=whole)
        if summary is None:
            return None
        inner = ".".join(parts[count:])
        if inner in summary.functions:
            return ImportedFunction(summary.functions[inner], summary)
        if f"{inner}().__init__" in summary.functions:
            return ImportedFunction(summary.functions[f"{inner}().__init__"], summary)
        head, separator, rest = inner.replace("()", "\0").partition(".")
        imported = summary.imports.get(head.rstrip("\0"))
        if depth == 0:
            return None
        if imported is None:
            names = (f"{one}{'' if one.endswith('.') else '.'}{inner}" for one in summary.stars)
            found = (_found(modules, summary.location, one, whole=whole, depth=depth - 1) for one in names)
            return next(filter(None, found), None)
        ending = "()" if head.endswith("\0") else ""
        name = f"{imported}{ending}{separator}{rest}".replace("\0", "()")
        return _found(modules, summary.location, name, whole=whole, depth=depth - 1)
    return None


def collective_of(modules: ProjectModules, one: ImportedFunction) -> ReachedCollective | None:
    """The collective that an imported function runs whenever it is called, also through other modules."""
    key = ("collective", one.module.location, one.function.name, str(one.function.line))
    if key not in modules.memo:
        modules.memo[key] = _searched(modules, one)
    found: ReachedCollective | None = modules.memo[key]
    return found


def _searched(modules: ProjectModules, first: ImportedFunction) -> ReachedCollective | None:
    """Breadth first, so that the shortest chain of calls is shown."""
    waiting: list[tuple[ImportedFunction, tuple[FlowStep, ...]]] = [(first, ())]
    seen = {(first.module.location, first.function.line)}
    for _ in range(MOST_FUNCTIONS):
        if not waiting:
            return None
        (function, module), steps = waiting.pop(0)
        if function.word:
            return ReachedCollective(function.word, function.certain, (*steps, *function.steps))
        for name, step in function.calls if len(steps) < MOST_IMPORTS else ():
            called = _called(modules, module, name)
            if called is not None and (called.module.location, called.function.line) not in seen:
                seen.add((called.module.location, called.function.line))
                waiting.append((called, (*steps, step)))
    return None


def _called(modules: ProjectModules, module: ModuleSummary, name: str) -> ImportedFunction | None:
    own = module.functions.get(name[1:]) if name.startswith(".") else None
    return ImportedFunction(own, module) if own is not None else _resolved(modules, module.location, name, whole=False)
