"""Values that one rank has and that are ``None`` on all others, also in an object that the program is given them by."""

from __future__ import annotations

import ast
import re
from pathlib import PurePath

from doctor.lint.python.project.unreached import may_import
from doctor.lint.python.rank_branches import is_rank, plain_test, rank_condition
from doctor.lint.python.script import Script, last_name, parsed, per_script
from doctor.lint.python.value_flow import handed_in

_IS_ZERO = re.compile(
    r"(?=[\w.]*rank)[\w.()]* == 0|"
    r"(?:[\w.]*\.)?is_(?:\w{1,40}_)?(?:main|master|rank_?0|rank_zero|global_zero)(?:_\w{1,40})?(?:\(\))?",
    re.IGNORECASE,
)
"""Tests that one rank passes, of the job or of each host."""


def reads_absent_value(script: Script, read: ast.AST) -> bool:
    """Whether an expression reads an entry or attribute of what is ``None`` on all ranks but one, and so fails on them:
    ``loaders["test"]`` or ``self.loaders["test"]``."""
    owner = read.value if isinstance(read, (ast.Subscript, ast.Attribute)) and isinstance(read.ctx, ast.Load) else None
    if isinstance(owner, ast.Name):
        return _is_of_one(script, owner)
    if not isinstance(owner, ast.Attribute) or not isinstance(owner.value, ast.Name) or owner.value.id != "self":
        return False
    return _is_given_by_one(script, owner)


def _is_of_one(script: Script, name: ast.Name) -> bool:
    """Whether a name gets a value under a test of one rank only, and ``None`` anywhere else."""
    scope = script.scope_of(name, name.id)
    bound = scope.names[name.id] if scope is not None else []
    values = [one for one in bound if isinstance(one, ast.expr)]
    given = [one for one in values if not (isinstance(one, ast.Constant) and one.value is None)]
    is_whole = bool(given) and len(given) < len(values) == len(bound)
    return is_whole and name.id not in _shared_names(script) and all(_is_on_one_rank(script, one) for one in given)


@per_script
def _shared_names(script: Script) -> set[str]:
    """The names that functions bind for an outer scope."""
    named: list[ast.Global | ast.Nonlocal] = [*script.all(ast.Global), *script.all(ast.Nonlocal)]
    return {one for node in named for one in node.names}


def _is_on_one_rank(script: Script, node: ast.AST) -> bool:
    condition = rank_condition(script, node)
    if condition is not None:
        return _IS_ZERO.fullmatch(plain_test(condition.test)) is not None
    return any(is_in_body and _asks_for_given_rank(script, one.test) for one, is_in_body in script.branches(node))


def _asks_for_given_rank(script: Script, test: ast.expr) -> bool:
    """``gpu == 0``, of a parameter for which every call gives a rank."""
    if not isinstance(test, ast.Compare) or [type(one) for one in test.ops] != [ast.Eq]:
        return False
    given = list(handed_in(script, test.left))
    return script.value(test.comparators[0]) == 0 and bool(given) and all(is_rank(script, one) for one in given)


def _is_given_by_one(script: Script, attribute: ast.Attribute) -> bool:
    """Whether an attribute of ``self`` is the argument of that name that every call of its class gives, and each call
    gives what only one rank has."""
    owner, name = script.class_of(attribute), attribute.attr
    if owner is None or script.parent(owner) is not script.tree:
        return False
    answers = _answers(script)
    if (owner, name) not in answers:
        answers[owner, name] = _is_made_by_one(script, owner, name) and _is_set_by_name(script, name)
    return answers[owner, name] and not _is_used_outside(script, owner.name)


@per_script
def _answers(_script: Script) -> dict[tuple[ast.ClassDef, str], bool]:
    return {}


def _is_made_by_one(script: Script, owner: ast.ClassDef, name: str) -> bool:
    """Whether every use of a class is a call that gives, for the parameter of that name, what only one rank has."""
    makers = [one for one in owner.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"]
    parameters = [one.arg for one in makers[0].args.args] if len(makers) == 1 else []
    if name not in parameters or not _is_kept(script, makers[0], name):
        return False
    uses = [one for one in script.all(ast.Name) if one.id == owner.name and isinstance(one.ctx, ast.Load)]
    calls = [call for one in uses if isinstance(call := script.parent(one), ast.Call) and call.func is one]
    given = [script.argument(one, name, parameters.index(name) - 1) for one in calls]
    is_whole = 0 < len(calls) == len(uses)
    return is_whole and all(isinstance(one, ast.Name) and _is_of_one(script, one) for one in given)


def _is_set_by_name(script: Script, name: str) -> bool:
    """Whether all that sets an attribute of that name, anywhere in the project, is ``self.name = name``."""
    texts = [text for _, text in script.modules.mentioning(name)] if script.modules is not None else [script.text]
    stores = [found for text in texts for found in re.findall(rf"(\w+)\.{name}[ \t]*=(?!=)[ \t]*([^\n#]*)", text)]
    return bool(stores) and all(owner == "self" and value.strip() == name for owner, value in stores)


def _is_kept(script: Script, maker: ast.FunctionDef, name: str) -> bool:
    """Whether ``__init__`` keeps a parameter as the attribute of its name, or gives it to the base class by name."""
    if any(one.id == name and isinstance(one.ctx, ast.Store) for one in script.inside(maker, ast.Name)):
        return False
    keeps = {ast.unparse(one) for one in script.inside(maker, ast.Assign)}
    handed = {ast.unparse(word) for call in script.inside(maker, ast.Call) for word in _words_for_base(call)}
    return f"self.{name} = {name}" in keeps or f"{name}={name}" in handed


def _words_for_base(call: ast.Call) -> list[ast.keyword]:
    return call.keywords if ast.unparse(call.func) == "super().__init__" else []


def _is_used_outside(script: Script, name: str) -> bool:
    if script.modules is None:
        return False
    place, word = PurePath(script.location or script.path), re.compile(rf"\b{re.escape(name)}\b")
    others = (text for shown, text in script.modules.mentioning(place.stem) if shown != script.path)
    return any(word.search(text) is not None and may_import(place, text) for text in others)


_OF_JOB = re.compile(
    r"init_process_group|hvd\.init|torchrun|DistributedDataParallel|Accelerator\(|torch\.distributed\b"
)
_OF_OTHERS = re.compile(
    r"(?=[\w.]*rank)[\w.()]* (?:!= 0|> 0)|not (?:[\w.]*\.)?is_(?:main|master)\w*(?:\(\))?", re.IGNORECASE
)


def is_none_on_others(script: Script, value: ast.expr) -> bool:
    """Whether a value is a parameter of ``__init__`` for which every program of several ranks gives ``None`` on all but
    the first one: ``if rank != 0: weights = None`` above ``Trainer(weights=weights)``."""
    maker = script.function_of(value)
    owner = script.parent(maker) if maker is not None else None
    if not isinstance(value, ast.Name) or not isinstance(maker, ast.FunctionDef) or not isinstance(owner, ast.ClassDef):
        return False
    parameters = [one.arg for one in maker.args.args]
    if maker.name != "__init__" or value.id not in parameters or script.modules is None:
        return False
    answers: list[bool] = []
    for shown, text in script.modules.mentioning(owner.name):
        if shown.endswith(".py") and shown != script.path and _OF_JOB.search(text):
            found = _given_to(text, owner.name, value.id, parameters.index(value.id) - 1)
            answers += [found is not None and all(found)]
    return any(answers) and all(answers)


def _given_to(text: str, name: str, parameter: str, place: int) -> list[bool] | None:
    """For each call of a class, whether it gives ``None`` for a parameter on other ranks; ``None`` of an unreadable
    file."""
    try:
        functions = [one for one in ast.walk(parsed(text)) if isinstance(one, ast.FunctionDef)]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    found: list[bool] = []
    for function in functions:
        emptied = {target for one in ast.walk(function) if isinstance(one, ast.If) for target in _emptied(one)}
        calls = (one for one in ast.walk(function) if isinstance(one, ast.Call) and last_name(one.func) == name)
        for call in calls:
            named = [one.value for one in call.keywords if one.arg == parameter]
            given = next(iter((*named, *call.args[place : place + 1])), None)
            is_none = given is None or (isinstance(given, ast.Constant) and given.value is None)
            is_open = any(one.arg is None for one in call.keywords) or any(
                isinstance(one, ast.Starred) for one in call.args
            )
            found.append(not is_open and (is_none or ast.unparse(given or call) in emptied))
    return found if len(found) == len(re.findall(rf"\b{name}\(", text)) else None


def _emptied(branch: ast.If) -> list[str]:
    """The names that a branch of all ranks but the first sets to ``None``."""
    if not _OF_OTHERS.fullmatch(ast.unparse(branch.test)):
        return []
    sets = [one for one in branch.body if isinstance(one, ast.Assign) and isinstance(one.value, ast.Constant)]
    empty = (one for one in sets if isinstance(one.value, ast.Constant) and one.value.value is None)
    return [ast.unparse(target) for one in empty for target in one.targets]
