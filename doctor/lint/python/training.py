"""Whether a script trains on several ranks, how, and in which loops."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

from doctor.core.text import lazy_compile
from doctor.lint.python.project.imported_functions import may_be_imported
from doctor.lint.python.script import UNKNOWN, FunctionNode, Script, last_name, per_script
from doctor.lint.python.script import is_test as is_test

DDP = "torch.nn.parallel.DistributedDataParallel"
FSDP = ("torch.distributed.fsdp.FullyShardedDataParallel", "torch.distributed.fsdp.fully_shard")
WRAPPERS = (DDP, *FSDP, "apex.parallel.DistributedDataParallel", "horovod.torch.DistributedOptimizer")
"""Wrappers that make ranks train one model and leave the data to the script."""
LOADER = "torch.utils.data.DataLoader"
SAMPLER = "torch.utils.data.DistributedSampler"
TRAINER = "lightning.pytorch.Trainer"
FABRIC = "lightning.fabric.Fabric"
MODULE = "lightning.pytorch.LightningModule"
DATA_MODULE = "lightning.pytorch.LightningDataModule"
CALLBACK = "lightning.pytorch.Callback"
ACCELERATOR = "accelerate.Accelerator"

GROUP = "torch.distributed.init_process_group"
MADE_FOR_RANKS = (
    GROUP,
    "torch.distributed.init_device_mesh",
    "torch.distributed.device_mesh.init_device_mesh",
    *WRAPPERS,
    SAMPLER,
    ACCELERATOR,
    "deepspeed.initialize",
    "deepspeed.init_distributed",
    "horovod.torch.init",
    "ray.train.torch.prepare_model",
)
"""Calls of scripts for several ranks."""
RANK_WORDS = (
    *("init_process_group", "DistributedDataParallel", "FullyShardedDataParallel", "fully_shard", "DistributedSampler"),
    *("DistributedOptimizer", "init_device_mesh", "Accelerator", "deepspeed", "horovod", "prepare_model"),
    *("Trainer(", "Fabric("),
)
"""Every file that is made for several ranks has one of these words."""
_OLD_STRATEGIES = ("ddp", "ddp2", "ddp_spawn", "ddp_sharded", "horovod")
_SINGLE = ("auto", "single_device", None, UNKNOWN)
_SHARDS_LOADERS = lazy_compile(
    r"^(?:accelerate\.Accelerator|lightning\.|transformers\.(?:\w*Trainer|TrainingArguments)|trl\.|composer\.Trainer|"
    r"ignite\.distributed\.auto_dataloader|ray\.train\.torch\.prepare_data_loader|fastai\.|catalyst\.|mmengine\.|"
    r"sentence_transformers\.|colossalai\.)"
)
_SHARDING_METHODS = frozenset({"prepare_data_loader", "setup_dataloaders", "auto_dataloader", "prepare"})
_WRAPPING = frozenset(
    {
        *("enumerate", "tqdm", "trange", "track", "iter", "islice", "zip", "progress_bar", "prefetch", "log_every"),
        *("cycle", "prog_bar", "progress", "alive_it", "master_bar", "ParallelLoader", "MpDeviceLoader"),
    }
)
_BACKWARD = frozenset({"backward", "manual_backward", "training_step"})
_SCALERS = lazy_compile(r"(?:loss|amp|grad|native)_?scaler$", re.IGNORECASE)


def several_ranks(script: Script) -> ast.Call | None:
    """The first call that shows that a script is made for several ranks; ``None`` if there is none."""
    if groups_have_one_rank(script):
        return None
    first = next((call for call in script.calls(*MADE_FOR_RANKS) if not _is_of_one_shard(script, call)), None)
    trainers = (call for call in script.calls(TRAINER, FABRIC) if trains_on_several(script, call))
    found = [call for call in (first, next(trainers, None)) if call is not None]
    return min(found, key=lambda call: call.lineno, default=None)


def _is_of_one_shard(script: Script, call: ast.Call) -> bool:
    """``DistributedSampler(dataset, num_replicas=1, rank=0)``: what is left of a program for several ranks."""
    return script.name(call.func) == SAMPLER and script.value(script.argument(call, "num_replicas", 1)) == 1


@per_script
def groups_have_one_rank(script: Script) -> bool:
    """Whether each process group that the file makes has one rank: a script that converts or tries something out."""
    groups = list(script.calls(GROUP))
    return bool(groups) and all(has_one_rank(script, one) for one in groups)


def has_one_rank(script: Script, call: ast.Call) -> bool:
    """Whether a call of ``init_process_group`` says that the job has one rank: ``world_size=1``, a parameter that is 1
    in all calls of its function, or an attribute of a namespace that was made with it, here or in a module of the
    project."""
    size = script.argument(call, "world_size", 3)
    if size is None or script.value(size) == 1 or is_one_in_all_calls(script, size):
        return size is not None
    if not isinstance(size, ast.Attribute) or size.attr != "world_size" or not isinstance(size.value, ast.Name):
        return False
    scope = script.scope_of(size, size.value.id)
    bound = scope.names[size.value.id] if scope is not None else ()
    return bool(bound) and all(_is_namespace_of_one(script, one) for one in bound)


def is_one_in_all_calls(script: Script, size: ast.expr) -> bool:
    """Whether a number is a parameter of a function of the module that is 1 in each of its calls, which are all of its
    uses: ``setup(rank, world_size)`` below ``world_size = 1``. Other files that import it may give it another one."""
    function = script.function_of(size) if isinstance(size, ast.Name) else None
    names = [one.arg for one in function.args.args] if function is not None else []
    if not isinstance(size, ast.Name) or function is None or size.id not in names or function.decorator_list:
        return False
    if any(one.id == size.id and isinstance(one.ctx, ast.Store) for one in script.inside(function, ast.Name)):
        return False
    calls = [one for one in script.all(ast.Call) if script.definition(one.func) is function]
    values = [script.value(script.argument(one, size.id, names.index(size.id))) for one in calls]
    if not values or any(one != 1 for one in values) or len(script.bindings.of_the_module.names[function.name]) != 1:
        return False
    uses = sum(one.id == function.name for one in script.all(ast.Name))
    return uses == len(calls) and not may_be_imported(script, function.name)


def _is_namespace_of_one(script: Script, bound: ast.AST | str) -> bool:
    if isinstance(bound, ast.Call):
        given = next((one.value for one in bound.keywords if one.arg == "world_size"), None)
        return last_name(bound.func).endswith("Namespace") and script.value(given) == 1
    if not isinstance(bound, str) or script.modules is None:
        return False
    module, _, name = bound.rpartition(".")
    if not module or not script.modules.has(script.location, module):
        return False
    summary = script.modules.find(script.location, module, whole=True)
    return summary is not None and name in summary.of_one_rank


def namespaces_of_one_rank(script: Script) -> frozenset[str]:
    """The names of a module for namespaces with ``world_size=1``."""
    bound = script.bindings.of_the_module.names.items()
    return frozenset(
        name
        for name, found in bound
        if found and all(isinstance(one, ast.Call) and _is_namespace_of_one(script, one) for one in found)
    )


def trains_on_several(script: Script, trainer: ast.Call) -> bool:
    """Whether a Trainer or a Fabric of any release gets several devices or nodes, or a strategy for them."""
    devices = script.value(script.argument(trainer, "devices", 2 if script.name(trainer.func) == TRAINER else None))
    nodes = script.value(script.argument(trainer, "num_nodes"))
    strategy = script.argument(trainer, "strategy")
    if _is_one_process(script, trainer, devices, nodes):
        return False
    return (
        _is_several(devices)
        or _is_several(script.value(script.argument(trainer, "gpus")))
        or script.value(script.argument(trainer, "accelerator")) in _OLD_STRATEGIES
        or (isinstance(nodes, int) and nodes > 1)
        or (strategy is not None and script.value(strategy) not in _SINGLE)
        or (isinstance(strategy, ast.Call) and "Strategy" in script.name(strategy))
    )


def runs_one_process(script: Script, trainer: ast.Call) -> bool:
    """Whether a Trainer or a Fabric certainly runs one process: one device is written, or CPUs and no number of them,
    and no strategy for several."""
    devices = script.value(script.argument(trainer, "devices", 2 if script.name(trainer.func) == TRAINER else None))
    if trains_on_several(script, trainer):
        return False
    if devices in (1, "1", (0,)) and not isinstance(devices, bool):
        return True
    is_on_cpu = script.value(script.argument(trainer, "accelerator")) == "cpu"
    is_whole = not script.is_open(trainer) and not script.is_given(trainer, "num_nodes")
    return is_on_cpu and is_whole and not any(script.is_given(trainer, one) for one in ("devices", "strategy"))


def _is_one_process(script: Script, trainer: ast.Call, devices: object, nodes: object) -> bool:
    """Whether it runs one process: one device, CPUs with the default of one, or replicas inside one process."""
    accelerator = script.value(script.argument(trainer, "accelerator"))
    one = devices in (1, "1", (0,)) and not isinstance(devices, bool)
    unsaid = accelerator == "cpu" and not script.is_given(trainer, "devices")
    return accelerator == "ipu" or ((one or unsaid) and nodes in (1, UNKNOWN))


def _is_several(devices: object) -> bool:
    if isinstance(devices, bool):
        return False
    if isinstance(devices, int):
        return devices == -1 or devices > 1
    if isinstance(devices, str):
        return devices == "-1" or "," in devices or (devices.isdigit() and int(devices) > 1)
    return isinstance(devices, tuple) and len(devices) > 1


def shards_loaders_itself(script: Script) -> bool:
    """Whether a framework is used that adds distributed samplers to loaders and sets their epochs."""
    made = any(_SHARDS_LOADERS.match(script.name(call.func)) for call in script.all(ast.Call))
    derived = any(_SHARDS_LOADERS.match(base) for one in script.all(ast.ClassDef) for base in script.bases(one))
    return made or derived or next(script.method_calls(*_SHARDING_METHODS), None) is not None


class Loop(NamedTuple):
    """A loop that trains or evaluates. ``node``: the loop over batches; ``source``: its iterable as written, without
    ``enumerate`` and progress bars; ``epochs``: the loop around it in its function; ``trains``: it has a backward
    pass."""

    node: ast.For
    source: ast.expr
    epochs: ast.For | ast.While | None
    trains: bool


def loops(script: Script) -> Iterator[Loop]:
    """The innermost loops with a backward pass, and loops over loaders without one."""
    for node in script.all(ast.For):
        source = unwrapped(node.iter)
        trains = has_backward(script, node) and not any(
            has_backward(script, inner) for inner in script.inside(node, ast.For) if inner is not node
        )
        bare = last_name(source).lower()
        loads = script.name(source) == LOADER + "()" or "loader" in bare or bare.endswith("_dl")
        if trains or (loads and not has_backward(script, node)):
            around = [one for one in script.around(node) if isinstance(one, (ast.For, ast.While, ast.FunctionDef))]
            outer = around[0] if around and isinstance(around[0], (ast.For, ast.While)) else None
            yield Loop(node, source, outer, trains)


def unwrapped(source: ast.expr) -> ast.expr:
    """The iterable of a loop: ``enumerate(tqdm(loader), 1)`` is ``loader``."""
    while isinstance(source, ast.Call) and source.args and not isinstance(source.args[0], ast.Starred):
        if last_name(source.func) not in _WRAPPING:
            break
        source = source.args[0]
    return source


def has_backward(script: Script, node: ast.AST, depth: int = 2) -> bool:
    """Whether a backward pass runs in it, also in called functions of this file, but not in their loops."""
    for call in script.inside(node, ast.Call):
        called = last_name(call.func)
        if (called in _BACKWARD and isinstance(call.func, ast.Attribute)) or _SCALERS.search(called):
            return True
        function = script.definition(call.func) if depth > 0 else None
        if function is not None and _steps_back(script, function, depth - 1):
            return True
    return False


def is_without_gradients(script: Script, node: ast.AST) -> bool:
    """Whether a node runs under ``torch.no_grad()`` or ``inference_mode()``, by a block or a decorator around it."""
    for outer in script.around(node):
        contexts = [item.context_expr for item in outer.items] if isinstance(outer, ast.With) else []
        if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef)):
            contexts = outer.decorator_list
        called = [one.func if isinstance(one, ast.Call) else one for one in contexts]
        if any(last_name(one) in ("no_grad", "inference_mode") for one in called):
            return True
    return False


def only_infers(script: Script, shown: ast.Call) -> bool:
    """Whether only an Accelerator or a Trainer indicates ranks and nothing is trained: demos and converters."""
    if script.name(shown.func) == TRAINER:
        return next(script.method_calls("fit", "validate", "test", "predict"), None) is None
    return script.name(shown.func) == ACCELERATOR and not any(
        has_backward(script, one) for one in (script.tree, *script.functions)
    )


def _steps_back(script: Script, function: FunctionNode, depth: int) -> bool:
    loops_in = (*script.inside(function, ast.For), *script.inside(function, ast.While))
    looped = {inner for loop in loops_in for inner in script.inside(loop, ast.stmt)}
    simple = (one for one in script.inside(function, ast.stmt) if not hasattr(one, "body"))
    return any(one not in looped and has_backward(script, one, depth) for one in simple)


def epoch_loops(script: Script, loop: Loop) -> tuple[ast.For | ast.While, ...]:
    """The loops over epochs around a loop over batches, or around the calls of its function."""
    if loop.epochs is not None:
        return (loop.epochs,)
    function = script.function_of(loop.node)
    if function is None:
        return ()
    breaks = (ast.For, ast.While, ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    around = (
        next((one for one in script.around(call) if isinstance(one, breaks)), None)
        for call in calls_of(script, function)
    )
    return tuple(dict.fromkeys(one for one in around if isinstance(one, (ast.For, ast.While))))


def calls_of(script: Script, function: FunctionNode) -> Iterator[ast.Call]:
    """The calls of a function of this file; of ``__init__``, those of its class."""
    yield from _calls_by_function(script).get(function, ())


@per_script
def _calls_by_function(script: Script) -> dict[FunctionNode, list[ast.Call]]:
    found: dict[FunctionNode, list[ast.Call]] = {}
    for call in script.all(ast.Call):
        for function in {script.definition(call.func), constructor_of(script, call)}:
            if function is not None:
                found.setdefault(function, []).append(call)
    return found


def constructor_of(script: Script, call: ast.Call) -> FunctionNode | None:
    """The ``__init__`` of a class of this file that a call makes an instance of."""
    owner = script.class_definition(call.func) if not script.name(call.func).endswith("()") else None
    return script.bindings.methods.get((owner.name, "__init__")) if owner is not None else None


def lightning_modules(script: Script) -> Iterator[ast.ClassDef]:
    """Classes that derive from a LightningModule, as far as this file shows."""
    yield from (one for one in script.all(ast.ClassDef) if script.derives(one, MODULE))


def hooks(owner: ast.ClassDef, *names: str) -> Iterator[ast.FunctionDef]:
    """Methods of a class by name."""
    for statement in owner.body:
        if isinstance(statement, ast.FunctionDef) and statement.name in names:
            yield statement


_JOINS = frozenset({"join", "Join", "join_uneven_inputs"})
"""Contexts for uneven numbers of passes: of DDP, of torch.distributed.algorithms.join, and of Accelerate."""


@per_script
def gradients_reduced(script: Script) -> frozenset[ast.Call]:
    """Calls ``loss.backward()`` of a model that is wrapped in the same function or class, or in a caller, without those
    that a rank may leave out (``DDP.join``)."""
    # Of ``DDP(model)`` as a statement nothing is kept, and the model stays as it was.
    wrapping = [one for one in script.calls(*WRAPPERS) if not isinstance(script.parent(one), ast.Expr)]
    wrapped = (call for call in script.method_calls("backward") if _is_wrapped(script, call, wrapping))
    return frozenset(call for call in wrapped if not _is_joined(script, call))


def _is_joined(script: Script, node: ast.AST, depth: int = 2) -> bool:
    """Whether a place is in a context in which a rank with fewer passes takes part in those of the others
    (torch/distributed/algorithms/join.py), or in a function of the module that is called in such contexts alone."""
    for outer in script.around(node):
        if isinstance(outer, (ast.With, ast.AsyncWith)):
            entered = [one.context_expr for one in outer.items]
            if any(isinstance(one, ast.Call) and last_name(one.func) in _JOINS for one in entered):
                return True
        if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef)):
            uses = script.uses_of(outer)
            return depth > 0 and bool(uses) and all(_is_joined(script, one, depth - 1) for one in uses)
    return False


def _is_wrapped(script: Script, call: ast.Call, wrapping: list[ast.Call]) -> bool:
    around = script.function_of(call)
    for one in wrapping:
        where = script.function_of(one)
        owner = script.class_of(one)
        if where in (None, around) or (owner is not None and owner is script.class_of(call)):
            return True
        if around is not None and where is not None and _calls(script, where, around):
            return True
    return False


def _calls(script: Script, caller: FunctionNode, function: FunctionNode, depth: int = 2) -> bool:
    called = {one for call in script.inside(caller, ast.Call) if (one := script.definition(call.func)) is not None}
    if function in called:
        return True
    return depth > 1 and any(_calls(script, one, function, depth - 1) for one in called - {caller})
