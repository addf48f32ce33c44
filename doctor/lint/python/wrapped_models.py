"""Which wrapper a model has at a place in a script (DDP, FSDP, DeepSpeed), and calls that need it on all ranks."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from doctor.lint.python.project.imported_functions import imported_function
from doctor.lint.python.rank_branches import rank_condition
from doctor.lint.python.reachable_functions import is_certain
from doctor.lint.python.script import UNKNOWN, FunctionNode, Script, last_name, per_script
from doctor.lint.python.training import DDP, FSDP
from doctor.lint.python.value_flow import handed_in

_KINDS = {DDP: "DDP", FSDP[0]: "FSDP", "deepspeed.initialize": "DeepSpeed"}
_SHARDS = "torch.distributed.fsdp.fully_shard"
_DEPTH = 3
FORWARD_OF_DDP = "forward of DDP"
_EXCHANGED_BY = {
    "forward": {"DDP": FORWARD_OF_DDP, "FSDP": "forward of FSDP", "fully_shard": "forward of FSDP"},
    "state_dict": {"FSDP": "state_dict of FSDP"},
    "clip_grad_norm_": {"FSDP": "clip_grad_norm_ of FSDP"},
}
"""The collectives of a method by the wrapper of its model. The ``state_dict`` of a model that ``fully_shard`` changed
holds the shards of this rank, without communication (torch/distributed/fsdp/_fully_shard/_fully_shard.py)."""
_TRAINERS = re.compile(r"^(?:transformers|trl)\.\w*Trainer\(\)\.save_model$")
_NONE: Mapping[str, str] = {}
_OFF = ("", False, None, ())


class HandedModel(NamedTuple):
    """A call that gives a wrapped model to a function of the file which runs the collective ``word`` of it.
    ``parameter``: of the calling function, if the model is one of its parameters."""

    call: ast.Call
    word: str
    function: str
    parameter: str


@per_script
def wraps_models(script: Script) -> bool:
    """Whether anything in the file wraps a model."""
    return next(script.calls(*_KINDS, _SHARDS), None) is not None


def wrapper_of(script: Script, node: ast.expr, depth: int = _DEPTH) -> str:
    """``DDP``, ``FSDP``, ``fully_shard``, ``DeepSpeed``, or empty: what the model that a name holds at this place is
    wrapped in; of a parameter, what any caller in the file gives."""
    if not wraps_models(script) or not isinstance(node, (ast.Name, ast.Attribute)):
        return ""
    if _is_sharded_before(script, node):
        return "fully_shard"
    made = {_KINDS.get(script.name(one.func), "") for one in _calls_behind(script, node)} - {""}
    if made:
        return min(made)
    if depth and parameter_of(script, node):
        handed = (wrapper_of(script, given, depth - 1) for given in handed_in(script, node))
        return next(filter(None, handed), "")
    return ""


def parameter_of(script: Script, node: ast.expr) -> str:
    """The name, if it is a parameter of the function around it that is not assigned anew; else empty."""
    scope = script.scope_of(node, node.id) if isinstance(node, ast.Name) else None
    bound = scope.names[node.id] if scope is not None and isinstance(node, ast.Name) else []
    is_parameter = len(bound) == 1 and isinstance(bound[0], ast.arg)
    return node.id if is_parameter and isinstance(node, ast.Name) else ""


def _calls_behind(script: Script, node: ast.expr) -> Iterator[ast.Call]:
    """The calls whose results a name may hold: of a local variable, the one assigned last before the place."""
    values = [one.value if isinstance(one, ast.Starred) else one for one in script.values_of(node)]
    scope = script.scope_of(node, node.id) if isinstance(node, ast.Name) else None
    if scope is not None and scope.node is (script.function_of(node) or script.tree):
        values = [one for one in values if one.lineno <= node.lineno][-1:]
    elif scope is not None and len(values) > 2:
        values = []  # another function assigns it several times: which one holds here is unknown
    yield from (one for one in values if isinstance(one, ast.Call))


def _is_sharded_before(script: Script, node: ast.expr) -> bool:
    """``fully_shard(model)`` above it, in its function or in the module."""
    text, function = ast.unparse(node), script.function_of(node)
    for call in script.calls(_SHARDS):
        if call.args and ast.unparse(call.args[0]) == text and script.function_of(call) in (None, function):
            if call.lineno < node.lineno or script.function_of(call) is not function:
                return True
    return False


def forwards_in(script: Script) -> dict[ast.Call, str]:
    """The forward passes of wrapped models: ``model(x)``, ``self.model(x)``."""
    called = (call for call in script.all(ast.Call) if _is_model_called(script, call))
    words = {call: _EXCHANGED_BY["forward"].get(wrapper_of(script, call.func), "") for call in called}
    return {call: word for call, word in words.items() if word and not _is_apart(script, call.func)}


def _is_model_called(script: Script, call: ast.Call) -> bool:
    made = call.func
    if isinstance(made, ast.Attribute):
        return isinstance(made.value, ast.Name) and made.value.id == "self"
    return isinstance(made, ast.Name) and script.definition(made) is None


def _is_apart(script: Script, model: ast.expr) -> bool:
    """Whether the forward pass does not concern all ranks: ``DDP(model, broadcast_buffers=False)``, or in a group."""
    made = [call for call in _calls_behind(script, model) if script.name(call.func) in _KINDS]
    return any(
        script.value(script.argument(call, "broadcast_buffers")) is False
        or script.argument(call, "process_group") is not None
        or (script.name(call.func) == DDP and bool(call.args) and _has_no_buffers(script, call.args[0]))
        for call in made
    )


_WITHOUT_BUFFERS = re.compile(
    r"^torch\.nn\.(?:\w+\.)*(?:(?:Lazy)?Linear|Bilinear|Conv(?:Transpose)?\dd|(?:Alpha)?Dropout\d?d?|Embedding(?:Bag)?|"
    r"LayerNorm|RMSNorm|GroupNorm|(?:P|Leaky)?ReLU6?|[A-Z]?ELU|SiLU|Mish|Tanh|Sigmoid|Softplus|(?:Log)?Softmax|Flatten|"
    r"Unflatten|Identity|(?:Adaptive)?(?:Max|Avg)Pool\dd|Upsample|PixelShuffle|LSTM|GRU|RNN|LSTMCell|GRUCell|Sequential|"
    r"ModuleList|ModuleDict|Parameter|MultiheadAttention|Transformer\w*)$"
)
"""Layers of torch that register no buffers, if the layers that they are given have none."""
_SAME_MODEL = frozenset({"to", "cuda", "cpu", "train", "eval", "float", "half", "bfloat16", "double", "requires_grad_"})


def _has_no_buffers(script: Script, model: ast.expr, depth: int = 6) -> bool:
    """Whether the code shows that a model has no buffers, so that DDP broadcasts nothing in its forward pass
    (``DistributedDataParallel.will_sync_module_buffers``)."""
    if depth == 0:
        return False
    if isinstance(model, (ast.Name, ast.Attribute)):
        values = script.values_of(model)
        bound = [one for one in values if not _is_wrapping(script, one) and not _is_none(one) and one is not model]
        return bool(bound) and all(_has_no_buffers(script, one, depth - 1) for one in bound)
    if not isinstance(model, ast.Call):
        return False
    if isinstance(model.func, ast.Attribute) and model.func.attr in _SAME_MODEL:
        return _has_no_buffers(script, model.func.value, depth - 1)
    if _WITHOUT_BUFFERS.match(script.name(model.func)):
        parts = [one.value if isinstance(one, ast.Starred) else one for one in model.args]
        inner = [one for part in parts for one in (part.elts if isinstance(part, ast.List) else [part])]
        return all(_has_no_buffers(script, one, depth - 1) for one in inner if isinstance(one, ast.Call))
    owner = script.class_definition(model.func)
    if owner is not None:
        return _makes_no_buffers(script, owner, depth - 1)
    other = _script_of(script, model.func)
    owner = other.bindings.classes.get(last_name(model.func)) if other is not None else None
    return other is not None and owner is not None and _makes_no_buffers(other, owner, depth - 1)


def shows_buffers(script: Script) -> bool:
    """Whether a model that the file wraps in DDP surely has buffers: one of torchvision, a layer that keeps statistics,
    or one of a class of the project that registers buffers or has such layers."""
    return any(_has_buffers(script, call.args[0]) for call in script.calls(DDP) if call.args)


_WITH_BUFFERS = re.compile(r"^torchvision\.models\.|^torch\.nn\.(?:\w+\.)*(?:Sync)?BatchNorm")
_REGISTERS = re.compile(r"\bregister_buffer\(|BatchNorm\dd\(")


def _has_buffers(script: Script, model: ast.expr, depth: int = 6) -> bool:
    if depth == 0:
        return False
    if isinstance(model, (ast.Name, ast.Attribute)):
        bound = (*script.values_of(model), *handed_in(script, model))
        values = [one for one in bound if not _is_wrapping(script, one) and one is not model]
        return any(_has_buffers(script, one, depth - 1) for one in values)
    if not isinstance(model, ast.Call):
        return False
    if isinstance(model.func, ast.Attribute) and model.func.attr in _SAME_MODEL:
        return _has_buffers(script, model.func.value, depth - 1)
    name = script.name(model.func)
    if _WITH_BUFFERS.match(name) or name.endswith("convert_sync_batchnorm"):
        return True
    if _WITHOUT_BUFFERS.match(name):
        return any(_has_buffers(script, one, depth - 1) for one in model.args)
    other = script if script.class_definition(model.func) is not None else _script_of(script, model.func)
    owner = other.bindings.classes.get(last_name(model.func)) if other is not None else None
    if other is None or owner is None:
        return False
    calls = [one for one in ast.walk(owner) if isinstance(one, ast.Call)]
    parts = [one for one in calls if last_name(one.func) in other.bindings.classes]
    bases = (other.bindings.classes[one] for one in map(last_name, owner.bases) if one in other.bindings.classes)
    return any(_REGISTERS.search(ast.unparse(one)) for one in (owner, *bases)) or any(
        _has_buffers(other, one, depth - 1) for one in parts if one is not model
    )


def _is_none(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is None


def _script_of(script: Script, name: ast.expr) -> Script | None:
    """The module of the project that a name is imported from, if only one may be meant."""
    module, modules = script.name(name).rpartition(".")[0], script.modules
    shown = modules.named(script.path, module) if modules is not None and module and not module.startswith(".") else ()
    if modules is None or len(shown) != 1:
        return None
    key = ("module of a model", shown[0])
    if key not in modules.memo:
        try:
            modules.memo[key] = Script(shown[0], modules.text_at(shown[0]), modules=modules)
        except (SyntaxError, ValueError, RecursionError):
            modules.memo[key] = None
    found: Script | None = modules.memo[key]
    return found


def _makes_no_buffers(script: Script, owner: ast.ClassDef, depth: int) -> bool:
    """Whether ``__init__`` of a model calls nothing but layers without buffers and plain functions of Python."""
    start = script.bindings.methods.get((owner.name, "__init__"))
    bases = [script.name(one) for one in owner.bases]
    if start is None or bases != ["torch.nn.Module"] or "uffer(" in ast.unparse(owner):
        return False
    for call in script.inside(start, ast.Call):
        is_base = last_name(call.func) in ("super", "__init__", "append")  # what is appended is looked at itself
        is_plain = isinstance(call.func, ast.Name) and call.func.id in ("range", "len", "int", "float", "zip", "list")
        if not is_base and not is_plain and not _has_no_buffers(script, call, depth):
            return False
    return True


def _is_wrapping(script: Script, value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and script.name(value.func) in _KINDS


@per_script
def handed_models(script: Script) -> tuple[HandedModel, ...]:
    """Calls that give wrapped models to functions of the file, or of its project, whose parameters must be used by all
    ranks."""
    wanted = gathering_parameters(script) if wraps_models(script) else {}
    found = []
    for call in script.all(ast.Call) if wraps_models(script) else ():
        function = script.definition(call.func)
        if function is not None:
            called, names, methods = function.name, parameter_names(function), wanted.get(function, _NONE)
        elif _is_given_wrapped(script, call) and (imported := imported_function(script, call.func, whole=True)):
            called, names, methods = imported.function.name, imported.function.parameters, imported.function.gathering
        else:
            continue
        for name, method in methods.items():
            given = _given_for(script, call, names, name)
            word = _EXCHANGED_BY[method].get(wrapper_of(script, given), "") if given is not None else ""
            if word and given is not None and not _is_apart(script, given):
                found.append(HandedModel(call, word, called, parameter_of(script, given)))
    return tuple(found)


def _is_given_wrapped(script: Script, call: ast.Call) -> bool:
    return any(wrapper_of(script, one) for one in (*call.args, *(word.value for word in call.keywords)))


def gathering_parameters(script: Script) -> dict[FunctionNode, dict[str, str]]:
    """By function, its parameters that it uses for sure, on all ranks, in a method that exchanges data if the model is
    wrapped; also through other functions of the file."""
    found: dict[FunctionNode, dict[str, str]] = {}
    for call in script.all(ast.Call):
        if isinstance(call.func, ast.Attribute) and call.func.attr in _EXCHANGED_BY:
            _note(script, found, call, call.func.value, call.func.attr)
        elif isinstance(call.func, ast.Name):
            _note(script, found, call, call.func, "forward")
    calls = [
        (call, function) for call in script.all(ast.Call) if (function := script.definition(call.func)) is not None
    ]
    for _ in range(_DEPTH if found else 0):
        for call, function in calls:
            for name, method in tuple(found.get(function, {}).items()):
                if (given := _given_for(script, call, parameter_names(function), name)) is not None:
                    _note(script, found, call, given, method)
    return found


def _note(
    script: Script, found: dict[FunctionNode, dict[str, str]], call: ast.Call, model: ast.expr, method: str
) -> None:
    name, function = parameter_of(script, model), script.function_of(call)
    if name and function is not None and rank_condition(script, call) is None and is_certain(script, call):
        found.setdefault(function, {}).setdefault(name, method)


def parameter_names(function: FunctionNode) -> tuple[str, ...]:
    """The names of its positional parameters."""
    return tuple(one.arg for one in (*function.args.posonlyargs, *function.args.args))


def _given_for(script: Script, call: ast.Call, names: Sequence[str], name: str) -> ast.expr | None:
    place = names.index(name) - (names[0] in ("self", "cls")) if name in names else None
    return script.argument(call, name, place) if place is None or place >= 0 else None


def is_wrapped_later(script: Script, call: ast.Call) -> bool:
    """Whether the model that a call gets is sharded or wrapped below it, in its function."""
    if not call.args:
        return False
    text = ast.unparse(call.args[0])
    return any(
        one.lineno > call.lineno
        and re.search(r"shard|fsdp|parallel|wrap|prepare", last_name(one.func), re.IGNORECASE)
        and any(ast.unparse(given) == text for given in one.args)
        for one in script.inside(script.function_of(call) or script.tree, ast.Call)
    )


def saves_shards(script: Script, call: ast.Call) -> bool:
    """Whether ``trainer.save_model()`` of a Hugging Face Trainer gathers shards: its arguments ask for FSDP."""
    if not _TRAINERS.match(script.name(call.func)) or not isinstance(call.func, ast.Attribute):
        return False
    trainers = [one for one in script.values_of(call.func.value) if isinstance(one, ast.Call)]
    given = [value for one in trainers if (value := script.argument(one, "args", 1)) is not None]
    made = [one for value in given for one in script.values_of(value) if isinstance(one, ast.Call)]
    asked = [value for one in made if (value := script.argument(one, "fsdp")) is not None]
    values = (script.value(one) for one in asked)
    return any(value is not UNKNOWN and value not in _OFF for value in values)
