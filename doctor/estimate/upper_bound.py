"""When a step can't be run without data: an upper bound from what ran of it, and the rule that it follows."""

from __future__ import annotations

from types import TracebackType
from typing import Any

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
"""Of the same size as the parameters: AdamW's; a bound for every optimizer of torch.optim but LBFGS."""
TEMPORARIES = 1


class ModuleCoverage:
    """Which modules with parameters of their own ran: a context manager around the steps."""

    def __init__(self, module: Module) -> None:
        self._leaves = {
            id(each): each for each in module.modules() if any(True for _ in each.parameters(recurse=False))
        }
        self._ran: set[int] = set()
        self._hooks: list[Any] = []

    def __enter__(self) -> ModuleCoverage:
        """Begin to count."""
        for each in self._leaves.values():
            self._hooks.append(each.register_forward_hook(self._note))
        return self

    def _note(self, module: Module, _: Any, __: Any) -> None:
        self._ran.add(id(module))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End."""
        for hook in self._hooks:
            hook.remove()

    @property
    def share(self) -> float:
        """Of all such modules, by their number."""
        return max(1, len(self._ran)) / max(1, len(self._leaves))


def is_of_fakes(error: BaseException) -> bool:
    """Whether tensors without data are the reason, and not the user's code."""
    return isinstance(error, _FAULTS) or any(word in str(error).lower() for word in _WORDS)


def bounded(
    plan: TrainingPlan, made: FactoryOutput, ledger: AllocationLedger, coverage: ModuleCoverage, why: str
) -> tuple[MemoryBreakdown, str]:
    """Parameters, gradients and optimizer by arithmetic; activations as if nothing that the forward pass made were ever
    freed, scaled to the modules that did not run, and as much again for the backward pass."""
    parameters = {id(each): each for each in made.module.parameters()}.values()
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
        temporary=activations + TEMPORARIES * trained,
        communication=trained if plan.strategy != "none" else 0,
        batch=sum(each.nbytes for each in tensors_in(made.batch)),
    )
    return parts, (
        f"the step can't be run without data ({why}): counted as if nothing that the forward pass made were freed, "
        f"{coverage.share:.0%} of its layers having run, and as much again in the backward pass"
    )
