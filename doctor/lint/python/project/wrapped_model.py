"""Programs that work in one process only: they use what a model has and its wrapper of DDP has not."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from doctor.lint.python.script import Script, last_name, per_script
from doctor.lint.python.training import ACCELERATOR, DDP

_OF_WRAPPER = frozenset(
    {
        *("add_module", "apply", "bfloat16", "buffers", "children", "compile", "cpu", "cuda", "device", "device_ids"),
        *("double", "eval", "float", "forward", "half", "join", "load_state_dict", "module", "modules", "no_sync"),
        *("named_buffers", "named_children", "named_modules", "named_parameters", "parameters", "requires_grad_"),
        *("get_buffer", "get_parameter", "get_submodule", "share_memory", "state_dict", "to", "to_empty", "train"),
        *("training", "type", "xpu", "zero_grad", "process_group", "static_graph", "dim", "output_device"),
    }
)
"""Attributes of ``torch.nn.Module`` and ``DistributedDataParallel``; those that begin with ``register_`` are too."""
_FORWARDS = re.compile(r"deepspeed|fsdp|fully_sharded", re.IGNORECASE)
"""Engines whose wrappers have the attributes of the model."""
_CONDITIONAL = (ast.If, ast.IfExp, ast.Try, ast.BoolOp, ast.Lambda)


@per_script
def uses_past_wrapper(script: Script) -> bool:
    """Whether a program always reads an attribute of a model of its project right from the wrapper: ``model =
    accelerator.prepare(model)``, ``model.scheduler``. With several ranks, it fails there."""
    modules = script.modules
    if modules is None or any(
        map(_FORWARDS.search, (script.text, *(t for _, t in modules.mentioning("distributed_type"))))
    ):
        return False
    return any(
        _is_own(script, model, one.attr)
        for wrap, model in _wrapped(script)
        for one in script.all(ast.Attribute)
        if isinstance(one.value, ast.Name) and one.value.id == model.id and _always_follows(script, one, wrap, model.id)
    )


def _wrapped(script: Script) -> Iterator[tuple[ast.Assign, ast.Name]]:
    """The assignments of a wrapped model to its own name, and the model."""
    is_prepared = next(script.calls(ACCELERATOR), None) is not None
    for one in script.all(ast.Assign):
        call = one.value
        if not isinstance(call, ast.Call) or len(one.targets) != 1:
            continue
        if script.name(call.func) != DDP and not (is_prepared and last_name(call.func) == "prepare"):
            continue
        target = one.targets[0]
        targets = target.elts if isinstance(target, ast.Tuple) else [target]
        for name, given in zip(targets, call.args, strict=False):
            if isinstance(name, ast.Name) and isinstance(given, ast.Name) and name.id == given.id:
                yield one, given


def _always_follows(script: Script, use: ast.Attribute, wrap: ast.Assign, name: str) -> bool:
    """Whether a use comes after the wrapping in the same function, under no condition, before another assignment."""
    function = script.function_of(wrap)
    if script.function_of(use) is not function or use.lineno <= (wrap.end_lineno or wrap.lineno):
        return False
    for outer in script.around(use):
        if outer is function:
            break
        if isinstance(outer, _CONDITIONAL) and ast.unparse(getattr(outer, "test", outer)) != "__name__ == '__main__'":
            return False
    stores = (one for one in script.all(ast.Name) if one.id == name and isinstance(one.ctx, ast.Store))
    return not any(wrap.lineno < one.lineno <= use.lineno and script.function_of(one) is function for one in stores)


def _is_own(script: Script, model: ast.Name, attribute: str) -> bool:
    """Whether a model is made of a class of the project, in whose file an attribute is defined."""
    if attribute in _OF_WRAPPER or attribute.startswith(("register_", "_")) or script.modules is None:
        return False
    made = [last_name(one.func) for one in script.values_of(model) if isinstance(one, ast.Call)]
    defined = re.compile(rf"\bself\.{re.escape(attribute)}\b(?:\s*:[^=\n]+)?\s*=(?!=)|\bdef {re.escape(attribute)}\(")
    return any(
        defined.search(text)
        for name in made
        if name[:1].isupper()
        for _, text in script.modules.mentioning(f"class {name}(")
    )
