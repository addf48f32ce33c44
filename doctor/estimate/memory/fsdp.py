"""Fully sharded strategies: a rank holds a shard of everything, and whole parameters of one unit at a time.

The model runs whole, on fake tensors; what is recorded is what the strategy would hold: shards instead of parameters,
each unit's parameters from before its forward or backward pass until after it, and the inputs of reduce-scatter. The
order of allocations follows torch.distributed.fsdp ``_fully_shard/_fsdp_param_group.py`` and ``_fsdp_collectives.py``
(fsdp2), ``_runtime_utils.py`` and ``_flat_param.py`` (fsdp), torch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import Module, Parameter

from doctor.estimate.data_model import TrainingPlan
from doctor.estimate.memory.strategies import SingleDevice
from doctor.estimate.tracing.blocks import in_words, repeated_blocks
from doctor.estimate.tracing.pytree import tensors_in
from doctor.estimate.tracing.storage_recorder import StorageRecorder

GATHERING, REDUCING = 1, 2
"""Streams on which outputs of all-gathers and of reduce-scatters are allocated: ``FSDPCommContext.lazy_init`` of FSDP2,
``_unshard_stream`` and ``_post_backward_stream`` of FSDP."""


class ShardingUnit:
    """Parameters gathered and reduced together. ``shards``: what this rank keeps, in the optimizer's dtype."""

    def __init__(self, module: Module, parameters: Sequence[Parameter], is_root: bool) -> None:
        self.module, self.parameters, self.is_root = module, tuple(parameters), is_root
        self.trained = tuple(each for each in parameters if each.requires_grad)
        self.shards: list[Parameter] = []
        self.whole: list[int] = []
        self.pending: int | None = None
        """The allocation of an all-gather that was started early."""
        self.is_reduced = False

    @property
    def nbytes(self) -> int:
        """Bytes of its whole parameters."""
        return sum(each.nbytes for each in self.parameters)


class FullyShardedV2(SingleDevice):
    """FSDP2, and base of :class:`FullyShardedV1`. ``master``: the dtype of the shards."""

    def __init__(
        self, module: Module, recorder: StorageRecorder, plan: TrainingPlan, master: torch.dtype | None
    ) -> None:
        super().__init__(module, recorder, plan)
        self._master = master
        # As torch's tutorial on FSDP2 and torchtitan set MixedPrecisionPolicy(reduce_dtype=torch.float32).
        self._reduces_in = master if plan.precision.endswith("mixed") else None
        self._held: int | None = None
        """The last all-gather's output in a forward pass: freed after the next unit's all-gather."""
        self._reduced: list[int] = []
        blocks = repeated_blocks(module)
        self.units = _units(module, blocks, self.parameters)
        self._drops_before = True
        """Whether the last reduce-scatter's input is freed before the next one's is allocated
        (``reduce_scatter_max_input_buffers`` is 1)."""
        self._unit_of = {id(each): unit for unit in self.units for each in unit.parameters}
        how = f"{in_words(blocks)}, and the rest" if blocks else "the whole model"
        self.notes = (f"one unit of sharding each: {how}",)

    def begin(self) -> None:
        """Replace parameters by shards, and register the hooks."""
        for parameter in self.parameters:
            self.recorder.forget(parameter)
        for unit in self.units:
            unit.shards = self._shards(unit)
            self.recorder.mark(unit.shards, "parameters")
            if not unit.is_root:
                self._hooks.append(unit.module.register_forward_pre_hook(partial(self._before, unit), with_kwargs=True))
                self._hooks.append(unit.module.register_forward_hook(partial(self._after, unit)))
            self.on_gradient(unit.trained, partial(self._accumulated, unit))

    def _shards(self, unit: ShardingUnit) -> list[Parameter]:
        """Return a slice of every parameter's first dimension, of the same size on every rank."""
        ranks = self.plan.world_size
        return [
            self._shard(each, (-(-each.shape[0] // ranks), *each.shape[1:]) if each.shape else (1,))
            for each in unit.parameters
        ]

    def _shard(self, like: torch.Tensor, shape: Sequence[int]) -> Parameter:
        dtype = getattr(like, "original_dtype", self._master) if self._master is not None else like.dtype
        return Parameter(torch.empty(shape, dtype=dtype, device=self.recorder.device), like.requires_grad)

    def before_forward(self) -> None:
        """Gather the root's parameters, whichever method of the module is called."""
        self.units[0].is_reduced = False
        self._gather(self.units[0])

    def after_forward(self, loss: object) -> None:
        """Keep the root's parameters for the backward pass."""
        self._drop_held()
        self._gather_when_needed(self.units[0], loss)

    def _before(self, unit: ShardingUnit, _: Module, args: Any, kwargs: Any) -> None:
        self._gather(unit)
        if torch.is_grad_enabled():
            for tensor in tensors_in((args, kwargs)):
                if tensor.requires_grad:
                    _on_gradient(tensor, partial(self._done, unit))

    def _after(self, unit: ShardingUnit, _: Module, __: Any, result: Any) -> None:
        if self.recorder.ledger.moment == "forward":
            self._release(unit)
        self._gather_when_needed(unit, result)

    def _gather_when_needed(self, unit: ShardingUnit, result: Any) -> None:
        for tensor in tensors_in(result):
            if tensor.requires_grad:
                _on_gradient(tensor, partial(self._begin_backward, unit))

    def _begin_backward(self, unit: ShardingUnit, _: torch.Tensor) -> None:
        unit.is_reduced = False
        self._gather(unit)
        place = self.units.index(unit)
        ahead = self.units[place - 1] if place > 0 else None
        if ahead is not None and not ahead.is_root and not ahead.whole and ahead.pending is None:
            ahead.pending = self._all_gather(ahead)

    def _all_gather(self, unit: ShardingUnit) -> int:
        return self.recorder.ledger.allocate(unit.nbytes, "gathered", GATHERING)

    def _gather(self, unit: ShardingUnit) -> None:
        """Copy the all-gather's output into the parameters; in a forward pass, keep it until the next unit's."""
        if unit.whole:
            return
        output = unit.pending if unit.pending is not None else self._all_gather(unit)
        unit.pending = None
        self._drop_held()
        unit.whole = [self.recorder.ledger.allocate(each.nbytes, "gathered") for each in unit.parameters]
        if self.recorder.ledger.moment == "forward":
            self._held = output
        else:
            self.recorder.ledger.free(output)

    def _drop_held(self) -> None:
        if self._held is not None:
            self.recorder.ledger.free(self._held)
            self._held = None

    def _release(self, unit: ShardingUnit) -> None:
        for key in unit.whole:
            self.recorder.ledger.free(key)
        unit.whole = []

    def _accumulated(self, unit: ShardingUnit, _: torch.Tensor) -> None:
        if all(each.grad is not None for each in unit.trained):
            self._done(unit)

    def _done(self, unit: ShardingUnit, _: object = None) -> None:
        """End the unit's backward pass: free whole parameters and gradients, allocate the shards' gradients."""
        if any(each.grad is not None for each in unit.trained):
            self.recorder.mark((each.grad for each in unit.trained), "gradients")
            self._release(unit)
            if self._drops_before:
                self._drop_reduced()
            size = (self._reduces_in or unit.trained[0].dtype).itemsize
            count = sum(each.numel() for each in unit.trained)
            taken = self.recorder.ledger.allocate(count * size, "communication")
            for each in unit.trained:
                each.grad = None
            self._shard_gradients(unit)
            self._drop_reduced()
            self._reduced = [taken]
            unit.is_reduced = True
        if not unit.is_root or unit.is_reduced:
            self._release(unit)

    def _drop_reduced(self) -> None:
        for key in self._reduced:
            self.recorder.ledger.free(key)
        self._reduced = []

    def _shard_gradients(self, unit: ShardingUnit) -> None:
        """Allocate gradients in the dtype of the reduction, then in that of the shards; accumulate them."""
        shards = [each for each in unit.shards if each.requires_grad]
        with torch.no_grad():
            dtype = self._reduces_in or unit.trained[0].dtype
            kept = [torch.empty(shard.shape, dtype=dtype, device=shard.device) for shard in shards]
            for shard, new in zip(shards, kept, strict=True):
                cast = new.to(shard.dtype)
                self.recorder.move((new, cast), REDUCING)
                shard.grad = cast if shard.grad is None else shard.grad.add_(cast)
                self.recorder.mark((shard.grad,), "gradients")

    def after_backward(self) -> None:
        """Finish units that lack gradients, and free what the next unit would have freed."""
        for unit in self.units:
            self._done(unit)
            self._release(unit)
            if unit.pending is not None:
                self.recorder.ledger.free(unit.pending)
                unit.pending = None
        self._drop_reduced()
        self._drop_held()

    def held_by_optimizer(self, parameter: Parameter) -> Iterable[Parameter]:
        """Return the unit's shard of it."""
        unit = self._unit_of.get(id(parameter))
        if unit is None:
            return (parameter,)
        return (next(shard for shard, each in zip(unit.shards, unit.parameters, strict=True) if each is parameter),)

    def stepped(self) -> Sequence[Parameter]:
        """Return all shards."""
        return [shard for unit in self.units for shard in unit.shards]


class FullyShardedV1(FullyShardedV2):
    """FullyShardedDataParallel: a unit is one flat parameter, gathered straight into place, and its gradients are
    copied into a flat one before they are reduced. The next unit's parameters are gathered while one is computed."""

    def __init__(
        self, module: Module, recorder: StorageRecorder, plan: TrainingPlan, master: torch.dtype | None
    ) -> None:
        super().__init__(module, recorder, plan, master)
        self._drops_before = False
        self._reduces_in = None  # MixedPrecision(reduce_dtype=None): in the dtype of the parameters

    def _shards(self, unit: ShardingUnit) -> list[Parameter]:
        shards = []
        for kind in (True, False):
            of_kind = [each for each in unit.parameters if each.requires_grad is kind]
            if of_kind:
                count = -(-sum(each.numel() for each in of_kind) // self.plan.world_size)
                shards.append(self._shard(of_kind[0], (count,)))
        return shards

    def _all_gather(self, unit: ShardingUnit) -> int:
        padded = -(-unit.nbytes // self.plan.world_size) * self.plan.world_size
        return self.recorder.ledger.allocate(padded, "gathered", GATHERING)

    def _gather(self, unit: ShardingUnit) -> None:
        if unit.whole:
            return
        unit.whole = [unit.pending if unit.pending is not None else self._all_gather(unit)]
        unit.pending = None
        self._drop_held()

    def _release(self, unit: ShardingUnit) -> None:
        """In a forward pass, release after the next unit's all-gather: two may be in flight (limit_all_gathers)."""
        if self.recorder.ledger.moment == "forward" and unit.whole:
            self._drop_held()
            (self._held,) = unit.whole
            unit.whole = []
            return
        super()._release(unit)

    def held_by_optimizer(self, parameter: Parameter) -> Iterable[Parameter]:
        """Return the unit's flat shard."""
        unit = self._unit_of.get(id(parameter))
        return [shard for shard in unit.shards if shard.requires_grad] if unit is not None else (parameter,)


def _on_gradient(tensor: torch.Tensor, act: Callable[[torch.Tensor], None]) -> None:
    tensor.register_hook(act)  # type: ignore[no-untyped-call]


def _units(module: Module, blocks: Sequence[Module], parameters: Sequence[Parameter]) -> list[ShardingUnit]:
    """Return the root first, then each block; a parameter that two blocks share is the root's."""
    owners: dict[int, list[int]] = {}
    for place, block in enumerate(blocks):
        for each in block.parameters():
            owners.setdefault(id(each), []).append(place)
    rest = [each for each in parameters if len(set(owners.get(id(each), ()))) != 1]
    taken = {id(each) for each in rest}
    units = [ShardingUnit(module, rest, is_root=True)]
    for block in blocks:
        own = {id(each): each for each in block.parameters() if id(each) not in taken}
        units.append(ShardingUnit(block, tuple(own.values()), is_root=False))
    return units
