"""Switches of the command line that are off unless a user asks for them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import PurePath
from typing import NamedTuple

from doctor.core.text import joined_lines
from doctor.lint.python.script import ProjectModules, Script, last_name

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


def is_one_everywhere(script: Script, option: str) -> bool:
    """Whether a number is 1 in each configuration, launch file and page of the project that gives it, and each of its
    programs that sets it or has it as a default; an option of another default, in each command that starts the script.
    False if nothing gives it. Other programs do not count for an option of the script whose default is 1."""
    modules = script.modules
    if modules is None or not option.isidentifier():
        return False
    spelled = option.replace("_", "[-_]")
    given = re.compile(rf"(?<![\w-])(?:--)?(?:\w+\.)*{spelled}[\"']?(?:\s?[:=]\s?|[ \t]+)[\"']?([^\s\"',;}}]+)")
    stated = re.compile(rf"(?<![\w-])(?:--)?(?:\w+\.)*{spelled}[\"'`]?(?:\s?[:=]\s?|[ \t]+)[\"'`]?(\d+)")
    written = re.compile(rf"\b{option}[\"']?\]?\s?[:=]\s?(\d+)\b")
    declared = re.compile(rf"[\"']--{spelled}[\"']([^)]{{0,200}})")
    texts, declares = texts_of_starts(script), declared.search(script.text)
    own = declares is not None and (texts.own or re.search(r"default\s?=\s?1\b", declares[1]) is not None)
    launches = texts.launches if own else _of_selected(script, modules, dict(_launches_with(modules, option)))
    programs = [script.text] if own else [text for shown, text in modules.mentioning(option) if shown.endswith(".py")]
    found = [number_in(one, text) for text in launches for one in given.findall(text)]
    others = [one for text in texts.pages for one in stated.findall(text)]
    others += [one for text in programs for one in written.findall(text)]
    field = re.compile(rf"^[ \t]+{option}[ \t]*:[ \t]*(?:int|Optional\[int\])[ \t]*=[ \t]*(\d+)", re.MULTILINE)
    defaults = [one for text in programs for one in declared.findall(text)]
    defaults += [f"default={one}" for text in programs for one in field.findall(text)]
    if not (found or defaults) or any(one != "1" for one in (*found, *others)):
        return False
    return all(re.search(r"default\s?=\s?1\b", one) for one in defaults) or _is_in_all_starts(script, texts, given)


_MAKES = re.compile(r"^_target_:[ \t]*[\"']?([\w.]+)", re.MULTILINE)
"""The class of which a configuration of Hydra makes an object (hydra.utils.instantiate)."""


def _of_selected(script: Script, modules: ProjectModules, launches: dict[str, str]) -> list[str]:
    """The launch files, without those of other modules: where configurations make an object of a class of this one,
    those that make another object, and commands that name such a configuration alone."""
    makes = {
        shown: found[1].split(".")[-2:-1] == [PurePath(script.path).stem]
        for shown, text in modules.mentioning("_target_", launches=True)
        if (found := _MAKES.search(text))
    }
    if not any(makes.values()):
        return list(launches.values())
    return [text for shown, text in launches.items() if makes.get(shown, _may_select(makes, text))]


def _may_select(makes: dict[str, bool], text: str) -> bool:
    """Whether a launch file names a configuration that makes the object, or none that makes another."""
    words = set(re.findall(r"[\w-]+", text))
    named = [is_own for shown, is_own in makes.items() if PurePath(shown).stem in words]
    return any(named) or not named


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


def _launches_with(modules: ProjectModules, option: str) -> Iterator[tuple[str, str]]:
    """The launch files with an option in either spelling."""
    for one in {option, option.replace("_", "-")}:
        yield from modules.mentioning(one, launches=True)


def number_in(given: str, text: str) -> str:
    """What a command gives; of a variable, the only value that its file gives it."""
    name = given.strip("${}")
    if not given.startswith("$") or not name.isidentifier():
        return given
    values = set(re.findall(rf"^[ \t]*(?:export[ \t]+)?{name}=[\"']?([^\s\"'#;]*)", text, re.MULTILINE))
    return values.pop() if len(values) == 1 else given


def starts_in(name: str, texts: Iterable[str]) -> list[str]:
    """The commands that start a file of that name."""
    without_comments = (_COMMENT.sub("", text) for text in texts if name in text)  # "\\" does not continue them
    lines = (line for text in without_comments for line in joined_lines(text) if name in line)
    return [line for line in lines if _STARTS.search(line.partition(name)[0])]


def _is_in_all_starts(script: Script, texts: StartTexts, given: re.Pattern[str]) -> bool:
    """Whether each command of the project that starts a script has an option."""
    starts = starts_in(PurePath(script.path).name, (*texts.launches, *texts.pages))
    return bool(starts) and all(map(given.search, starts))


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
