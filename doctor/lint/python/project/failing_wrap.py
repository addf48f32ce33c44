"""Programs that fail where several ranks wrap their model: without a process group, or with a text as the GPU."""

from __future__ import annotations

import ast
import re
from pathlib import PurePath

from doctor.lint.python.project.launch_counts import STARTS_RANKS
from doctor.lint.python.project.unreached import is_program, may_import
from doctor.lint.python.rank_branches import BLOCKS, statements_before
from doctor.lint.python.script import Script, per_script
from doctor.lint.python.training import DDP

_MAY_JOIN = re.compile(
    r"process_?group|init_?dist|dist\w*_?init|init_?method|device_?mesh|(?:set_?up|start|init)\w*(?:dist|ddp|parallel)|"
    r"(?:ddp|dist(?:ributed)?|parallel)_?(?:set_?up|start)|launch|spawn|accelerat|deepspeed|lightning|fabric|ignite|"
    r"idist|horovod|hvd|\bray\b|\bxla|xmp|composer|megatron|mmcv|mmengine|detectron|fairscale|fairseq|colossal|bagua|"
    r"smdistributed|torchrec|transformers|oneccl|submitit|exec\(|import \*",
    re.IGNORECASE,
)
"""Words of what may create a process group, also in a library."""
_READS = frozenset({"os.getenv", "os.environ.get"})
_NUMBER_OF_PROCESS = re.compile(r"RANK|LOCALID")
"""Variables that launchers set."""


@per_script
def fails_to_wrap(script: Script) -> bool:
    """Whether DistributedDataParallel, wherever a program calls it, or a line above it, fails in a job of several
    ranks."""
    wraps = list(script.calls(DDP))
    return bool(wraps) and (_joins_nowhere(script) or all(_chooses_by_text(script, one) for one in wraps))


def _joins_nowhere(script: Script) -> bool:
    """Whether neither a program, nor a module of its project that it imports, has a word of a process group, without
    which the wrapper fails (torch/distributed/distributed_c10d.py: ``_get_default_group``)."""
    modules = script.modules
    if modules is None or modules.is_one_file or not script.location or not is_program(script):
        return False
    texts = list(modules.texts_around(script.location))
    if not texts or any(map(_MAY_JOIN.search, (script.text, *texts))):
        return False
    place = PurePath(script.location)
    others = (text for shown, text in modules.mentioning(place.stem) if shown != script.path)
    return not any(may_import(place, text) for text in others)


def _chooses_by_text(script: Script, wrap: ast.Call) -> bool:
    """Whether a process that comes to a call gives ``torch.cuda.set_device`` a variable of the environment before,
    which is a text: ``Invalid device string: '0'``."""
    if STARTS_RANKS.search(script.text):
        return False  # no launcher has set the variable
    above = set(_statements_above(script, wrap))
    return any(
        script.statement_of(call) in above and _is_text(script, script.argument(call, "device", 0))
        for call in script.calls("torch.cuda.set_device")
    )


def _statements_above(script: Script, node: ast.AST) -> list[ast.stmt]:
    """The statements that have run in a function before a place."""
    found: list[ast.stmt] = []
    inner = node
    for outer in script.around(node):
        found += statements_before(outer, inner, BLOCKS)
        if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef)):
            break
        inner = outer
    return found


def _is_text(script: Script, device: ast.expr | None) -> bool:
    values = script.values_of(device) if isinstance(device, ast.Name) else [device]
    return bool(values) and all(one is not None and _is_of_environment(script, one) for one in values)


def _is_of_environment(script: Script, value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        named = value.args[0] if value.args and script.name(value.func) in _READS else None
    else:
        named = value.slice if isinstance(value, ast.Subscript) and script.name(value.value) == "os.environ" else None
    known = script.value(named) if named is not None else None
    return isinstance(known, str) and _NUMBER_OF_PROCESS.search(known) is not None
