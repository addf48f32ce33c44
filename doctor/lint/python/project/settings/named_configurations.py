"""Values of settings in the configurations that the commands which start a script name."""

from __future__ import annotations

import ast
import re
from pathlib import PurePath

from doctor.lint.python.project.settings.option_values import Values, given_in_text, may_have_more, of_user, setting_of
from doctor.lint.python.project.settings.options import own_starts, texts_of_starts
from doctor.lint.python.script import ProjectModules, Script

_NAMES = re.compile(r"(?<![\w./$-])([\w./-]+\.(?:ya?ml|json))\b")
_TAKES_KEYS = "def get(self, *"
"""A class of the project whose ``get`` takes the path of an entry: ``config.get("train", "steps")``."""


def values_in_named(script: Script, node: ast.expr) -> Values | None:
    """The values of a setting in the configurations of all commands that start a script, of which each names one, or
    has the script's own default; ``None`` if a command or program gives it, or it is not in all of them."""
    modules, name = script.modules, _entry(script, node)
    if modules is None or not name.isidentifier() or not of_user(name):
        return None
    key = ("in named configurations", script.path, name)
    if key not in modules.memo:
        modules.memo[key] = _found(script, modules, name)
    values: Values | None = modules.memo[key]
    return values


def _entry(script: Script, node: ast.expr) -> str:
    if isinstance(node, ast.Call) and len(node.args) == 2 and isinstance(node.func, ast.Attribute):
        keys = [script.value(one) for one in node.args]
        is_path = node.func.attr == "get" and script.modules is not None and script.modules.mentioning(_TAKES_KEYS)
        return keys[1] if is_path and all(isinstance(one, str) for one in keys) else ""  # type: ignore[return-value]
    return setting_of(node)


def _found(script: Script, modules: ProjectModules, name: str) -> Values | None:
    if _is_set(modules, name):
        return None
    texts = texts_of_starts(script)
    starts = own_starts(script, (*texts.launches, *texts.pages))
    named = re.compile(rf"(?<![A-Za-z]){name.replace('_', '[-_]')}\b")
    program = PurePath(script.path).name
    if not starts or any(may_have_more(one, program) for one in starts):
        return None
    if any(map(named.search, (*starts, *texts.pages))):
        return None
    paths = {path for line in starts for path in _NAMES.findall(line) or [_default(script, line)]}
    found = [given_in_text(_text_at(modules, script, path), name) for path in paths]
    return frozenset().union(*found) if all(found) else None


_NAMES_PYTHON = re.compile(r"(?<![\w./$-])([\w-]+/[\w./-]*\w\.py)\b")
_DEFAULTS = frozenset({"base", "default", "defaults", "_base_"})


def numbers_in_named(script: Script, name: str) -> Values | None:
    """The numbers that the Python configurations have which all commands that start a script name, as in ``train.py
    configs/resnet.py``, or that with the defaults beside them; ``None`` if one is unknown, or a command gives the
    setting."""
    modules, program = script.modules, PurePath(script.path).name
    if modules is None or not name.isidentifier():
        return None
    texts = texts_of_starts(script)
    starts = own_starts(script, (*texts.launches, *texts.pages))
    named = re.compile(rf"(?<![A-Za-z]){name.replace('_', '[-_]')}\b")
    found: set[object] = set()
    for line in starts:
        given = line.partition(program)[2]
        paths = _NAMES_PYTHON.findall(given)
        if not paths or may_have_more(line, program) or named.search(given):
            return None
        for path in paths:
            beside = (str(PurePath(path).with_name(f"{one}.py")) for one in sorted(_DEFAULTS))
            values = (_number_in(_text_at(modules, script, one), name) for one in (path, *beside))
            found.add(next((one for one in values if one is not None), None))
    return frozenset(found) if found and None not in found else None


def _number_in(text: str, name: str) -> object:
    """The only number that a Python configuration gives an entry: ``config.gradient_acc = 2``."""
    given = re.findall(rf"^[ \t]*(?:\w+\.)*{name}[ \t]*=[ \t]*(\d+(?:\.\d+)?)[ \t]*(?:#.*)?$", text, re.MULTILINE)
    written = re.findall(rf"\b{name}\b[\"'\])]*[ \t]*[-+*/]?=(?!=)", text)
    return float(given[0]) if len(given) == len(written) == 1 else None


def _is_set(modules: ProjectModules, name: str) -> bool:
    """Whether a program of the project sets the entry: ``config["steps"] = 4``, ``config.update("steps", 4)``."""
    sets = re.compile(
        rf"\.{name}\s*=(?!=)|[\"']{name}[\"']\]\s*=(?!=)|(?:set|update|add|default|replace)\w*\([^\n]*\b{name}\b|"
        rf"[\"']{name}[\"']\s*:"
    )
    return any(sets.search(text) for shown, text in modules.mentioning(name) if shown.endswith(".py"))


def _default(script: Script, command: str) -> str:
    """The only configuration that an option of a script has by default, for a command without variables."""
    if re.search(r"[$<{]", command):
        return ""
    given = [script.value(script.argument(one, "default")) for one in script.method_calls("add_argument")]
    paths = [one for one in given if isinstance(one, str) and _NAMES.fullmatch(one)]
    return paths[0] if len(paths) == 1 else ""


def _text_at(modules: ProjectModules, script: Script, path: str) -> str:
    """The text of a configuration whose path starts at the folder of the script, or at one above."""
    folders = PurePath(script.path).parents
    return next(filter(None, (modules.text_at(str(folder / path)) for folder in folders)), "") if path else ""
