"""What a script is about: whether it trains on several ranks, with what, in which loops and from which loaders."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

from doctor.lint.script import UNKNOWN, Script

DDP = "torch.nn.parallel.DistributedDataParallel"
FSDP = ("torch.distributed.fsdp.FullyShardedDataParallel", "torch.distributed.fsdp.fully_shard")
LOADER = "torch.utils.data.DataLoader"
SAMPLER = "torch.utils.data.DistributedSampler"
TRAINER = "lightning.pytorch.Trainer"
FABRIC = "lightning.fabric.Fabric"
MODULE = "lightning.pytorch.LightningModule"
ACCELERATOR = "accelerate.Accelerator"

_BY_ITSELF = (
    "torch.distributed.init_process_group",
    "torch.distributed.init_device_mesh",
    "torch.distributed.device_mesh.init_device_mesh",
    DDP,
    *FSDP,
    SAMPLER,
    ACCELERATOR,
    "deepspeed.initialize",
    "deepspeed.init_distributed",
    "horovod.torch.init",
    "ray.train.torch.prepare_model",
)
"""Calls that stand in scripts of several ranks alone, or in scripts that are made for them."""
_SINGLE = ("auto", "single_device", None, UNKNOWN)


def several_ranks(script: Script) -> ast.Call | None:
    """The first call that shows that a script is made for several ranks; ``None`` where nothing does."""
    first = next(script.calls(*_BY_ITSELF), None)
    trainers = (call for call in script.calls(TRAINER, FABRIC) if trains_on_several(script, call))
    return min(
        (call for call in (first, next(trainers, None)) if call is not None), key=lambda call: call.lineno, default=None
    )


def trains_on_several(script: Script, trainer: ast.Call) -> bool:
    """Whether a Trainer or a Fabric is given several devices or nodes, or a strategy for them."""
    devices = script.value(script.argument(trainer, "devices", 2 if _is(script, trainer, TRAINER) else None))
    nodes = script.value(script.argument(trainer, "num_nodes"))
    strategy = script.argument(trainer, "strategy")
    return (
        _is_several(devices)
        or (isinstance(nodes, int) and nodes > 1)
        or (strategy is not None and script.value(strategy) not in _SINGLE)
        or (isinstance(strategy, ast.Call) and "Strategy" in script.name(strategy))
    )


def _is(script: Script, call: ast.Call, name: str) -> bool:
    return script.name(call.func) == name


def _is_several(devices: object) -> bool:
    if isinstance(devices, bool):
        return False
    if isinstance(devices, int):
        return devices == -1 or devices > 1
    if isinstance(devices, str):
        return devices == "-1" or "," in devices or (devices.isdigit() and int(devices) > 1)
    return isinstance(devices, tuple) and len(devices) > 1


class Loop(NamedTuple):
    """A loop that trains or evaluates. ``node``: it goes through batches; ``source``: what it goes through, as it is
    written, without ``enumerate`` and progress bars; ``epochs``: the loop around it, if there is one in its function;
    ``trains``: it has a backward pass."""

    node: ast.For
    source: ast.expr
    epochs: ast.For | ast.While | None
    trains: bool


_WRAPPERS = frozenset({"enumerate", "tqdm", "trange", "track", "iter", "islice", "zip", "progress_bar", "prefetch"})


def loops(script: Script) -> Iterator[Loop]:
    """The innermost loops that have a backward pass in them, and loops over loaders that have none."""
    for node in script.all(ast.For):
        source = unwrapped(node.iter)
        trains = _has_backward(script, node) and not any(
            _has_backward(script, inner) for inner in script.inside(node, ast.For) if inner is not node
        )
        loads = script.name(source) == LOADER + "()" or _sounds_like_a_loader(source)
        if trains or (loads and not _has_backward(script, node)):
            around = [one for one in script.around(node) if isinstance(one, (ast.For, ast.While, ast.FunctionDef))]
            outer = around[0] if around and isinstance(around[0], (ast.For, ast.While)) else None
            yield Loop(node, source, outer, trains)


def unwrapped(source: ast.expr) -> ast.expr:
    """What a loop goes through: ``enumerate(tqdm(loader), 1)`` is ``loader``."""
    while isinstance(source, ast.Call) and source.args and not isinstance(source.args[0], ast.Starred):
        called = source.func.attr if isinstance(source.func, ast.Attribute) else getattr(source.func, "id", "")
        if called not in _WRAPPERS:
            break
        source = source.args[0]
    return source


def _has_backward(script: Script, node: ast.AST) -> bool:
    return any(
        isinstance(call.func, ast.Attribute) and call.func.attr in ("backward", "manual_backward", "training_step")
        for call in script.inside(node, ast.Call)
    )


def _sounds_like_a_loader(source: ast.expr) -> bool:
    bare = source.attr if isinstance(source, ast.Attribute) else getattr(source, "id", "")
    return "loader" in bare.lower() or bare.lower().endswith("_dl")


def is_loader_of(script: Script, source: ast.expr) -> ast.Call | None:
    """The call ``DataLoader(…)`` that made what a loop goes through, followed through ``prepare`` and the like where
    the name stays the same; ``None`` where it can't be told or several may have."""
    made = [one for one in script.values_of(source) if isinstance(one, ast.Call) and script.name(one.func) == LOADER]
    return made[0] if len(made) == 1 else None


EVALUATION = ("val", "valid", "validation", "test", "eval", "evaluation", "dev", "predict")
"""Words in the names of functions, loaders and data sets that are not trained on."""


def is_for_evaluation(name: str) -> bool:
    """Whether a name speaks of evaluation: ``val_loader``, ``test_dataset``, ``evaluate``."""
    words = name.lower().replace("-", "_").split("_")
    return any(word in EVALUATION or word.startswith(("valid", "evalu")) for word in words)


def lightning_modules(script: Script) -> Iterator[ast.ClassDef]:
    """Classes that derive from a LightningModule, as far as the file tells."""
    yield from (one for one in script.all(ast.ClassDef) if script.derives(one, MODULE))


def hooks(owner: ast.ClassDef, *names: str) -> Iterator[ast.FunctionDef]:
    """Methods of a class by name."""
    for statement in owner.body:
        if isinstance(statement, ast.FunctionDef) and statement.name in names:
            yield statement
