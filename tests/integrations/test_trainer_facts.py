"""What is read off Trainers and strategies, those that a machine without GPUs can't run too."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("lightning.pytorch")

import torch
from lightning.pytorch import Callback
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy, SingleDeviceStrategy

from doctor.monitor.integrations.lightning.trainer_facts import (
    data_parallel,
    default_directory,
    package_of,
    replication,
    strategy_name,
)
from doctor.monitor.integrations.torch_state import device_id, joins_uneven_inputs, unwrapped
from doctor.monitor.integrations.torch_state import replication as replication_of_module


class Own(DDPStrategy):
    """A strategy of the user's own."""


@pytest.mark.parametrize(
    ("make", "name", "known"),
    [
        (DDPStrategy, "ddp", (True, True)),
        (Own, "own", (True, True)),
        (lambda: DDPStrategy(init_sync=False), "ddp", (True, False)),
        (lambda: DDPStrategy(model_averaging_period=4), "ddp", (None, True)),
        (FSDPStrategy, "fsdp", (False, False)),
        (ModelParallelStrategy, "modelparallel", (False, False)),
        (lambda: SingleDeviceStrategy(torch.device("cpu")), "single_device", (None, None)),
    ],
)
def test_strategies(make: Any, name: str, known: tuple[bool | None, bool | None]) -> None:
    strategy = make()
    assert strategy_name(strategy) == name
    assert replication(strategy) == known


def test_ranks_that_share_a_replica_share_their_place() -> None:
    tensor_parallel = SimpleNamespace(world_size=8, distributed_sampler_kwargs={"num_replicas": 2, "rank": 1})
    assert data_parallel(tensor_parallel) == {"num_replicas": 2, "rank": 1}
    assert data_parallel(SimpleNamespace(world_size=2, distributed_sampler_kwargs=None)) == {}
    assert data_parallel(SimpleNamespace(world_size=1)) == {"num_replicas": 1, "rank": 0}


@pytest.mark.parametrize(("told", "where"), [("/runs/a", Path("/runs/a")), ("s3://bucket/a", None)])
def test_remote_directories_are_not_written_to(told: str, where: Path | None) -> None:
    assert default_directory(SimpleNamespace(default_root_dir=told)) == (where or Path.cwd())


def test_whose_a_class_is() -> None:
    class Mine(Callback):
        """Defined elsewhere."""

    assert package_of(Mine()) == "lightning"
    assert package_of(object()) is None


def test_the_wrapper_of_torch_tells() -> None:
    class DistributedDataParallel(torch.nn.Module):
        """Without a process group."""

        def __init__(self, module: Any) -> None:
            super().__init__()
            self.module = module

    inner = torch.nn.Linear(1, 1)
    wrapped = DistributedDataParallel(inner)
    assert unwrapped(wrapped) is inner
    assert unwrapped(inner) is inner
    assert replication_of_module(wrapped) == (True, True)
    assert replication_of_module(inner) == (None, None)
    assert not joins_uneven_inputs(wrapped)
    wrapped._join_config = SimpleNamespace(enable=True)
    assert joins_uneven_inputs(wrapped)


def test_a_device_that_is_not_in_use_is_not_asked() -> None:
    assert device_id(torch.device("cpu")) is None
    assert device_id(torch.device("cuda", 0)) is None or torch.cuda.is_initialized()
