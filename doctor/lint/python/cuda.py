"""Which GPU a process uses: the current one or a numbered one, and what binds a rank to its own."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import PurePath

from doctor.lint.python.gpu_use import runs_alone
from doctor.lint.python.project.unreached import may_import
from doctor.lint.python.rank_branches import rank_condition
from doctor.lint.python.script import UNKNOWN, Script, last_name
from doctor.lint.python.training import ACCELERATOR, FABRIC, TRAINER, calls_of, has_one_rank

JOINS = "torch.distributed.init_process_group"
_BINDS = re.compile(
    r"(?:set|setup|select|bind|init|assign|choose|pick|get|config)\w{0,40}_(?:device|gpu|cuda)|^set_device|^cudaSetDevice$"
)
_BINDERS = (ACCELERATOR, FABRIC, TRAINER, "accelerate.PartialState", "deepspeed.initialize", "torch.cuda.device")
"""Libraries that set the device of a process, and the context manager."""
_FIRST = re.compile(r"^(?=[\w.()]*rank)[\w.()]* == 0(?: and\b|$)")
_INITIALIZES = frozenset(
    f"torch.cuda.{name}"
    for name in (
        *("current_device", "get_device_name", "get_device_properties", "get_device_capability", "mem_get_info"),
        *("synchronize", "current_stream", "Stream", "Event", "init"),
    )
)
"""Calls of torch that initialize CUDA in the process; ``is_available`` does not in every release, and ``empty_cache``
and ``memory_allocated`` return at once in a process that has not (torch/cuda/memory.py)."""


def joins(script: Script) -> Iterator[ast.Call]:
    """Calls of ``init_process_group`` except for jobs of one rank."""
    for call in script.calls(JOINS):
        if not has_one_rank(script, call):
            yield call


def may_be_started_before(script: Script, call: ast.Call) -> bool:
    """``if not dist.is_initialized():`` around it: another module may start the group, and set the device."""
    branches = (one.test for one in script.around(call) if isinstance(one, ast.If))
    return any("is_initialized" in script.text_of(one) for one in branches)


def start_method(script: Script) -> object:
    """The default start method of processes, if the file sets it; else :data:`UNKNOWN`."""
    call = next(script.calls("multiprocessing.set_start_method", "torch.multiprocessing.set_start_method"), None)
    return script.value(script.argument(call, "method", 0)) if call is not None else UNKNOWN


def shows_whole_process(script: Script, *nodes: ast.AST) -> bool:
    """Whether a file is the main script, or the nodes are in one function or in the module itself."""
    if "__main__" in script.text or any(script.function_of(one) is None for one in nodes):
        return True
    return len({script.function_of(one) for one in nodes}) == 1


def is_nccl(script: Script, call: ast.Call) -> bool:
    """Whether a call of ``init_process_group`` asks for NCCL by name."""
    backend = script.value(script.argument(call, "backend", 0))
    return isinstance(backend, str) and "nccl" in backend


def binds_device(script: Script) -> bool:
    """Whether anything in the file may bind a process to its GPU: ``set_device``, ``with torch.cuda.device(…)``,
    ``init_process_group(device_id=…)``, CUDA_VISIBLE_DEVICES, a function named like it."""
    if any(script.is_given(call, "device_id") for call in joins(script)) or any(script.calls(*_BINDERS)):
        return True
    if "CUDA_VISIBLE_DEVICES" in script.text and not shows_same_devices(script):
        return True
    return any(
        _BINDS.search(last_name(call.func)) and not script.name(call.func).startswith("torch.cuda.get_")
        for call in script.all(ast.Call)
    )


def shows_same_devices(script: Script) -> bool:
    """Whether all that a file says of CUDA_VISIBLE_DEVICES is a fixed value that is not one device: a list, or one that
    CUDA can't read. No rank gets a device of its own by it."""
    values = [one.known_value for one in script.settings if one.name == "CUDA_VISIBLE_DEVICES"]
    is_all = script.text.count("CUDA_VISIBLE_DEVICES") == len(values) > 0
    return is_all and all(value is not None and re.search(r"[,\s]", value.strip()) for value in values)


def shows_one_gpu(script: Script) -> bool:
    """Whether the file leaves one and the same GPU visible to whatever ranks it has: ``CUDA_VISIBLE_DEVICES = "4"``."""
    settings = [one for one in script.settings if one.name == "CUDA_VISIBLE_DEVICES"]
    return bool(settings) and all(one.is_certain and (one.known_value or "").strip().isdigit() for one in settings)


_OF_PROCESS = re.compile(r"rank|procid|local_?id", re.IGNORECASE)


def shows_own_gpu(script: Script) -> bool:
    """Whether the file leaves each rank the GPU of its number, which is GPU 0 there:
    ``os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["LOCAL_RANK"]``."""
    for one in script.all(ast.Assign):
        named = [target for target in one.targets if isinstance(target, ast.Subscript)]
        if any(script.value(target.slice) == "CUDA_VISIBLE_DEVICES" for target in named):
            made = (one.value, *(found for part in ast.walk(one.value) for found in _values_of(script, part)))
            return any(_OF_PROCESS.search(ast.unparse(part)) for part in made)
    return False


def _values_of(script: Script, node: ast.AST) -> tuple[ast.expr, ...]:
    return script.values_of(node) if isinstance(node, ast.Name) else ()


def on_current_device(script: Script) -> ast.Call | None:
    """The first call that moves something to the current GPU: ``x.cuda()``, ``x.to("cuda")``, ``torch.zeros(1,
    device="cuda")``; ``None`` if devices are numbered, or there is none."""
    calls = (call for call in script.all(ast.Call) if is_on_current_device(script, call))
    shared = (call for call in calls if not runs_alone(script, call) and not _is_on_first_rank(script, call))
    return next((call for call in shared if not _is_left_out(script, call)), None)


def _is_left_out(script: Script, node: ast.AST) -> bool:
    """Whether it is in a function that the program of its file never names, which joins the job in another function: no
    rank calls it. Programs that import it have no word of ranks."""
    outer = next((one for one in script.around(node) if one in script.tree.body), None)
    if not isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef)) or outer.decorator_list:
        return False
    if script.modules is None or "__main__" not in script.text or _CALLS_BY_NAME.search(script.text):
        return False
    starts = {script.function_of(one) for one in script.calls(JOINS)}
    if None in starts or outer in starts or len(re.findall(rf"\b{outer.name}\b", _COMMENTS.sub("", script.text))) > 1:
        return False
    place, named = PurePath(script.location or script.path), re.compile(rf"\b{outer.name}\b")
    others = script.modules.mentioning(place.stem)
    return not any(
        shown != script.path and named.search(text) and may_import(place, text) and _OF_RANKS.search(text)
        for shown, text in others
    )


_COMMENTS = re.compile(r"#.*")
_CALLS_BY_NAME = re.compile(r"(?<!\.)\b(?:globals|locals|getattr|eval|exec)\(|\bfire\.Fire\(|\b__dict__\b")
_OF_RANKS = re.compile(
    r"distributed|process_group|\bdist\.|rank|world_?size|accelerat|\bDDP\b|deepspeed|horovod|Trainer|spawn",
    re.IGNORECASE,
)


def _is_on_first_rank(script: Script, node: ast.AST, depth: int = 2) -> bool:
    """Whether rank 0 alone runs it, or calls its function: GPU 0 is its own."""
    condition = rank_condition(script, node)
    if condition is not None:
        return bool(_FIRST.search(condition.test))
    function = script.function_of(node)
    if function is None or depth == 0:
        return False
    # Also of a method, on a model whose type is not known
    calls = list(calls_of(script, function)) or list(script.method_calls(function.name))
    return bool(calls) and all(_is_on_first_rank(script, call, depth - 1) for call in calls)


def is_on_current_device(script: Script, call: ast.Call) -> bool:
    """Whether a call moves something to the current GPU."""
    if _is_move(script, call, "cuda"):
        return not call.args and script.argument(call, "device") is None
    moved = _device_of(script, call)
    return moved is not None and _device(script, moved) == "cuda"


def initializes_cuda(script: Script, call: ast.Call) -> bool:
    """Whether a call initializes CUDA in this process: it uses a GPU, or queries the driver."""
    if _is_move(script, call, "cuda") or script.name(call.func) in _INITIALIZES:
        return True
    moved = _device_of(script, call)
    return moved is not None and _device(script, moved).startswith("cuda")


def _is_move(script: Script, call: ast.Call, method: str) -> bool:
    """``x.cuda()``, and not ``torch.cuda()`` or ``mpl.cuda()`` of a module."""
    if not isinstance(call.func, ast.Attribute) or call.func.attr != method:
        return False
    name = script.name(call.func.value)
    return not name or "()" in name or name.startswith(".")


def _device_of(script: Script, call: ast.Call) -> ast.expr | None:
    """The target device of a call: ``x.to(device)``, ``torch.zeros(…, device=device)``."""
    if _is_move(script, call, "to"):
        return script.argument(call, "device", 0)
    return script.argument(call, "device") if script.name(call.func).startswith("torch.") else None


def _device(script: Script, node: ast.expr) -> str:
    """``cuda`` or ``cuda:1``; empty if the device or its number is unknown."""
    values = script.values_of(node) if isinstance(node, (ast.Name, ast.Attribute)) else (node,)
    found = {_stated_device(script, one) for one in values}
    return found.pop() if len(found) == 1 else ""


def _stated_device(script: Script, node: ast.expr) -> str:
    if isinstance(node, ast.IfExp):
        if any(_is_numbered(script, one) for one in (node.body, node.orelse)):
            return ""  # the other one is for a process alone
        devices = [_stated_device(script, one) for one in (node.body, node.orelse)]
        return next((one for one in devices if one.startswith("cuda")), "")
    if isinstance(node, ast.Call) and script.name(node.func) == "torch.device":
        inner = script.argument(node, "type", 0)
        numbered = script.is_given(node, "index", 1)
        return "" if numbered or inner is None else _stated_device(script, inner)
    value = script.value(node)
    return value if value is not UNKNOWN and isinstance(value, str) else ""


def _is_numbered(script: Script, node: ast.expr) -> bool:
    """Whether it is the GPU of a number that a variable has: ``f"cuda:{rank}"``, ``torch.device("cuda", rank)``."""
    if isinstance(node, ast.JoinedStr):
        first = node.values[0] if node.values else None
        return isinstance(first, ast.Constant) and str(first.value).startswith("cuda:") and len(node.values) > 1
    if not isinstance(node, ast.Call) or script.name(node.func) != "torch.device":
        return False
    inner = script.argument(node, "type", 0)
    is_given = script.is_given(node, "index", 1) and script.value(script.argument(node, "index", 1)) is UNKNOWN
    return is_given or (inner is not None and _is_numbered(script, inner))
