"""Facts read from a Lightning Trainer; any may be missing, as names differ by release."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterable
from operator import attrgetter
from pathlib import Path
from typing import Any

from doctor.collectors.base import parse_int
from doctor.collectors.storage.mounts import local_path
from doctor.core.facts import TrainingFacts, Variable
from doctor.monitor.integrations.adapter import Adapter
from doctor.monitor.integrations.hook_guard import value_or_default
from doctor.monitor.integrations.torch_state import backend, ddp_arguments, device_id, joins_uneven_inputs
from doctor.monitor.telemetry.memory.lower_bound import memory_lower_bound

PACKAGES = {"lightning": "lightning", "pytorch_lightning": "pytorch_lightning", "lightning_fabric": "pytorch_lightning"}
"""The Lightning of each package that may define a class: ``lightning_fabric`` comes with the second."""

DEFAULTS: dict[str, tuple[object, ...]] = {
    "max_steps": (-1,),
    "max_epochs": (-1, 1000),
    "min_steps": (),
    "min_epochs": (0, 1),
    "limit_train_batches": (1.0,),
    "limit_val_batches": (1.0,),
    "limit_test_batches": (1.0,),
    "limit_predict_batches": (1.0,),
    "overfit_batches": (0.0,),
    "fast_dev_run": (False,),
    "val_check_interval": (1.0,),
    "check_val_every_n_epoch": (1,),
    "num_sanity_val_steps": (2,),
    "accumulate_grad_batches": (1,),
    "reload_dataloaders_every_n_epochs": (0,),
    "use_distributed_sampler": (True,),
    "gradient_clip_val": (),
    "gradient_clip_algorithm": (),
}
"""Trainer arguments that decide which batches a rank sees and what it does with them, with their defaults."""

SHARDING = ("FSDPStrategy", "ModelParallelStrategy", "XLAFSDPStrategy")


def training_facts(trainer: Any, module: Any) -> TrainingFacts:
    """Return the facts of the Trainer and its strategy. ``module``: the LightningModule."""
    strategy, share = trainer.strategy, data_parallel(trainer)
    home = package_of(trainer) or "lightning"
    device = value_or_default(lambda: strategy.root_device, None)
    return TrainingFacts(
        framework=home,
        release=value_or_default(lambda: str(sys.modules[home].__version__), None),
        mixed=mixed_packages(trainer, module),
        strategy=strategy_name(strategy),
        backend=backend(),
        device=None if device is None else str(device),
        device_id=device_id(device),
        world_size=trainer.world_size,
        data_parallel_rank=share.get("rank"),
        data_parallel_size=share.get("num_replicas"),
        accumulate=value_or_default(lambda: int(trainer.accumulate_grad_batches), 1),
        precision=value_or_default(lambda: str(trainer.precision), None),
        max_steps=_limit(trainer, "max_steps"),
        max_epochs=_limit(trainer, "max_epochs"),
        joins=joins_uneven_inputs(value_or_default(lambda: strategy.model, None)),
        seed=parse_int(os.environ.get("PL_GLOBAL_SEED")),
        checkpoints=value_or_default(lambda: checkpoints(trainer), None),
        arguments=(*arguments(trainer), *ddp_arguments(value_or_default(lambda: strategy.model, None))),
    )


def data_parallel(trainer: Any) -> dict[str, int]:
    """Return ``rank`` and ``num_replicas`` among the ranks with different data.

    With a model-parallel strategy, ranks that share one replica count once.
    """
    alone = {"rank": 0, "num_replicas": 1} if trainer.world_size == 1 else {}
    return value_or_default(lambda: dict(trainer.distributed_sampler_kwargs or alone), alone)


def strategy_name(strategy: Any) -> str:
    """Return the registered name of a strategy, such as ``ddp``, or a custom class's name."""
    values = getattr(strategy, "strategy_name", None)
    return values if isinstance(values, str) else type(strategy).__name__.removesuffix("Strategy").lower()


def replication(strategy: Any) -> tuple[bool | None, bool | None]:
    """Return whether all ranks hold the same parameters, and whether they are broadcast.

    The strategy may broadcast them when it wraps the model. ``None`` if the strategy is unknown.
    """
    names = {kind.__name__ for kind in type(strategy).__mro__}
    if names & set(SHARDING):
        return False, False
    if "DeepSpeedStrategy" in names:
        whole = value_or_default(lambda: not strategy.zero_stage_3, None)
        return whole, whole
    if "DDPStrategy" not in names:
        return None, None
    averages = getattr(strategy, "_model_averaging_period", None)
    return (None if averages else True), bool(
        value_or_default(lambda: strategy._ddp_kwargs.get("init_sync", True), True)
    )


def trainer_memory_lower_bound(trainer: Any, module: Any) -> int | None:
    """Return a lower bound in bytes of the memory that training holds on this rank's device.

    ``None`` if the strategy keeps parameters in buffers of its own.
    """
    strategy = trainer.strategy
    if "DeepSpeedStrategy" in {kind.__name__ for kind in type(strategy).__mro__}:
        return None
    wrapper = strategy.model
    copies = type(wrapper).__name__ == "DistributedDataParallel" and not wrapper.gradient_as_bucket_view
    return memory_lower_bound(module, trainer.optimizers, buckets=copies)


def arguments(trainer: Any) -> tuple[Variable, ...]:
    """Return the arguments that differ from their defaults."""
    found = []
    for name, defaults in DEFAULTS.items():
        holder = "_accelerator_connector." if name == "use_distributed_sampler" else ""
        value = value_or_default(functools.partial(attrgetter(holder + name), trainer), None)
        # The types are compared, too: 1.0 is all batches, but 1 is one batch.
        if value is not None and not any(type(value) is type(one) and value == one for one in defaults):
            found.append(Variable(name, str(value)))
    return tuple(found)


def _limit(trainer: Any, name: str) -> int | None:
    value = value_or_default(lambda: getattr(trainer, name), None)
    return value if isinstance(value, int) and value >= 0 else None


def mixed_packages(trainer: Any, module: Any) -> str | None:
    """Describe objects that belong to another Lightning than the Trainer's."""
    own = package_of(trainer)
    named = {type(one).__name__: package_of(one) for one in _parts(trainer, module) if not isinstance(one, Adapter)}
    foreign = sorted(f"{name} of {home}" for name, home in named.items() if home not in (own, None))
    return f"{', '.join(foreign)} with the Trainer of {own}" if own and foreign else None


def _parts(trainer: Any, module: Any) -> Iterable[object]:
    yield module
    yield trainer.strategy
    for name in ("callbacks", "loggers"):
        yield from value_or_default(lambda name=name: list(getattr(trainer, name)), [])  # type: ignore[misc]
    yield value_or_default(lambda: trainer.datamodule, None)


def package_of(thing: object) -> str | None:
    """Return the Lightning that defines the first matching class of an object."""
    roots = (kind.__module__.partition(".")[0] for kind in type(thing).__mro__)
    return next((PACKAGES[root] for root in roots if root in PACKAGES), None)


def default_directory(trainer: Any) -> Path:
    """Return the Trainer's ``default_root_dir``, or the working directory if it is remote."""
    values = local_path(str(trainer.default_root_dir))
    return Path.cwd() if values is None else Path(values)


def checkpoints(trainer: Any) -> str | None:
    """Return the directory or URL below which checkpoints are written.

    That of the ModelCheckpoint; before it has one, the one it will choose
    (lightning/pytorch/callbacks/model_checkpoint.py, ``__resolve_ckpt_dir``).
    """
    values = trainer.checkpoint_callback.dirpath
    if values is None and trainer.loggers:
        values = trainer.loggers[0].save_dir
    return str(trainer.default_root_dir if values is None else values)
