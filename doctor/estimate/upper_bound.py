"""An upper bound for a step that can't run on fake tensors, from the part of it that ran."""

from __future__ import annotations

from contextlib import ExitStack

from torch._subclasses import fake_tensor
from torch.nn import Module

from doctor.estimate.data_model import MemoryBreakdown, TrainingPlan
from doctor.estimate.memory.strategies import autocast_dtype
from doctor.estimate.tracing.factory import FactoryOutput
from doctor.estimate.tracing.ledger import AllocationLedger
from doctor.estimate.tracing.pytree import tensors_in

_FAULTS: tuple[type[BaseException], ...] = (
    NotImplementedError,
    *(
        getattr(fake_tensor, name)
        for name in (
            "DataDependentOutputException",
            "DynamicOutputShapeException",
            "FakeTensorDeviceMismatchError",
            "UnsupportedFakeTensorException",
            "UnsupportedOperatorException",
        )
        if hasattr(fake_tensor, name)
    ),
)
_WORDS = ("faketensor", "fake tensor", "meta tensor", "data pointer", ".numpy()", "data_ptr", "meta device")
STATES = 2
"""States of AdamW per parameter, of the same size: a bound for every optimizer of torch.optim but LBFGS."""


class ModuleCoverage(ExitStack):
    """Records which modules with own parameters ran: a context manager around the steps."""

    def __init__(self, module: Module) -> None:
        super().__init__()
        self._leaves = [each for each in module.modules() if any(True for _ in each.parameters(recurse=False))]
        self._ran: set[Module] = set()

    def __enter__(self) -> ModuleCoverage:
        """Register the hooks."""
        for each in self._leaves:
            self.callback(each.register_forward_hook(lambda module, *_: self._ran.add(module)).remove)
        return self

    @property
    def share(self) -> float:
        """The share of these modules that ran."""
        return max(1, len(self._ran)) / max(1, len(self._leaves))


def is_of_fakes(error: BaseException) -> bool:
    """Whether fake tensors are the reason, and not the user's code."""
    return isinstance(error, _FAULTS) or any(word in str(error).lower() for word in _WORDS)


def bounded(
    plan: TrainingPlan, made: FactoryOutput, ledger: AllocationLedger, coverage: ModuleCoverage, why: str
) -> tuple[MemoryBreakdown, str]:
    """Return the bound and its description: parameters, gradients and optimizer by arithmetic; activations as if the
    forward pass freed nothing, scaled to the modules that did not run, and as much again for the backward pass."""
    parameters = list(made.module.parameters())
    trained = sum(each.nbytes for each in parameters if each.requires_grad)
    whole = sum(each.nbytes for each in parameters)
    ranks = plan.world_size if plan.strategy not in ("none", "ddp") else 1
    activations = int(ledger.everything / coverage.share)
    casts = whole // 2 if autocast_dtype(plan) is not None else 0
    parts = MemoryBreakdown(
        parameters=whole,
        gradients=trained,
        optimizer=STATES * (-(-trained // ranks)),
        buffers=sum(each.nbytes for each in made.module.buffers()),
        activations=activations + casts,
        temporary=activations + trained,
        communication=trained if plan.strategy != "none" else 0,
        batch=sum(each.nbytes for each in tensors_in(made.batch)),
    )
    return parts, (
        f"the step cannot run on fake tensors ({why}): the estimate assumes that the forward pass frees nothing "
        f"({coverage.share:.0%} of its layers ran), and that the backward pass needs as much again"
    )
