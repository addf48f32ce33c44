"""Summarizes a module for the other files of the project that import it."""

from __future__ import annotations

import ast
import re

from doctor.lint.python.collectives import collectives_of
from doctor.lint.python.cuda import binds_device, is_nccl, joins
from doctor.lint.python.project.imported_functions import FunctionSummary, ModuleSummary, may_be_of_project
from doctor.lint.python.project.random_data import random_datasets
from doctor.lint.python.rank_branches import is_rank_test, rank_condition
from doctor.lint.python.reachable_functions import is_certain
from doctor.lint.python.script import FunctionNode, ProjectModules, Script, step_at
from doctor.lint.python.training import namespaces_of_one_rank
from doctor.lint.python.wrapped_models import gathering_parameters, parameter_names

_READS_RANK = re.compile(r"get_rank\(|process_index|split_by_node|environ\W{1,10}(?:get\W{1,5})?RANK")
MOST_CALLS = 40
"""Calls of one function that are followed into other modules."""


def summary_of(script: Script, modules: ProjectModules) -> ModuleSummary:
    """The summary of a script that follows no imports itself; ``modules``: of its project."""
    functions = _Functions(script, modules)
    named = {f"{owner}().{name}": function for (owner, name), function in script.bindings.methods.items()}
    named |= script.bindings.functions
    bound = script.bindings.of_the_module.names.items()
    return ModuleSummary(
        location=script.location,
        functions={name: functions.summary(function) for name, function in named.items()},
        imports={name: found[0] for name, found in bound if len(found) == 1 and isinstance(found[0], str)},
        stars=_stars(script),
        binds_device=binds_device(script),
        reads_rank=_READS_RANK.search(script.text) is not None,
        of_one_rank=namespaces_of_one_rank(script),
        random_datasets=random_datasets(script),
    )


def _stars(script: Script) -> tuple[str, ...]:
    """The modules of which a script imports all names, the last one first: its names replace those of the others."""
    imports = [one for one in script.tree.body if isinstance(one, ast.ImportFrom) and one.names[0].name == "*"]
    return tuple("." * one.level + (one.module or "") for one in reversed(imports))


class _Functions:
    """The functions of a script, with what is found by one pass over all of it."""

    def __init__(self, script: Script, modules: ProjectModules) -> None:
        self._script = script
        self._collectives = collectives_of(script)
        self._gathering = gathering_parameters(script)
        self._calls = _calls_by_function(script, modules)
        self._starts = {script.function_of(call) for call in joins(script) if is_nccl(script, call)}
        self._returns: dict[FunctionNode | None, list[ast.Return]] = {}
        for one in script.all(ast.Return):
            self._returns.setdefault(script.function_of(one), []).append(one)

    def summary(self, function: FunctionNode) -> FunctionSummary:
        run = self._collectives.run_by(function)
        calls = self._calls.get(function, {})
        return FunctionSummary(
            name=function.name,
            line=function.lineno,
            parameters=parameter_names(function),
            word=run.word if run is not None else "",
            certain=run is None or run.certain,
            steps=run.steps if run is not None else (),
            reached=self._collectives.reached_words.get(function, frozenset()),
            gathering=self._gathering.get(function, {}),
            calls=tuple((name, step_at(self._script, call)) for name, call in calls.items()),
            tests_rank=self._tests_rank(function),
            starts_nccl=function in self._starts,
        )

    def _tests_rank(self, function: FunctionNode) -> bool:
        returned = [one.value for one in self._returns.get(function, ())]
        return len(returned) == 1 and returned[0] is not None and is_rank_test(self._script, returned[0])


def _calls_by_function(script: Script, modules: ProjectModules) -> dict[FunctionNode, dict[str, ast.Call]]:
    """The calls that a function makes for sure on all ranks, by dotted name, as far as they may be of the project."""
    found: dict[FunctionNode, dict[str, ast.Call]] = {}
    for call in script.all(ast.Call):
        name, function = script.name(call.func), script.function_of(call)
        known = found.setdefault(function, {}) if function is not None else {}
        if name in known or len(known) >= MOST_CALLS or not may_be_of_project(modules, script.location, name):
            continue
        if rank_condition(script, call) is None and is_certain(script, call):
            known[name] = call
    return found
