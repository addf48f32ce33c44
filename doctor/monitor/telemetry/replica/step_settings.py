"""What an optimizer step of a rank depends on besides its data: settings of its optimizers, modes of its modules.

Everything is read from Python attributes, never from a device. Samples are taken with the checksums, by the training
thread, and each takes some microseconds, and 30 ns for each module and parameter.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from doctor.core.facts import StepSettings, Variable
from doctor.monitor.telemetry.replica.sample_history import SampleHistory

if TYPE_CHECKING:
    import torch

MOST_GROUPS, MOST_OPTIMIZERS, MOST_NAMES = 8, 4, 4
"""Parameter groups and optimizers that are recorded, and names in one text."""
MOST_MODULES, MOST_NODES = 20_000, 100_000
REDUCTIONS = "gradient reductions per optimizer step"
"""The name of their mean number since the sample before, which is rounded: a run may begin within a step."""
DROPPED = "p"
"""The attribute with the probability that an element is zeroed (torch/nn/modules/dropout.py)."""
IMPLEMENTATIONS = frozenset({"params", "param_names", "foreach", "fused", "capturable", "differentiable"})
"""Keys of a parameter group that no result depends on, as far as PyTorch documents it."""


class StepSettingsTracker:
    """The settings of a rank after some of its optimizer steps.

    ``last_loss``: returns the loss of this batch, if its step was recorded; not for the training thread alone.
    """

    def __init__(self) -> None:
        self._optimizers: list[weakref.ref[Any]] = []
        self._modules: list[tuple[str, weakref.ref[torch.nn.Module]]] = []
        self._dropouts: list[weakref.ref[torch.nn.Module]] = []
        self._model: weakref.ref[torch.nn.Module] | None = None
        self._frozen: frozenset[str] = frozenset()
        self._trained: list[tuple[str, weakref.ref[torch.nn.Parameter]]] = []
        self._history: SampleHistory[StepSettings] = SampleHistory()
        self._unfrozen: tuple[str, ...] = ()
        self._last_reductions = (0, 0)
        self.last_loss: Callable[[], object] = lambda: None

    def attach(self, model: torch.nn.Module) -> None:
        """Set the model as it was wrapped: parameters that are frozen now are not reduced later, either."""
        self._model = weakref.ref(model)
        self._modules = [(name, weakref.ref(one)) for name, one in list(model.named_modules())[:MOST_MODULES]]
        held = [(reference, one) for _, reference in self._modules if (one := reference()) is not None]
        self._dropouts = [reference for reference, one in held if isinstance(getattr(one, DROPPED, None), float)]
        named = list(model.named_parameters())
        self._frozen = frozenset(name for name, one in named if not one.requires_grad)
        self._trained = [(name, weakref.ref(one)) for name, one in named if one.requires_grad][:MOST_MODULES]
        self._last_reductions = (0, 0)

    def use_optimizers(self, optimizers: Iterable[Any]) -> None:
        """Set the optimizers whose settings are recorded."""
        inner = (getattr(one, "optimizer", one) for one in optimizers)  # the one in Accelerate's or Lightning's wrapper
        self._optimizers = [weakref.ref(one) for one in inner if hasattr(one, "param_groups")][:MOST_OPTIMIZERS]

    def take_sample(self, number: int, step: int, batches: int | None = None, reductions: int | None = None) -> None:
        """Record the settings after optimizer step ``step``, as sample ``number``.

        ``batches``: those trained so far, where they are equal on all ranks; ``reductions``: backward passes so far in
        which the wrapper reduced gradients.
        """
        optimizers = [one for reference in self._optimizers if (one := reference()) is not None]
        values = [*_of_optimizers(optimizers)]
        if batches is not None:
            values.append(Variable("batches trained", str(batches)))
        if reductions is not None:
            (before, since), self._last_reductions = self._last_reductions, (reductions, step)
            values.append(Variable(REDUCTIONS, f"{(reductions - before) / max(1, step - since):.0f}"))
        if self._modules:
            values.append(Variable("modules in eval mode", self._in_eval_mode()))
        if self._dropouts:
            shares = {getattr(module, DROPPED) for one in self._dropouts if (module := one()) is not None}
            values.append(Variable("dropout", ", ".join(f"{share:g}" for share in sorted(shares))))
        if self._trained:
            frozen = [name for name, one in self._trained if (held := one()) is not None and not held.requires_grad]
            values.append(Variable("parameters frozen in training", _listed(frozen)))
        if values:
            self._history.add(number, StepSettings(step, tuple(values)))

    def kept(self) -> tuple[StepSettings, ...]:
        """Return the samples that are kept, oldest first. For any thread."""
        return self._history.kept(lambda one: one.step)

    def unfrozen(self) -> tuple[str, ...]:
        """Return the parameters that are trained now and were frozen when the model was attached. For any thread."""
        model = self._model() if self._model is not None else None
        if model is not None and self._frozen:
            try:
                named = list(model.named_parameters())
            except RuntimeError:  # changed by the training thread meanwhile
                return self._unfrozen
            self._unfrozen = tuple(name for name, one in named if one.requires_grad and name in self._frozen)
        return self._unfrozen

    def without_gradient(self) -> tuple[str, ...]:
        """Return the trained parameters without gradient, if others have one. For any thread.

        That is only significant while the rank stands between a backward pass and the end of its step. Where gradients
        were cleared since, the graph of the loss shows which parameters took part in it.
        """
        used = _parameters_of(self.last_loss())
        model = self._model() if self._model is not None else None
        try:
            named = [pair for pair in model.named_parameters() if pair[1].requires_grad] if model is not None else []
        except RuntimeError:
            return ()
        if used:
            without = tuple(name for name, one in named if id(one) not in used)
        else:
            without = tuple(name for name, one in named if one.grad is None)
        return without if len(without) < len(named) else ()

    def _in_eval_mode(self) -> str:
        names = [name or "the model" for name, one in self._modules if (module := one()) and not module.training]
        return _listed(names)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more if names else "none"


def _parameters_of(loss: object) -> set[int]:
    """Return the identities of the parameters in the graph of a loss; empty if it has none, or a very large one."""
    waiting = [getattr(loss, "grad_fn", None)]
    seen: set[Any] = set()
    found: set[int] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if len(seen) > MOST_NODES:
            return set()
        variable = getattr(node, "variable", None)  # of AccumulateGrad
        if variable is not None:
            found.add(id(variable))
        waiting += [following for following, _ in node.next_functions]
    return found


def _of_optimizers(optimizers: list[Any]) -> Iterable[Variable]:
    for place, optimizer in enumerate(optimizers):
        groups = optimizer.param_groups
        of_several = f" of optimizer {place}" if len(optimizers) > 1 else ""
        yield Variable(f"optimizer class{of_several}", type(optimizer).__name__)
        for index, group in enumerate(groups[:MOST_GROUPS]):
            where = of_several
            where += f" of parameter group {index}" if len(groups) > 1 else ""
            for name, value in group.items():
                if name not in IMPLEMENTATIONS and isinstance(value, (int, float, tuple)):
                    yield Variable(f"{name}{where}", f"{value:.10g}" if isinstance(value, float) else str(value))
