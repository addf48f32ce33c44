"""Programs that work in one process only: they fail where several ranks wrap their model, without a process group or
with a text as the GPU, or they use what the model has and its wrapper of DDP does not."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import PurePath
from typing import NamedTuple

from doctor.lint.python.project.imported_functions import called_function
from doctor.lint.python.project.starts.launch_counts import STARTS_RANKS
from doctor.lint.python.project.unreached import is_program, may_import
from doctor.lint.python.rank_branches import statements_above
from doctor.lint.python.script import FunctionNode, Script, last_name, per_script
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
_DEPTH = 3
"""Functions in a row that a model is handed to."""
_CONDITIONAL = (ast.If, ast.IfExp, ast.Try, ast.BoolOp, ast.Lambda)
_MAY_JOIN = re.compile(
    r"process_?group|init_?dist|dist\w{0,40}init|init_?method|device_?mesh|(?:set_?up|start|init)\w{0,40}(?:dist|ddp|parallel)|"
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
def uses_past_wrapper(script: Script) -> bool:
    """Whether a program always reads an attribute of a model of its project right from the wrapper: ``model =
    accelerator.prepare(model)``, ``model.scheduler``, also in a function that is given it. With several ranks, it fails
    there."""
    modules = script.modules
    if modules is None or any(
        map(_FORWARDS.search, (script.text, *(t for _, t in modules.mentioning("distributed_type"))))
    ):
        return False
    return any(
        _is_own(script, model, attribute)
        for wrap, model in _wrapped(script)
        for attribute in _read(_Place(script, script.function_of(wrap), wrap.end_lineno or wrap.lineno, wrap), model.id)
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


class _Place(NamedTuple):
    """All that runs below a line of a function, or of the module; ``after``: the statement there."""

    script: Script
    function: FunctionNode | None
    line: int
    after: ast.stmt


def _read(place: _Place, name: str, depth: int = _DEPTH) -> Iterator[str]:
    """The attributes of a variable that are always read below a place, also in functions that are given it."""
    for one in place.script.all(ast.Name):
        if one.id == name and isinstance(one.ctx, ast.Load) and _always_follows(place, one):
            parent = place.script.parent(one)
            if isinstance(parent, ast.Attribute):
                yield parent.attr
            elif depth and (handed := _handed_to(place.script, one)) is not None:
                yield from _read(*handed, depth - 1)


def _always_follows(place: _Place, use: ast.Name) -> bool:
    """Whether a use comes below a place, under no condition, before another assignment or a ``return``."""
    script, function = place.script, place.function
    if script.function_of(use) is not function or use.lineno <= place.line:
        return False
    for outer in script.around(use):
        if outer is function:
            break
        if isinstance(outer, _CONDITIONAL) and ast.unparse(getattr(outer, "test", outer)) != "__name__ == '__main__'":
            return False
    stores: list[ast.expr | ast.stmt] = [
        one for one in script.all(ast.Name) if one.id == use.id and isinstance(one.ctx, ast.Store)
    ]
    return not any(
        place.line < one.lineno <= use.lineno
        and script.function_of(one) is function
        and not _is_opposite(script, one, place.after)
        for one in (*stores, *script.all(ast.Return))
    )


def _is_opposite(script: Script, node: ast.AST, other: ast.stmt) -> bool:
    """Whether a place is in the ``else`` of a branch that another one is in."""
    around = {node, *script.around(node)}
    return any(is_in_body and not around.isdisjoint(one.orelse) for one, is_in_body in script.branches(other))


def _handed_to(script: Script, given: ast.Name) -> tuple[_Place, str] | None:
    """The function of the project that is called with a variable, and its parameter."""
    word = script.parent(given)
    call = script.parent(word) if isinstance(word, ast.keyword) else word
    if not isinstance(call, ast.Call) or given is call.func:
        return None
    found = called_function(script, call)
    if found is None:
        return None
    other, function = found
    names = [one.arg for one in (*function.args.posonlyargs, *function.args.args)]
    name = word.arg if isinstance(word, ast.keyword) else "".join(names[call.args.index(given) :][:1])
    return (_Place(other, function, function.lineno, function), name) if name else None


def _is_own(script: Script, model: ast.Name, attribute: str) -> bool:
    """Whether a model is made of a class of the project, in whose file an attribute is defined."""
    if attribute in _OF_WRAPPER or attribute.startswith(("register_", "_")) or script.modules is None:
        return False
    made = [last_name(_unplaced(one).func) for one in script.values_of(model) if isinstance(one, ast.Call)]
    defined = re.compile(rf"\bself\.{re.escape(attribute)}\b(?:\s*:[^=\n]+)?\s*=(?!=)|\bdef {re.escape(attribute)}\(")
    return any(
        defined.search(text)
        for name in made
        if name[:1].isupper()
        for _, text in script.modules.mentioning(f"class {name}(")
    )


def _unplaced(call: ast.Call) -> ast.Call:
    """The call that makes a model: ``Net()`` in ``Net().cuda()``."""
    while isinstance(call.func, ast.Attribute) and call.func.attr in _RETURNS_ITSELF:
        inner = call.func.value
        if not isinstance(inner, ast.Call):
            break
        call = inner
    return call


_RETURNS_ITSELF = frozenset({"cuda", "to", "cpu", "train", "eval", "half", "float", "double", "bfloat16", "type"})
"""Methods of ``torch.nn.Module`` that return the module."""


@per_script
def fails_to_wrap(script: Script) -> bool:
    """Whether DistributedDataParallel, wherever a program calls it, or a line above it, fails in a job of several
    ranks, or Accelerate refuses the model."""
    wraps = list(script.calls(DDP))
    if not wraps and _is_spread(script):
        return True
    return bool(wraps) and (_joins_nowhere(script) or all(_chooses_by_text(script, one) for one in wraps))


def _is_spread(script: Script) -> bool:
    """Whether all models that a program loads are spread over the GPUs of the host, and a Trainer of Transformers
    trains, whose Accelerator refuses such a model in every job of several ranks (accelerate/accelerator.py:
    ``prepare_model``). A rank that sees one GPU has nothing to spread over."""
    if "device_map" not in script.text or _LEAVES_OPEN.search(script.text):
        return False
    loads = list(script.method_calls("from_pretrained"))
    mapped = [script.argument(one, "device_map") for one in loads if script.is_given(one, "device_map")]
    models = [one for one in loads if _OF_MODELS.search(script.text_of(one.func))]
    trains = next(script.calls("transformers.Trainer", "trl.SFTTrainer"), None)
    return bool(mapped) and len(models) == len(mapped) and trains is not None and all(map(_is_auto, mapped))


_OF_MODELS = re.compile(r"Model", re.IGNORECASE)
_LEAVES_OPEN = re.compile(r"ACCELERATE_BYPASS_DEVICE_MAP|CUDA_VISIBLE_DEVICES[^\n]{0,100}RANK|set_device\(")


def _is_auto(device_map: ast.expr | None) -> bool:
    """``"auto"``, also with several GPUs alone: ``"auto" if torch.cuda.device_count() > 1 else None``."""
    if isinstance(device_map, ast.IfExp) and "device_count" in ast.unparse(device_map.test):
        device_map = device_map.body
    return isinstance(device_map, ast.Constant) and device_map.value in ("auto", "balanced")


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
    above = set(statements_above(script, wrap))
    return any(
        script.statement_of(call) in above and _is_text(script, script.argument(call, "device", 0))
        for call in script.calls("torch.cuda.set_device")
    )


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


def uses_no_parameters(script: Script, model: ast.expr, method: str) -> bool:
    """Whether a method of a wrapped model reads nothing of the model but plain settings that ``__init__`` was given: it
    computes with its arguments alone. The class is in the file or in a module of the project."""
    values = script.values_of(model) if isinstance(model, ast.Name) else ()
    made = {script.name(one.func) for one in values if isinstance(one, ast.Call)} - {DDP}
    classes = [one for name in made if name.rpartition(".")[2][:1].isupper() for one in _classes(script, name)]
    return bool(classes) and all(_reads_settings_only(one, method) for one in classes)


_REDUCES = re.compile(
    r"all_?reduce|average_?grad|(?:sync|reduce)\w{0,20}_?grad|\.grad\b[^\n]{0,80}(?:reduce|average)", re.IGNORECASE
)
"""Words of modules that reduce gradients themselves."""


def trains_in_method(script: Script, method: str) -> bool:
    """Whether the only method of that name in the project has a step of training in it: ``loss.backward()`` and
    ``step()`` for what it computes with its own layers. Its module reduces no gradients itself."""
    kept: dict[str, bool] = script.__dict__.setdefault("_trains_in_method", {})
    if method not in kept:
        kept[method] = _is_trained_in(script, method)
    return kept[method]


def _is_trained_in(script: Script, method: str) -> bool:
    defined = f"def {method}("
    texts = [script.text] if defined in script.text else []
    if script.modules is not None:
        texts += [text for shown, text in script.modules.mentioning(defined) if shown != script.path]
    if len(texts) != 1 or ".backward(" not in texts[0]:
        return False
    owners = (one for one in ast.walk(_parsed(texts[0])) if isinstance(one, ast.ClassDef))
    held = (one for owner in owners for one in owner.body)
    found = [one for one in held if isinstance(one, ast.FunctionDef) and one.name == method]
    return len(found) == 1 and not _REDUCES.search(texts[0]) and _has_step(found[0])


def _has_step(function: ast.FunctionDef) -> bool:
    called = [one.func for one in ast.walk(function) if isinstance(one, ast.Call)]
    methods = [one for one in called if isinstance(one, ast.Attribute)]
    owners = [one.value for one in methods]
    uses_own = any(isinstance(one, ast.Name) and one.id == "self" for one in owners)
    return uses_own and {"backward", "step"} <= {one.attr for one in methods}


def _classes(script: Script, name: str) -> Iterator[ast.ClassDef]:
    """The classes of the project that a dotted name may be, by the name of their module."""
    module, _, own = name.rpartition(".")
    texts = script.modules.mentioning(f"class {own}(") if module and script.modules is not None else ()
    stem = module.rpartition(".")[2]
    found = [script.tree] if not module else [_parsed(text) for path, text in texts if PurePath(path).stem == stem]
    yield from (one for tree in found for one in tree.body if isinstance(one, ast.ClassDef) and one.name == own)


def _parsed(text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return ast.Module([], [])


def _reads_settings_only(owner: ast.ClassDef, method: str) -> bool:
    methods = {one.name: one for one in owner.body if isinstance(one, ast.FunctionDef)}
    if method not in methods or "__init__" not in methods:
        return False
    stored: dict[str, list[ast.expr]] = defaultdict(list)
    for one in (part for part in ast.walk(owner) if isinstance(part, ast.Assign)):
        for target in one.targets:
            stored[ast.unparse(target)].append(one.value)
    whole = [one for one in ast.walk(methods[method]) if isinstance(one, ast.Name) and one.id == "self"]
    read = [one for one in ast.walk(methods[method]) if isinstance(one, ast.Attribute) and one.value in whole]
    return len(read) == len(whole) and all(
        stored[name] and all(map(_is_setting, stored[name])) for name in map(ast.unparse, read)
    )


def _is_setting(value: ast.expr) -> bool:
    """``0.1``, ``args.weights[0]``, ``float(decay)``: no layer or parameter of the model, which a call makes."""
    if isinstance(value, ast.Call):
        return isinstance(value.func, ast.Name) and value.func.id in ("float", "int", "bool", "str", "len")
    if isinstance(value, ast.Subscript):
        return _is_setting(value.value)
    if isinstance(value, ast.Attribute):
        return isinstance(value.value, ast.Name) and value.value.id not in ("self", "nn", "torch")
    return isinstance(value, ast.Constant)
