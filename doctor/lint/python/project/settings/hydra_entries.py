"""Entries at the top of the configuration that Hydra loads for a program: ``cfg.test`` of ``test: false``."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePath

from doctor.lint.python.project.settings.declared_settings import scalar
from doctor.lint.python.project.settings.options import shown_starts
from doctor.lint.python.script import UNKNOWN, FunctionNode, ProjectModules, Script, per_script

_MAIN_OF_HYDRA = "hydra.main"
_SELECTS = re.compile(r"(?<![\w-])(?:--config-(?:name|path|dir)|-cn|-cp|-cd)(?![\w-])")
_IS_GLOBAL = re.compile(r"^#\s*@package\s+_global_\s*$", re.MULTILINE)
"""Configurations whose entries are at the top: hydra.cc/docs/advanced/overriding_packages."""


@per_script
def main_configuration(script: Script) -> Path | None:
    """The path of the configuration that Hydra loads before it calls any function of a program: ``@hydra.main(
    config_path="conf", config_name="train")``. ``None`` if a store may have it, or a text that names the program
    selects another one."""
    modules = script.modules
    mains = list(_mains(script))
    if modules is None or len(mains) != 1 or modules.mentioning("ConfigStore"):
        return None
    folder, name = (script.value(script.argument(mains[0][1], one)) for one in ("config_path", "config_name"))
    if not isinstance(folder, str) or not isinstance(name, str) or "://" in folder:
        return None
    place = PurePath(script.location)
    texts = [*(text for _, text in modules.mentioning(place.name)), *modules.pages(script.location)]
    if any(place.stem in text and _SELECTS.search(text) for text in texts):
        return None
    return Path(os.path.normpath(place.parent / folder / f"{name.removesuffix('.yaml')}.yaml"))


def _mains(script: Script) -> Iterator[tuple[FunctionNode, ast.Call]]:
    for function in script.functions:
        for one in function.decorator_list:
            if isinstance(one, ast.Call) and script.name(one.func) == _MAIN_OF_HYDRA:
                yield function, one


def values_of_hydra(script: Script, node: ast.expr) -> frozenset[object] | None:
    """The values that an entry at the top of that configuration has in all starts of the program that the project
    shows; ``None`` if one is unknown, or the project shows no start."""
    modules, path = script.modules, main_configuration(script)
    if modules is None or path is None or not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
        return None
    ((function, _),) = _mains(script)
    given = [one.arg for one in function.args.args]
    if script.function_of(node) is not function or given != [node.value.id] or not shown_starts(script):
        return None
    key = ("entry of Hydra", script.path, node.attr)
    if key not in modules.memo:
        found = set(_values(script, modules, path, node.attr))
        modules.memo[key] = frozenset(found) if found and UNKNOWN not in found else None
    values: frozenset[object] | None = modules.memo[key]
    return values


def _values(script: Script, modules: ProjectModules, path: Path, name: str) -> Iterator[object]:
    entry = re.compile(rf"^{name}[ \t]*:[ \t]*([^\s#][^#\n]*?)?[ \t]*(?:#.*)?$", re.MULTILINE)
    override = re.compile(rf"(?<![\w.-])\+{{0,2}}{name}=([^\s\"'`,;\\]*)")
    stored = re.compile(rf"\b\w*(?:cfg|conf|opt|arg|param)\w*(?:\.{name}|\[[\"']{name}[\"']\])\s*=(?!=)")
    launches = {os.path.abspath(one): text for one, text in modules.mentioning(name, launches=True)}  # noqa: PTH100
    found = entry.findall(launches.get(str(path), ""))
    if len(found) != 1:
        yield UNKNOWN
    for place, text in launches.items():
        is_yaml = place.endswith((".yaml", ".yml"))
        if place == str(path) or (is_yaml and _IS_GLOBAL.search(text) and path.parent in Path(place).parents):
            yield from map(scalar, entry.findall(text))
        yield from (scalar(one) if one else UNKNOWN for one in override.findall(text))
    programs = [text for shown, text in modules.mentioning(name) if shown.endswith(".py")]
    for text in (*modules.pages(script.location), *modules.notebooks(name)):
        yield from (scalar(one) if one else UNKNOWN for one in override.findall(text))
    if any(stored.search(text) or re.search(rf"[\"']\+{{0,2}}{name}=", text) for text in programs):
        yield UNKNOWN
