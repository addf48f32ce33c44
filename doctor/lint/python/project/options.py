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
