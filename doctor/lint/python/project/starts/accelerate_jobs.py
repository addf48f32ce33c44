"""How Accelerate runs a program: by its code, and by the configurations and commands of its project."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import PurePath

from doctor.lint.python.project.settings.options import starts_in
from doctor.lint.python.script import ProjectModules, Script, last_name, per_script
from doctor.lint.python.training import ACCELERATOR, calls_of

_PLUGINS = frozenset({"deepspeed_plugin", "fsdp_plugin", "megatron_lm_plugin"})
"""Attributes of ``accelerator.state`` that are ``None`` in other jobs."""
_ASKS = re.compile(r"plugin|distributed_type|DistributedType|deepspeed|fsdp", re.IGNORECASE)
_TYPES = re.compile(r"distributed_type == DistributedType\.(?:DEEPSPEED|FSDP|MEGATRON_LM)\b")
_VARIABLES = frozenset({"ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_MEGATRON_LM"})
"""accelerate/accelerator.py: what ``accelerate launch`` sets to ``true``."""
_TYPE = re.compile(r"^distributed_type:[ \t]*[\"']?(\w+)", re.MULTILINE)
_SHARDING = frozenset({"DEEPSPEED", "FSDP", "MEGATRON_LM", "TP"})
"""Kinds of jobs in which ``prepare`` wraps no model in DistributedDataParallel; TP is for tensor parallelism."""
_LAUNCH = re.compile(r"\baccelerate(?:\.commands\.launch|-launch|[ \t]+launch)\b")
_SAYS = re.compile(r"--config[_-]file\b|--use[_-](?:deepspeed|fsdp|megatron[_-]lm)\b")
_OTHERS = re.compile(r"\b(?:torchrun|deepspeed|mpirun|python[\d.]*)\b")
_DEPTH = 3


@per_script
def shards_always(script: Script) -> bool:
    """Whether an Accelerator wraps models with an engine of DeepSpeed, FSDP or Megatron in each job, and so never with
    DistributedDataParallel: the code needs such an engine, or the project's configurations and commands ask for one."""
    if next(script.calls(ACCELERATOR), None) is None:
        return False
    if _passes_plugin(script) or any(_is_always_read(script, one) for one in _needs_engine(script)):
        return True
    if any(one.is_certain and one.name in _VARIABLES and one.value.lower() == "true" for one in script.settings):
        return True
    return script.modules is not None and _is_asked_for(script, script.modules)


def _passes_plugin(script: Script) -> bool:
    """``Accelerator(deepspeed_plugin=DeepSpeedPlugin(...))``: what is made, and not an option."""
    for call in script.calls(ACCELERATOR):
        given = [script.argument(call, name) for name in _PLUGINS]
        made = [value for one in given if one is not None for value in script.values_of(one)]
        if made and all(isinstance(one, ast.Call) for one in made):
            return True
    return False


def _needs_engine(script: Script) -> Iterator[ast.AST]:
    """Reads of what only such a job has (``accelerator.state.deepspeed_plugin.zero_stage``), and assertions of it."""
    for one in script.all(ast.Attribute):
        if last_name(one.value) in (*_PLUGINS, "deepspeed_engine_wrapped"):
            yield one
    for asserted in script.all(ast.Assert):
        if _TYPES.search(ast.unparse(asserted.test)):
            yield asserted


def _is_always_read(script: Script, node: ast.AST, depth: int = _DEPTH) -> bool:
    """Whether no condition around a place, or around each call of its function, asks how the job is run."""
    inner = node
    for outer in script.around(node):
        test = outer.test if isinstance(outer, (ast.If, ast.IfExp)) else None
        if test is not None and inner is not test and _ASKS.search(ast.unparse(test)):
            return False
        if isinstance(outer, (ast.BoolOp, ast.Try)):
            return False
        inner = outer
    function = script.function_of(node)
    calls = list(calls_of(script, function)) if function is not None else []
    return not calls or (depth > 0 and any(_is_always_read(script, one, depth - 1) for one in calls))


def _is_asked_for(script: Script, modules: ProjectModules) -> bool:
    """Whether every configuration of Accelerate in the project is for such an engine, and each command of the project
    that starts the script names a configuration, or asks for an engine itself."""
    configurations = modules.mentioning("distributed_type", launches=True)
    kinds = {kind[1].upper() for _, text in configurations for kind in _TYPE.finditer(text)}
    name = PurePath(script.path).name
    texts = [text for _, text in modules.mentioning(name, launches=True)]
    texts += modules.pages(script.location) if script.location else ()
    starts = [line for line in starts_in(name, texts) if _LAUNCH.search(line) or _OTHERS.search(line)]
    asked = [line for line in starts if _LAUNCH.search(line) and _SAYS.search(line)]
    if not asked or len(asked) < len(starts):
        return False
    return kinds <= _SHARDING and (bool(kinds) or all(re.search(r"--use[_-]", line) for line in asked))
