"""Switches of the command line that are off unless a user asks for them."""

from __future__ import annotations

import ast
import re

from doctor.lint.python.script import Script, last_name

_OF_SETTINGS = re.compile(
    r"^_?(?:args?|opts?|options|configs?|cfg|conf|hparams|flags|params|settings|self)$", re.IGNORECASE
)


def switch_off_by_default(script: Script, test: ast.expr) -> str:
    """The option that a test needs (``args.dist_eval``), if its default is off and no launch file or page of the
    project sets it: ``--dist_eval``; empty otherwise."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return next(filter(None, (switch_off_by_default(script, one) for one in test.values)), "")
    if not isinstance(test, ast.Attribute) or not _OF_SETTINGS.match(last_name(test.value)) or script.modules is None:
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
    is_off = any(map(declared.search, own)) and not any(map(is_on.search, own)) and not _sets(script, name)
    return f"--{name}" if is_off and not _is_asked_for(script, name, spelled) else ""


_STARTS = re.compile(r"\b(?:python[\d.]*|torchrun|launch|deepspeed|srun|mpirun)\b")


def is_one_everywhere(script: Script, option: str) -> bool:
    """Whether a number is 1 in each configuration, launch file and page of the project that gives it, and each of its
    programs that sets it; an option of another default, in each command that starts the script. False if nothing gives
    it."""
    modules = script.modules
    if modules is None or not option.isidentifier():
        return False
    spelled = option.replace("_", "[-_]")
    given = re.compile(rf"(?<![\w-])(?:--)?(?:\w+\.)*{spelled}[\"']?(?:\s?[:=]\s?|[ \t]+)[\"']?([^\s\"',;}}]+)")
    stated = re.compile(rf"(?<![\w-])(?:--)?(?:\w+\.)*{spelled}[\"'`]?(?:\s?[:=]\s?|[ \t]+)[\"'`]?(\d+)")
    written = re.compile(rf"\b{option}[\"']?\]?\s?[:=]\s?(\d+)\b")
    spellings = {option, option.replace("_", "-")}
    launches = [text for one in spellings for _, text in modules.mentioning(one, launches=True)]
    programs = [text for shown, text in modules.mentioning(option) if shown.endswith(".py")]
    pages = modules.pages(script.location) if script.location else ()
    found = [one for text in launches for one in given.findall(text)]
    others = [one for text in pages for one in stated.findall(text)]
    others += [one for text in programs for one in written.findall(text)]
    if not found or any(one != "1" for one in (*found, *others)):
        return False
    declared = re.compile(rf"[\"']--{spelled}[\"']([^\n]{{0,120}})")
    defaults = [one for text in programs for one in declared.findall(text)]
    return all(re.search(r"default\s?=\s?1\b", one) for one in defaults) or _is_in_all_starts(script, given)


def _is_in_all_starts(script: Script, given: re.Pattern[str]) -> bool:
    """Whether each command of the project that starts a script has an option."""
    name = script.path.rpartition("/")[2]
    texts = [text for _, text in script.modules.mentioning(name, launches=True)] if script.modules is not None else []
    texts += script.modules.pages(script.location) if script.modules is not None and script.location else ()
    lines = (line for text in texts for line in text.replace("\\\n", " ").splitlines() if name in line)
    starts = [line for line in lines if _STARTS.search(line.partition(name)[0])]
    return bool(starts) and all(map(given.search, starts))


def _sets(script: Script, name: str) -> bool:
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
