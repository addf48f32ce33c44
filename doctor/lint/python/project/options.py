"""Switches of the command line that are off unless a user asks for them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from pathlib import PurePath
from typing import NamedTuple

from doctor.core.text import joined_lines
from doctor.lint.python.script import Script, last_name

OF_SETTINGS = re.compile(
    r"^_?(?:args?|opts?|options|configs?|cfg|conf|hparams|flags|params|settings|self)$", re.IGNORECASE
)


def switch_off_by_default(script: Script, test: ast.expr) -> str:
    """The option that a test needs (``args.dist_eval``), if its default is off and no launch file or page of the
    project sets it: ``--dist_eval``; empty otherwise."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return next(filter(None, (switch_off_by_default(script, one) for one in test.values)), "")
    if not isinstance(test, ast.Attribute) or not OF_SETTINGS.match(last_name(test.value)) or script.modules is None:
        return ""
    name = test.attr
    spelled = name.replace("_", "[-_]")
    declared = re.compile(
        rf"[\"']--{spelled}[\"'][^\n]{{0,120}}(?:store_true|default\s?=\s?(?:False|0)\b)|"
        rf"^\s+{name}\s?:\s?bool\s?=\s?(?:False|field\(\s?default\s?=\s?False)",
        re.MULTILINE,
    )
    own = [script.text, *(text for _, text in script.modules.mentioning(name))]
    is_on = re.compile(
        rf"[\"']--{spelled}[\"'][^\n]{{0,120}}default\s?=\s?True|set_defaults\([^)\n]*\b{name}\s?=\s?True"
    )
    is_off = any(map(declared.search, own)) and not any(map(is_on.search, own)) and not sets(script, name)
    return f"--{name}" if is_off and not _is_asked_for(script, name, spelled) else ""


_COMMENT = re.compile(r"^[ \t]*#.*\n?", re.MULTILINE)
_STARTS = re.compile(r"\b(?:python[\d.]*|torchrun|launch|deepspeed|srun|mpirun)\b")


class StartTexts(NamedTuple):
    """The launch files and pages that may start a script; ``own``: they are those of its own folder, which has its
    commands, while others may start a file of the same name."""

    launches: list[str]
    pages: list[str]
    own: bool


def texts_of_starts(script: Script) -> StartTexts:
    """The launch files and pages that may start a script."""
    modules, place = script.modules, PurePath(script.path)
    if modules is None:
        return StartTexts([], [], own=False)
    found = modules.mentioning(place.name, launches=True)
    pages = list(modules.pages(script.location)) if script.location else []
    below = [text for shown, text in found if PurePath(shown).is_relative_to(place.parent)]
    is_inner = script.location and str(PurePath(script.location).parent) != modules.root_of(script.location)
    if is_inner and starts_in(place.name, below):
        above = modules.pages_at_root(script.location)
        return StartTexts(below, [one for one in pages if one not in above], own=True)
    return StartTexts([text for _, text in found], pages, own=False)


def number_in(given: str, text: str) -> str:
    """What a command gives; of a variable, the only value that its file gives it, or else its default:
    ``${STEPS:-4}``."""
    if not given.startswith("$"):
        return given
    name, _, default = given.strip("${}").partition(":-")
    if not name.isidentifier():
        return given
    values = set(re.findall(rf"^[ \t]*(?:export[ \t]+)?{name}=[\"']?([^\s\"'#;]*)", text, re.MULTILINE))
    values = {one.removeprefix(f"${{{name}:-").rstrip("}") for one in values}
    return values.pop() if len(values) == 1 else given if values or not default else default


def with_variables(line: str, text: str) -> str:
    """A command with the options that it has in variables of its file: ``train.py $ARGS``, ``"${ARGS[@]}"``."""

    def options_in(found: re.Match[str]) -> str:
        given = re.findall(rf"^[ \t]*{found[1]}=(?:\"([^\"]*)\"|'([^']*)'|\(([^)]*)\))", text, re.MULTILINE)
        return " ".join(" ".join(given[0]).replace("\\\n", " ").split()) if len(given) == 1 else found[0]

    return _VARIABLE.sub(options_in, line)


_VARIABLE = re.compile(r"\"?\$\{?(\w+)(?:\[@\])?\}?\"?(?![\w/.:}])")


def starts_in(name: str, texts: Iterable[str]) -> list[str]:
    """The commands that start a file of that name."""
    without_comments = (_COMMENT.sub("", text) for text in texts if name in text)  # "\\" does not continue them
    lines = (line for text in without_comments for line in joined_lines(text) if name in line)
    return [line for line in lines if _STARTS.search(line.partition(name)[0])]


def sets(script: Script, name: str) -> bool:
    """Whether the file itself turns it on: ``args.dist_eval = True``."""
    targets = (target for one in script.all(ast.Assign) for target in one.targets)
    return any(isinstance(one, ast.Attribute) and one.attr == name for one in targets)


def _is_asked_for(script: Script, name: str, spelled: str) -> bool:
    """Whether a launch file or a page has the option with a value that is not off."""
    given = re.compile(
        rf"--{spelled}\b(?![ =][\"']?(?:[Ff]alse|0|no)\b)|\b{name}[\"']?\s*[:=]\s*[\"']?(?:[Tt]rue|1|yes)\b"
    )
    modules = script.modules
    spellings = {name, name.replace("_", "-")} if modules is not None else set()
    texts = [text for one in spellings if modules for _, text in modules.mentioning(one, launches=True)]
    texts += modules.pages(script.location) if modules is not None and script.location else ()
    return any(given.search(text) for text in texts)
