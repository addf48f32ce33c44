"""Samplers of loaders that a function of another module of the project makes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

from doctor.lint.python.gpu_use import runs_alone
from doctor.lint.python.loader_calls import evaluates, loaders, target_name
from doctor.lint.python.project.imported_functions import called_function
from doctor.lint.python.project.random_data import is_random
from doctor.lint.python.script import FunctionNode, Script
from doctor.lint.python.training import SAMPLER
from doctor_checks.code.data._imported_loaders import assignments_of, targets_of

_MAKES = "DistributedSampler("


class ImportedSampler(NamedTuple):
    """``call``: of the function in the script; ``name``: what its loader is called there; ``sampler``: the call that
    makes it, in the module ``made_in``; ``is_alternative``: other calls get a loader without it."""

    call: ast.Call
    name: str
    sampler: ast.Call
    made_in: Script
    is_alternative: bool


def imported_samplers(script: Script) -> Iterator[ImportedSampler]:
    """The samplers that shuffle, of loaders that a script gets from another module, if no file of the project calls
    ``set_epoch``."""
    modules = script.modules
    if modules is None or modules.is_one_file or modules.mentioning("set_epoch"):
        return
    if not any(shown != script.path for shown, _ in modules.mentioning(_MAKES)):
        return
    for assigned in script.all(ast.Assign):
        call = assigned.value
        if not isinstance(call, ast.Call) or len(assigned.targets) != 1 or runs_alone(script, call):
            continue
        found = called_function(script, call)
        if found is None or found[0] is script or _MAKES not in found[0].text:
            continue
        for place, target in targets_of(assigned.targets[0]):
            if evaluates(target.id) is not True and len(assignments_of(script, target)) == 1:
                yield from _of_function(*found, call, place, target.id)


def _of_function(
    made_in: Script, function: FunctionNode, call: ast.Call, place: int | None, name: str
) -> Iterator[ImportedSampler]:
    returned = [one.value for one in made_in.inside(function, ast.Return) if one.value is not None]
    parts = [_part(one, place) for one in returned]
    values = [value for one in parts if one is not None for value in made_in.values_of(one)]
    made = [one for one in loaders(made_in) if any(one.call is value for value in values)]
    shuffling = {one for one in made_in.calls(SAMPLER) if _shuffles(made_in, one)}
    for loader in made:
        given = made_in.argument(loader.call, "sampler")
        chosen = made_in.values_of(given) if given is not None else ()
        samplers = [one for one in chosen if isinstance(one, ast.Call) and one in shuffling]
        if samplers and loader.evaluates is not True and None not in parts:
            yield ImportedSampler(call, name, samplers[0], made_in, len(made) > 1 or len(chosen) > 1)
            return


def _part(returned: ast.expr, place: int | None) -> ast.expr | None:
    if place is None:
        return returned
    return returned.elts[place] if isinstance(returned, ast.Tuple) and place < len(returned.elts) else None


def _shuffles(made_in: Script, sampler: ast.Call) -> bool:
    """Whether a sampler has another order in each epoch that it is given, of data that are not random anyway."""
    given, data = made_in.argument(sampler, "shuffle", 3), made_in.argument(sampler, "dataset", 0)
    if made_in.is_open(sampler) or (given is not None and made_in.value(given) is not True):
        return False
    if evaluates(target_name(made_in, sampler)) is True or runs_alone(made_in, sampler):
        return False
    return data is None or not is_random(made_in, data)
