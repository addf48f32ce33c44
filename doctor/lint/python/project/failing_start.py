"""Programs that stop on their way: they always use an attribute that a module of their project does not have, or their
configuration of Hydra is not in it."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from doctor.lint.engine.imported_names import names_in
from doctor.lint.python.project.settings.hydra_entries import main_configuration
from doctor.lint.python.script import ProjectModules, Script, per_script

_DEPTH = 3
"""Functions in functions on the way."""
_EXECUTED = (ast.Expr, ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return)
_NOT_ALWAYS = (ast.BoolOp, ast.IfExp, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_UNKNOWN = re.compile(r"(?<![.\w])(?:exec|eval|vars|globals|locals|__import__)\(|sys\.modules|import_module")
"""Ways to use or change names that the text does not show."""


class Stop(NamedTuple):
    """Where every run of a program ends: ``missing``, the attribute; ``lines``, by each function on the way (``None``:
    the module), the last line in it that runs; ``before``, the code that may run earlier."""

    missing: str
    lines: dict[ast.AST | None, int]
    before: tuple[ast.AST, ...]


def stopped_before(script: Script, line: int) -> str:
    """The attribute whose lack ends every run of a program before it comes to a line; empty if there is none."""
    stop = _stop_of(script)
    if stop is None:
        return ""
    statement = next((one for one in script.tree.body if one.lineno <= line <= (one.end_lineno or 0)), None)
    if statement is None:
        return ""
    if isinstance(statement, _DEFINITIONS) and statement not in stop.lines:
        return "" if statement in _live(script, stop) else stop.missing
    last = stop.lines.get(statement, stop.lines[None])
    return stop.missing if line > last else ""


@per_script
def _stop_of(script: Script) -> Stop | None:
    modules = script.modules
    if modules is None or not script.location or _UNKNOWN.search(script.text) is not None:
        return None
    by_star = names_by_star(script)
    if by_star is None:
        return None
    aliases = {name: module for name, module in _modules_by_name(script, modules).items() if name not in by_star}
    used = (one for one in ast.walk(script.tree) if isinstance(one, ast.Attribute) and isinstance(one.value, ast.Name))
    if not any(_is_missing(script, aliases, one) for one in used):
        return None
    return _way(script, aliases, script.tree.body, None, ())


@per_script
def lacks_configuration(script: Script) -> str:
    """The configuration that Hydra loads before it calls any function of a program, if its folder is in the project and
    the file is not."""
    path = main_configuration(script)
    has_others = path is not None and path.parent.is_dir() and any(path.parent.glob("*.yaml"))
    return path.name if path is not None and has_others and not path.exists() else ""


def _way(
    script: Script, aliases: dict[str, str], body: list[ast.stmt], owner: ast.AST | None, holders: tuple[ast.AST, ...]
) -> Stop | None:
    """The first stop in the statements of a module or function that is always called."""
    before: list[ast.AST] = []
    for statement in body:
        if isinstance(statement, _DEFINITIONS) and owner is None:
            continue
        for executed in _always(statement):
            for one in script.inside(executed, ast.Attribute):
                if _is_missing(script, aliases, one) and not _is_conditional(script, one, statement):
                    return Stop(ast.unparse(one), {owner: one.end_lineno or one.lineno}, (*before, executed))
        if (inner := _below(script, aliases, statement, owner, holders)) is not None:
            return inner._replace(before=(*before, *inner.before))
        before.append(statement)
    return None


def _below(
    script: Script, aliases: dict[str, str], statement: ast.stmt, owner: ast.AST | None, holders: tuple[ast.AST, ...]
) -> Stop | None:
    """The first stop in the branch of a program, or in the function that a statement calls."""
    if isinstance(statement, ast.If) and ast.unparse(statement.test) == "__name__ == '__main__'":
        return _way(script, aliases, statement.body, owner, holders)
    called = _called(script, statement)
    if called is None or called in holders or len(holders) >= _DEPTH:
        return None
    stop = _way(script, aliases, called.body, called, (*holders, called))
    if stop is None or any(any(script.inside(one, ast.Return)) for one in stop.before):
        return None
    lines = {**stop.lines, owner: statement.end_lineno or statement.lineno}
    return stop._replace(lines=lines, before=(statement, *stop.before))


def _always(statement: ast.stmt) -> Iterator[ast.AST]:
    """The parts of a statement that run whenever it is reached."""
    if isinstance(statement, _EXECUTED):
        yield statement
    elif isinstance(statement, (ast.If, ast.While)):
        yield statement.test
    elif isinstance(statement, ast.For):
        yield statement.iter


def _is_conditional(script: Script, node: ast.AST, statement: ast.stmt) -> bool:
    for one in script.around(node):
        if one is statement:
            return False
        if isinstance(one, _NOT_ALWAYS):
            return True
    return True


def _called(script: Script, statement: ast.stmt) -> ast.FunctionDef | None:
    """The function of the file that a statement calls first."""
    value = getattr(statement, "value", None) if isinstance(statement, _EXECUTED) else None
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Name):
        return None
    same = [one for one in script.tree.body if isinstance(one, ast.FunctionDef) and one.name == value.func.id]
    if len(same) != 1 or same[0].decorator_list or _bindings(script)[value.func.id] != 1:
        return None
    yields = any(isinstance(one, (ast.Yield, ast.YieldFrom)) for one in ast.walk(same[0]))
    return None if yields else same[0]


def _is_missing(script: Script, aliases: dict[str, str], node: ast.Attribute) -> bool:
    name = node.value.id if isinstance(node.value, ast.Name) else ""
    if name not in aliases or not isinstance(node.ctx, ast.Load) or script.modules is None:
        return False
    key = ("lacks", script.location, aliases[name], node.attr)
    memo = script.modules.memo
    if key not in memo:
        memo[key] = script.modules.lacks(script.location, aliases[name], node.attr)
    return bool(memo[key])


def _modules_by_name(script: Script, modules: ProjectModules) -> dict[str, str]:
    """The modules of the project by the only names that the file has for them, bound at its top level."""
    found: dict[str, str] = {}
    for one in script.tree.body:
        if isinstance(one, ast.Import):
            found |= {name.asname or name.name: name.name for name in one.names if name.asname or "." not in name.name}
        elif isinstance(one, ast.ImportFrom) and one.module and not one.level:
            found |= {name.asname or name.name: f"{one.module}.{name.name}" for name in one.names}
    return {
        name: module
        for name, module in found.items()
        if _bindings(script)[name] == 1 and modules.has(script.location, module)
    }


@per_script
def names_by_star(script: Script) -> frozenset[str] | None:
    """The names that ``from module import *`` may give a file; ``None`` if they are unknown."""
    names: set[str] = set()
    for one in script.all(ast.ImportFrom):
        if one.names[0].name == "*":
            given = _names_of(script, script.path, "." * one.level + (one.module or ""), _STARS)
            if given is None:
                return None
            names |= given
    return frozenset(names)


_STAR = re.compile(r"^[ \t]*from[ \t]+(?P<module>[.\w]+)[ \t]+import[ \t]+\*", re.MULTILINE)
_STARS = 4
"""Modules in a row that give all names of another one."""


def _names_of(script: Script, importer: str, module: str, depth: int) -> frozenset[str] | None:
    """The names in the modules of the project that an import may mean; ``None`` if they are unknown."""
    modules = script.modules
    found = modules.named(importer, module) if modules is not None else ()
    if modules is None or not found or not depth:
        return None
    names: set[str] = set()
    for shown in found:
        text = modules.text_at(shown)
        given = [_names_of(script, shown, one["module"], depth - 1) for one in _STAR.finditer(text)]
        given.append(names_in(_STAR.sub("pass", text)))
        for one in given:
            if one is None:
                return None
            names |= one
    return frozenset(names)


@per_script
def _bindings(script: Script) -> Counter[str]:
    """How often a file binds each name."""
    counted: Counter[str] = Counter()
    for node in ast.walk(script.tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            counted[node.id] += 1
        elif isinstance(node, ast.alias):
            counted[node.asname or node.name.partition(".")[0]] += 1
        elif isinstance(node, ast.arg):
            counted[node.arg] += 1
        elif isinstance(node, (ast.Global, ast.Nonlocal)):
            counted.update(node.names)
        elif isinstance(name := getattr(node, "name", None), str):
            counted[name] += 1
    return counted


def _live(script: Script, stop: Stop) -> set[ast.AST]:
    """The functions and classes of the module that may be used before a stop, by their names."""
    definitions = [one for one in script.tree.body if isinstance(one, _DEFINITIONS)]
    by_name = {one.name: one for one in definitions}
    used = [one for one in definitions if one.decorator_list or by_name[one.name] is not one]
    live: set[ast.AST] = set(used)
    waiting: list[ast.AST] = [*stop.before, *used]
    waiting += [one if isinstance(one, ast.ClassDef) else one.args for one in definitions]  # run where they are defined
    while waiting:
        for node in ast.walk(waiting.pop()):
            found = by_name.get(node.id) if isinstance(node, ast.Name) else None
            if found is not None and found not in live and found not in stop.lines:
                live.add(found)
                waiting.append(found)
    return live
