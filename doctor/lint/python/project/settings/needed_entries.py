"""Configurations with which a program cannot train, since they lack an entry that it always reads."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from doctor.lint.python.script import Script, last_name, per_script

_LOADS = frozenset({"load", "safe_load", "full_load"})
_ANYWAY = re.compile(r"main_process|is_master|is_main|rank|epoch|__main__", re.IGNORECASE)
"""Conditions that hold on a rank of each job, or in an epoch."""
_COMPOSED = re.compile(
    r"^[\"']?(?:_base_|defaults|base|inherit\w*|include|extends)[\"']?[ \t]*:|<<[ \t]*:", re.MULTILINE
)
"""Configurations that get entries from others."""
_IN_FILES = (".yaml", ".yml", ".json")


def may_be_read(script: Script, shown: str, text: str) -> bool:
    """Whether a launch file is no configuration, or one with all entries that a script always reads of the one that it
    loads: ``config["images"]`` fails without ``images``."""
    needed = _needed(script)
    if not needed or not shown.endswith(_IN_FILES) or _COMPOSED.search(text):
        return True
    return all(re.search(rf"^[ \t{{]*[\"']?{re.escape(one)}[\"']?[ \t]*:", text, re.MULTILINE) for one in needed)


@per_script
def _needed(script: Script) -> frozenset[str]:
    """The entries that a program which trains reads of its only configuration, and neither sets nor asks for."""
    name = _loaded(script)
    if not name:
        return frozenset()
    entries = [
        (one, key)
        for one in script.all(ast.Subscript)
        if isinstance(one.value, ast.Name) and one.value.id == name and isinstance(key := script.value(one.slice), str)
    ]
    optional = {key for one, key in entries if not isinstance(one.ctx, ast.Load)} | set(_asked_for(script, name))
    return frozenset(key for one, key in entries if key not in optional and _is_always_read(script, one))


def _loaded(script: Script) -> str:
    """The name of the only configuration that a program loads, as far as no other one is merged into it."""
    names = [
        target.id
        for one in script.all(ast.Assign)
        if isinstance(one.value, ast.Call) and last_name(one.value.func) in _LOADS and _is_of_text(script, one.value)
        for target in one.targets
        if isinstance(target, ast.Name)
    ]
    if len(names) != 1:
        return ""
    stores = [one for one in script.all(ast.Name) if one.id == names[0] and isinstance(one.ctx, ast.Store)]
    return names[0] if len(stores) == 1 and not any(_merges(one, names[0]) for one in script.all(ast.Call)) else ""


def _is_of_text(script: Script, call: ast.Call) -> bool:
    return script.name(call.func).startswith(("yaml.", "ruamel.yaml.", "json."))


def _merges(call: ast.Call, name: str) -> bool:
    """``config.update(others)``, ``merge(config, others)``; options of a command add no entry unless it gives them."""
    if re.search(r"update|merge|override|default|union", last_name(call.func)) is None:
        return False
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    parts = [*([owner] if owner is not None else []), *call.args]
    others = [one for one in parts if not (isinstance(one, ast.Name) and one.id == name)]
    return len(others) < len(parts) and any(
        isinstance(one, (ast.Name, ast.Dict, ast.Call)) and last_name(one) != "utils" for one in others
    )


def _asked_for(script: Script, name: str) -> Iterator[str]:
    """The entries that a program asks for before it reads them: ``"images" in config``, ``config.get("images")``."""
    for test in script.all(ast.Compare):
        key = script.value(test.left)
        if isinstance(test.ops[0], (ast.In, ast.NotIn)) and isinstance(key, str):
            yield key
    for call in script.method_calls("get", "setdefault", "pop"):
        is_own = isinstance(call.func, ast.Attribute) and last_name(call.func.value) == name
        if is_own and call.args and isinstance(key := script.value(call.args[0]), str):
            yield key


def _is_always_read(script: Script, node: ast.AST, passed: frozenset[ast.AST] = frozenset()) -> bool:
    """Whether no condition but one on the rank or the epoch is around a place in a loop, as that of the epochs, nor
    around one outside of loops, and its function is used at such a place. ``passed``: functions on the way."""
    inner, is_in_loop = node, False
    for outer in script.around(node):
        if isinstance(outer, (ast.IfExp, ast.BoolOp, ast.Try, ast.Lambda, ast.comprehension)):
            return False
        is_branch = isinstance(outer, ast.If) and inner is not outer.test and not is_in_loop
        if is_branch and isinstance(outer, ast.If) and not _ANYWAY.search(ast.unparse(outer.test)):
            return False
        is_in_loop = is_in_loop or (isinstance(outer, ast.For) and inner is not outer.iter)
        if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef)):
            uses = [one for one in script.all(ast.Name) if one.id == outer.name]
            passed |= {outer}
            return any(_is_always_read(script, one, passed) for one in uses if passed.isdisjoint(script.around(one)))
        inner = outer
    return True
