"""Options that a project gives in commands of one process alone: what they ask for happens in one process there."""

from __future__ import annotations

import ast
import re
from pathlib import PurePath

from doctor.lint.python.project.settings.declared_settings import declared_by, owner_and_entry
from doctor.lint.python.project.settings.option_values import may_have_more, of_user
from doctor.lint.python.project.settings.options import own_starts, sets, texts_of_starts
from doctor.lint.python.project.starts.launch_counts import count_of_start
from doctor.lint.python.script import Script


def is_asked_of_one_process(script: Script, node: ast.AST) -> bool:
    """Whether a place needs an option that is empty or off by default, and every command of the project that gives it
    starts one process, while others start more without it: ``if args.export_to:`` in the command that exports."""
    return any(is_in_body and _is_for_one(script, one.test) for one, is_in_body in script.branches(node))


def _is_for_one(script: Script, test: ast.expr) -> bool:
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return any(_is_for_one(script, one) for one in test.values)
    if isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.IsNot) and len(test.ops) == 1:
        is_none = isinstance(test.comparators[0], ast.Constant) and test.comparators[0].value is None
        return is_none and _is_for_one(script, test.left)
    name, modules = owner_and_entry(test)[1], script.modules
    if modules is None or not name.isidentifier() or not of_user(name) or sets(script, name):
        return False
    key = ("option of one process", script.path, name)
    if key not in modules.memo:
        modules.memo[key] = _is_given_to_one(script, name)
    found: bool = modules.memo[key]
    return found


def _is_given_to_one(script: Script, name: str) -> bool:
    """Whether the script's own parser declares an option that is off by default, and all texts of the project that have
    its name are the script, code that reads it, and commands of one process."""
    options = [
        one
        for call in script.method_calls("add_argument")
        for key, one in declared_by(call, script.value)
        if key == name
    ]
    if len(options) != 1 or options[0].default not in (None, "", False) or script.modules is None:
        return False
    texts, program = texts_of_starts(script), PurePath(script.path).name
    named = re.compile("|".join(rf"(?<![\w-]){re.escape(one)}(?![\w-])" for one in options[0].spelled))
    anywhere = re.compile(rf"(?<![\w-])(?:--)?{name.replace('_', '[-_]')}\b")
    starts = own_starts(script, (*texts.launches, *texts.pages))
    giving = [one for one in starts if named.search(one)]
    shown = sum(len(anywhere.findall(one)) for one in (*texts.launches, *texts.pages))
    if not giving or sum(len(anywhere.findall(one)) for one in giving) != shown:
        return False  # a page speaks of it elsewhere
    others = [one for one in starts if one not in giving]
    if any(may_have_more(one, program) for one in others):
        return False
    return all(count_of_start(script, one) == 1 for one in giving) and any(
        count_of_start(script, one) != 1 for one in others
    )
