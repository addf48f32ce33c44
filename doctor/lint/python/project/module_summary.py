"""Summarizes a module for the other files of the project that import it."""

from __future__ import annotations

import ast
from collections.abc import Mapping

from doctor.lint.python.collectives import CollectiveCalls, collectives_of
from doctor.lint.python.cuda import binds_device, is_nccl, joins
from doctor.lint.python.project.imported_functions import FunctionSummary, ModuleSummary
from doctor.lint.python.rank_branches import is_rank_test, rank_condition
from doctor.lint.python.reachable_functions import is_certain
from doctor.lint.python.script import FunctionNode, Script, step_at
from doctor.lint.python.wrapped_models import gathering_parameters, parameter_names

MOST_CALLS = 40
"""Calls of one function that are followed into other modules."""
_LIBRARIES = ("torch.", "numpy.", "os.", "sys.", "math.", "time.", "json.", "logging.", "transformers.", "accelerate.")


def summary_of(script: Script) -> ModuleSummary:
    """The summary of a script, which follows no imports itself."""
    collectives = collectives_of(script)
    gathering = gathering_parameters(script)
    calls = _calls_by_function(script)
    functions = {
        name: _function_summary(script, collectives, function, gathering.get(function, {}), calls.get(function, {}))
        for name, function in _functions(script).items()
    }
    bound = script.bindings.of_the_module.names.items()
    imports = {name: found[0] for name, found in bound if len(found) == 1 and isinstance(found[0], str)}
    return ModuleSummary(script.location, functions, imports, binds_device(script))


def _functions(script: Script) -> dict[str, FunctionNode]:
    methods = {f"{owner}().{name}": function for (owner, name), function in script.bindings.methods.items()}
    return {**script.bindings.functions, **methods}


def _function_summary(
    script: Script,
    collectives: CollectiveCalls,
    function: FunctionNode,
    gathering: Mapping[str, str],
    calls: Mapping[str, ast.Call],
) -> FunctionSummary:
    run = collectives.run_by(function)
    returned = [one.value for one in script.inside(function, ast.Return)]
    starts = [call for call in joins(script) if script.function_of(call) is function and is_nccl(script, call)]
    return FunctionSummary(
        name=function.name,
        line=function.lineno,
        parameters=parameter_names(function),
        word=run.word if run is not None else "",
        certain=run is None or run.certain,
        steps=run.steps if run is not None else (),
        reached=collectives.reached_words.get(function, frozenset()),
        gathering=gathering,
        calls=tuple((name, step_at(script, call)) for name, call in calls.items()),
        tests_rank=len(returned) == 1 and returned[0] is not None and is_rank_test(script, returned[0]),
        starts_nccl=bool(starts),
    )


def _calls_by_function(script: Script) -> dict[FunctionNode, dict[str, ast.Call]]:
    """The calls that a function makes for sure on all ranks, by dotted name, as far as they may be of the project."""
    found: dict[FunctionNode, dict[str, ast.Call]] = {}
    for call in script.all(ast.Call):
        name, function = script.name(call.func), script.function_of(call)
        known = found.setdefault(function, {}) if function is not None else {}
        if not name or name in known or len(known) >= MOST_CALLS or name.startswith(_LIBRARIES):
            continue
        if rank_condition(script, call) is None and is_certain(script, call):
            known[name] = call
    return found
