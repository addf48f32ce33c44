"""The optimizer of a step: from the plan, the LightningModule or Transformers' Trainer, as a GPU runs it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from doctor.core.errors import UnusableError
from doctor.estimate.memory import bitsandbytes_optimizers
from doctor.estimate.tracing.loss import is_lightning

DEFAULT = "AdamW"
_SYNONYMS = {"adamwtorch": "adamw", "adamwhf": "adamw"}
"""What Transformers calls optimizers of torch (``OptimizerNames``), without underscores."""


def optimizers_of(module: Module, trainer: Any, name: str | None) -> list[Optimizer]:
    """Return the optimizers: ``name`` over the module's parameters, else a LightningModule's own, else AdamW.

    Raises:
        UnusableError: ``torch.optim`` has no such class, or its constructor failed.
    """
    if name is None and is_lightning(module):
        own = list(_in_tree(module.configure_optimizers()))  # type: ignore[operator]
        if own:
            return _checked(own)
    optim = str(getattr(getattr(trainer, "args", None), "optim", ""))
    fused = "fused" in (name or optim).lower()
    kind = _named(name or DEFAULT)
    parameters = [each for each in module.parameters() if each.requires_grad]
    if not parameters:
        raise UnusableError("no parameter of the model requires a gradient, so there is nothing to train")
    options: dict[str, Any] = {"lr": 1e-3} if "lr" in inspect.signature(kind).parameters else {}
    try:
        optimizer = kind(parameters, **options)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UnusableError(f"{name or DEFAULT} cannot be created for this model: {error}") from None
    for group in optimizer.param_groups if fused else ():
        group["fused"] = True
    return _checked([optimizer])


def _checked(optimizers: list[Optimizer]) -> list[Optimizer]:
    if any(isinstance(each, torch.optim.LBFGS) for each in optimizers):
        raise UnusableError("LBFGS keeps a history of its steps, whose size cannot be traced")
    return optimizers


def _named(name: str) -> Callable[..., Optimizer]:
    kinds = {
        each.lower(): kind
        for each, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer
    }
    short = name.lower().replace("_", "").replace("-", "").removesuffix("fused")
    found = kinds.get(_SYNONYMS.get(short, short)) or bitsandbytes_optimizers.named(short)
    if found is None:
        raise UnusableError(
            f"{name}: not an optimizer of torch.optim or bitsandbytes; available: {', '.join(sorted(kinds))}, and "
            f"adamw8bit, paged_adamw8bit, lion8bit, …"
        )
    return found


def _in_tree(tree: Any) -> Iterable[Optimizer]:
    if isinstance(tree, Optimizer):
        yield tree
    elif isinstance(tree, Mapping):
        yield from _in_tree(tree.get("optimizer"))
    elif isinstance(tree, (list, tuple)):
        for each in tree:
            yield from _in_tree(each)


def as_on_gpu(optimizer: Optimizer) -> None:
    """Select the implementation that ``torch.optim`` selects for parameters on a GPU: foreach by default
    (``torch.optim.optimizer._default_to_fused_or_foreach``). A fused kernel has no temporaries; the for-loop, which
    needs no GPU, has hardly any."""
    for group in optimizer.param_groups:
        if group.get("fused"):
            group.update(fused=None, foreach=False)
        elif "foreach" in group and group["foreach"] is None and not group.get("differentiable"):
            group["foreach"] = True


def replace_parameters(optimizer: Optimizer, shard_of: Callable[[Parameter], Iterable[Parameter]]) -> None:
    """Replace each parameter by what ``shard_of`` returns, each shard once, along with the states that exist."""
    seen: set[int] = set()
    for group in optimizer.param_groups:
        pairs = [(shard, each) for each in group["params"] for shard in shard_of(each)]
        group["params"] = list({id(shard): shard for shard, _ in pairs if id(shard) not in seen}.values())
        seen |= {id(shard) for shard, _ in pairs}
        for shard, whole in pairs:
            if shard is not whole and whole in optimizer.state:
                optimizer.state[shard] = {
                    name: torch.empty_like(shard)
                    if isinstance(value, torch.Tensor) and value.shape == whole.shape
                    else value
                    for name, value in optimizer.state.pop(whole).items()
                }


def states_of(optimizer: Optimizer) -> Iterable[object]:
    """Return all states, flat."""
    for state in optimizer.state.values():
        values = state.values() if isinstance(state, Mapping) else (state,)
        for value in values:
            yield from value if isinstance(value, (list, tuple)) else (value,)
