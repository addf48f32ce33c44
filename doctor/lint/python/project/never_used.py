"""Scripts that several ranks cannot run, or never run: code that fails, and notebooks in which nothing starts ranks."""

from __future__ import annotations

import ast
import builtins
import re

from doctor.lint.engine.imported_names import MODULE_NAMES, bound_names
from doctor.lint.python.project.failing_start import names_by_star
from doctor.lint.python.project.starts.launch_counts import lines_naming
from doctor.lint.python.script import FunctionNode, Script, per_script
from doctor.lint.python.training import TRAINER

_OF_DATABRICKS = r"^# (?:COMMAND -{5,}|Databricks notebook source)"
_CELL = re.compile(rf"^# In\s?\[[\d\s*]*\]:|{_OF_DATABRICKS}", re.MULTILINE)
"""``jupyter nbconvert --to script`` writes ``# In[3]:`` above each cell; Databricks separates them by a line."""
_HAS_OTHER_NAMES = re.compile(_OF_DATABRICKS, re.MULTILINE)
"""Cells of Databricks may run other notebooks, which give them names; an exported script has what it shows."""
_STARTS_RANKS_OF_NOTEBOOK = re.compile(
    r"notebook_launcher|debug_launcher|\bspawn\b|start_processes|TorchDistributor|DeepspeedTorchDistributor|"
    r"HorovodRunner|horovod\.run|HorovodRayExecutor|RayExecutor|TorchTrainer|TorchConfig|ScalingConfig|SparkBackend|"
    r"torchrun|accelerate launch|torch\.distributed\.(?:launch|run)|\bdeepspeed\s|\bmpirun\b|\bsrun\b|horovodrun|"
    r"subprocess|ipyparallel|%px|\bProcess\(|Pool\(|PyTorch\(|PyTorchConfiguration|xmp\.|launch\("
)
_STARTED = re.compile(r"torchrun|launch|\bsrun\b|mpirun|mpiexec|horovodrun|deepspeed|nproc|LOCAL_RANK|distributed")
_UNKNOWN_NAMES = ("exec(", "globals()", "builtins", "get_ipython", "__import__(")
"""Ways to define names that the text does not show."""
_NOT_ALWAYS = (ast.BoolOp, ast.IfExp, ast.Lambda, ast.GeneratorExp, ast.ListComp, ast.SetComp, ast.DictComp)
_SIMPLE = (ast.Assign, ast.AugAssign, ast.Expr, ast.Return)


def cannot_run(script: Script, node: ast.AST) -> bool:
    """Whether a place is in code that always fails: a module whose imports from the project fail, or a function that
    uses a name which nothing defines."""
    if script.modules is None or script.modules.is_one_file:
        return False
    if script.location and script.modules.fails_to_import(script.location):
        return True
    function = script.function_of(node)
    return function is not None and _uses_undefined(script, function)


def _uses_undefined(script: Script, function: FunctionNode) -> bool:
    """Whether a statement of a function's own block reads a name that the file binds nowhere."""
    for statement in function.body:
        if not isinstance(statement, _SIMPLE):
            continue
        names = (one for one in script.inside(statement, ast.Name) if is_defined_nowhere(script, one.id))
        if any(not any(isinstance(one, _NOT_ALWAYS) for one in _until(script, name, statement)) for name in names):
            return True
    return False


def is_defined_nowhere(script: Script, name: str) -> bool:
    """Whether nothing in a script, nor in a module that gives it all its names, binds a name."""
    known = _known_names(script)
    return known is not None and name not in known


def _until(script: Script, node: ast.AST, last: ast.AST) -> list[ast.AST]:
    found: list[ast.AST] = []
    for one in script.around(node):
        if one is last:
            break
        found.append(one)
    return found


@per_script
def _known_names(script: Script) -> frozenset[str] | None:
    """All names that a script binds anywhere, or gets; ``None`` if they are unknown, as in a notebook."""
    by_star = names_by_star(script)
    if by_star is None or any(word in script.text for word in _UNKNOWN_NAMES):
        return None
    if script.path.endswith(".ipynb") or _HAS_OTHER_NAMES.search(script.text):
        return None
    return by_star | bound_names(script.tree) | MODULE_NAMES | frozenset(dir(builtins)) | {"__builtins__", "__class__"}


def is_notebook(script: Script) -> bool:
    """Whether a file is a notebook, or one that was exported as a script."""
    return script.path.endswith(".ipynb") or _CELL.search(script.text) is not None


_SPAWNS = ("torch.multiprocessing.spawn", "torch.multiprocessing.start_processes")
_FORKS = re.compile(r"[\"']fork(?:server)?[\"']|notebook_launcher|elastic_launch|LaunchConfig|%%writefile|\bPopen\(")


@per_script
def fails_to_spawn(script: Script) -> bool:
    """Whether all ranks of a notebook are processes that it spawns with a function of its own cells: a new interpreter
    has no such function in its ``__main__``, and each rank ends with an AttributeError before it runs (docs of Python,
    multiprocessing: "functionality within this package requires that the __main__ module be importable")."""
    if not script.path.endswith(".ipynb") or _FORKS.search(script.text):
        return False
    spawned = list(script.calls(*_SPAWNS))
    given = [script.argument(one, "fn", 0) for one in spawned]
    return bool(given) and all(one is not None and script.definition(one) is not None for one in given)


@per_script
def is_notebook_of_one_process(script: Script) -> bool:
    """Whether a file is a notebook in which nothing starts ranks, and which the project does not start with a launcher
    either: its kernel is the only process. A Trainer may start ranks itself."""
    if script.modules is None or not is_notebook(script) or _STARTS_RANKS_OF_NOTEBOOK.search(script.text):
        return False
    if next(script.calls(TRAINER), None) is not None:
        return False
    return not any(map(_STARTED.search, lines_naming(script, script.modules)))
