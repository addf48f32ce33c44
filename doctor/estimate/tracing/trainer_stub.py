"""A stub of the Trainer for the training step of a LightningModule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import Module
from torch.optim import Optimizer

_NUMBERS = {
    **dict.fromkeys(("global_step", "current_epoch", "global_rank", "local_rank", "node_rank", "min_epochs"), 0),
    **dict.fromkeys(("estimated_stepping_batches", "num_training_batches", "max_steps"), 1000),
    **dict.fromkeys(("max_epochs", "accumulate_grad_batches"), 1),
    "log_every_n_steps": 50,
}
_QUIET = ("log", "log_dict", "print", "clip_gradients", "toggle_optimizer", "untoggle_optimizer", "lr_schedulers")


class NullObject:
    """A logger, strategy or loop all of whose methods do nothing."""

    def __getattr__(self, name: str) -> Any:
        """Return the same object."""
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: object, **__: object) -> Any:
        """Return the same object."""
        return self

    def __iter__(self) -> Iterator[Any]:
        """Return an empty iterator."""
        return iter(())

    def __bool__(self) -> bool:
        """Return ``False``."""
        return False


class TrainerStub:
    """A Trainer with the attributes of a run that has just started."""

    def __init__(self, module: Module, real: Any, world_size: int) -> None:
        self._real, self.world_size = real, world_size
        self.model = self.lightning_module = module  # ``configure_optimizers`` may ask for its parameters
        self.is_global_zero = self.training = True
        self.sanity_checking = self.validating = self.testing = self.predicting = False
        self.logger = NullObject()
        self.loggers: list[object] = []
        self.callbacks: list[object] = []
        self.optimizers: list[object] = []
        vars(self).update(_NUMBERS)
        for name in ("max_epochs", "max_steps", "accumulate_grad_batches", "log_every_n_steps", "gradient_clip_val"):
            if getattr(real, name, None) is not None:
                setattr(self, name, getattr(real, name))

    def __getattr__(self, name: str) -> Any:
        """Return a null object."""
        if name.startswith("__"):
            raise AttributeError(name)
        return NullObject()


@contextmanager
def attached(module: Module, trainer: Any, world_size: int, backward: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Attach a stub Trainer, and discard what the module logs. ``backward``: its ``manual_backward``."""
    quiet: dict[str, Callable[..., None]] = dict.fromkeys(_QUIET, lambda *_, **__: None)
    quiet["manual_backward"] = lambda loss, *_, **__: backward(loss)
    before = vars(module).get("_trainer")
    for name, act in quiet.items():
        object.__setattr__(module, name, act)
    object.__setattr__(module, "_trainer", TrainerStub(module, trainer, world_size))
    try:
        yield
    finally:
        object.__setattr__(module, "_trainer", before)
        for name in (*quiet, "optimizers"):
            vars(module).pop(name, None)


@contextmanager
def without_metrics(module: Module) -> Iterator[int]:
    """Let the metrics of torchmetrics in the module return 0, because they decide on values; yield their number."""
    found = [each for each in module.modules() if _is_metric(each)]
    before = [dict(vars(each)) for each in found]
    for metric in found:
        for name in ("forward", "update", "compute"):
            object.__setattr__(metric, name, lambda *_, **__: torch.zeros(()))
    try:
        yield len(found)
    finally:
        for metric, state in zip(found, before, strict=True):
            for name in ("forward", "update", "compute"):
                vars(metric).pop(name, None)
                vars(metric).update({name: state[name]} if name in state else {})


def _is_metric(module: Module) -> bool:
    """Match by name, without an import of torchmetrics."""
    return any(
        kind.__name__ == "Metric" and kind.__module__.startswith("torchmetrics.") for kind in type(module).__mro__
    )


def give_optimizers(module: Module, optimizers: list[Optimizer]) -> None:
    """Set what ``self.optimizers()`` returns in manual optimization."""
    given = optimizers[0] if len(optimizers) == 1 else optimizers
    object.__setattr__(module, "optimizers", lambda *_, **__: given)
