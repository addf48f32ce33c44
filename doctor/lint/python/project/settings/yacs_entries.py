"""Values that entries of configurations of yacs have: ``cfg.MODEL.WEIGHTS``, by defaults, files and commands."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import PurePath

from doctor.lint.python.script import UNKNOWN, ProjectModules, Script, parsed

MOST_READ = 40
"""Files with a name that are parsed."""
_MAKES_NODES = re.compile(r"\byacs\b|\bfvcore\.common\.config\b")
"""``CfgNode`` of fvcore derives from that of yacs."""
_TAKES_OPTIONS = re.compile(r"argument_?parser", re.IGNORECASE)
_ENTRY = re.compile(r"^(?P<indent>[ \t]*)(?P<name>\w+):[ \t]*(?P<value>[^\n]*)$")


def entry_values(script: Script, node: ast.expr) -> frozenset[object] | None:
    """The values of an entry that a file of the project gives a default in a ``CfgNode``: this one, those of the
    configurations, and of what the project's commands, pages and programs set. Files in the folders of other programs
    are theirs. ``None`` if a value is unknown, or yacs does not have the entry."""
    modules, path = script.modules, tuple(_path(node))
    if modules is None or len(path) < 2 or not all(map(str.isidentifier, path)):
        return None
    key = ("entry of yacs", script.path, *path)
    if key not in modules.memo:
        found = _values(script, modules, path)
        modules.memo[key] = None if found is None or UNKNOWN in found else frozenset(found)
    values: frozenset[object] | None = modules.memo[key]
    return values


def _path(node: ast.expr) -> list[str]:
    """The names below the first one of an attribute: ``MODEL``, ``WEIGHTS``."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.insert(0, node.attr)
        node = node.value
    return names if isinstance(node, ast.Name) else []


def _values(script: Script, modules: ProjectModules, path: tuple[str, ...]) -> set[object] | None:
    own = [(shown, text) for shown, text in modules.mentioning(path[-1]) if not _is_of_others(script, modules, shown)]
    programs = [(shown, text) for shown, text in own if shown.endswith(".py")]
    defaults = {
        value for shown, text in programs[:MOST_READ] if _MAKES_NODES.search(text) for value in _written(text, path)
    }
    if not defaults or len(programs) > MOST_READ:
        return None
    found = defaults.union(*(_written(text, path) for shown, text in programs))
    dotted = re.compile(rf"(?<![\w.]){re.escape('.'.join(path))}[\"']?,?[ \t=]+[\"']?(?P<value>[^\s\"',)\]]*)")
    for shown, text in own:
        if shown.endswith((".yaml", ".yml")):
            found.update(_configured(text, path))
    others = [text for shown, text in own if not shown.endswith((".yaml", ".yml", ".py"))]
    for text in (*others, *modules.pages(script.location), *modules.notebooks(path[-1])):
        found.update(_scalar(one["value"]) for one in dotted.finditer(text))
    return found


def _is_of_others(script: Script, modules: ProjectModules, shown: str) -> bool:
    """Whether a file is in a folder with programs of its own, which does not have the script."""
    place, key = PurePath(script.path), ("folders of programs",)
    if key not in modules.memo:
        programs = (PurePath(one) for one, text in modules.mentioning("__main__") if _TAKES_OPTIONS.search(text))
        modules.memo[key] = {one.parent for one in programs}
    folders: set[PurePath] = modules.memo[key]
    return any(one in folders and not place.is_relative_to(one) for one in PurePath(shown).parents)


def _written(text: str, path: tuple[str, ...]) -> Iterator[object]:
    """What a program sets an entry to. One that sets it in a section alone may mean another section."""
    try:
        nodes = list(ast.walk(parsed(text)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        yield UNKNOWN
        return
    for one in nodes:
        for target in one.targets if isinstance(one, ast.Assign) else ():
            given = tuple(_path(target)) if isinstance(target, ast.Attribute) else ()
            if given and isinstance(one, ast.Assign) and given == path[-len(given) :]:
                is_known = given == path and isinstance(one.value, ast.Constant)
                yield one.value.value if is_known and isinstance(one.value, ast.Constant) else UNKNOWN
        if isinstance(one, ast.Constant) and one.value == ".".join(path):
            yield UNKNOWN  # cfg.merge_from_list(["MODEL.WEIGHTS", path])


def _configured(text: str, path: tuple[str, ...]) -> Iterator[object]:
    """What a configuration gives an entry; in braces, it is unknown."""
    sections: list[tuple[int, str]] = []
    for line in text.splitlines():
        one = _ENTRY.match(line.partition(" #")[0].rstrip(" \t"))
        if one is None:
            continue
        indent = len(one["indent"])
        sections = [*(section for section in sections if section[0] < indent), (indent, one["name"])]
        named = tuple(name for _, name in sections)
        if named == path:
            yield _scalar(one["value"].strip("\"'"))
        elif named == path[: len(named)] and one["value"].startswith("{"):
            yield UNKNOWN


def _scalar(word: str) -> object:
    named = {"true": True, "false": False, "null": None, "none": None, "~": None}
    if word.lower() in named:
        return named[word.lower()]
    if "$" in word or "{" in word or "[" in word:
        return UNKNOWN
    try:
        return float(word)
    except ValueError:
        return word
