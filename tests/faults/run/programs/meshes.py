"""Loops of four ranks in a mesh of two by two, in which the guilty rank stops before a collective of its inner group.

The data-parallel groups are ranks 0 and 2, and ranks 1 and 3; the inner ones are ranks 0 and 1, and ranks 2 and 3.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from tests.faults.run.programs.parts import AT, BATCH, BEAT, LONG, WIDTH, Rows
from tests.faults.run.role import Role

BATCHES = 20


class Meshed(torch.nn.Module):
    """A layer before and one after what the ranks of an inner group do together."""

    def __init__(self, together: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.together, self.last = torch.nn.Linear(WIDTH, WIDTH), together, torch.nn.Linear(WIDTH, 2)

    def forward(self, rows: torch.Tensor) -> Any:
        """The output."""
        return self.last(self.together(self.first(rows)))


def _train(role: Role, inner: str, wrap: Callable[[DeviceMesh], torch.nn.Module]) -> None:
    role.join()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", inner))
    torch.manual_seed(1)
    with role.watch() as watch:
        model = wrap(mesh)
        watch.model(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        rows = Rows(BATCH * BATCHES, 10_000 * mesh.get_local_rank("dp"))  # an inner group reads the same
        for number, batch in enumerate(watch.loader(DataLoader(rows, BATCH))):
            _stop(role, number)
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            watch.step(loss=loss)
    dist.destroy_process_group()


def _stop(role: Role, number: int) -> None:
    """The guilty rank never returns from its batch ``AT``."""
    role.begins()
    time.sleep(BEAT)
    if role.guilty and number == AT:
        role.stops()
        time.sleep(LONG)


def _tensor_parallel(mesh: DeviceMesh) -> torch.nn.Module:
    """A sum over the inner group, under DistributedDataParallel over the other."""
    group = mesh.get_group("tp")
    model = Meshed(lambda rows: functional.all_reduce(rows, group=group))
    return DistributedDataParallel(model, process_group=mesh.get_group("dp"))


def _expert_parallel(mesh: DeviceMesh) -> torch.nn.Module:
    """Rows that are exchanged within the inner group."""
    group = mesh.get_group("ep")
    model = Meshed(lambda rows: functional.all_to_all_single(torch.empty_like(rows), rows, group=group))
    return DistributedDataParallel(model, process_group=mesh.get_group("dp"))


def _context_parallel(mesh: DeviceMesh) -> torch.nn.Module:
    """Blocks that are passed around the inner group, by what torch's context parallelism passes them with.

    Its attention itself is made of kernels for GPUs.
    """
    from torch.distributed.tensor.experimental._context_parallel._attention import _create_rotater

    def together(rows: torch.Tensor) -> torch.Tensor:
        rotater = _create_rotater(mesh.get_group("cp"), 0)
        rotater.exchange_buffers(rows.detach())
        return rows + rotater.next_buffer()

    return DistributedDataParallel(Meshed(together), process_group=mesh.get_group("dp"))


def _of_dtensors(mesh: DeviceMesh) -> torch.nn.Module:
    """Layers that torch's tensor parallelism divides, and ``fully_shard`` over the other dimension."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, 2))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return fully_shard(model, mesh=mesh["dp"])


def tensor_parallel(role: Role) -> None:
    _train(role, "tp", _tensor_parallel)


def expert_parallel(role: Role) -> None:
    _train(role, "ep", _expert_parallel)


def context_parallel(role: Role) -> None:
    _train(role, "cp", _context_parallel)


def of_dtensors(role: Role) -> None:
    _train(role, "tp", _of_dtensors)


def pipeline(role: Role) -> None:
    """Two pipelines of two stages: ranks 0 and 2 send to ranks 1 and 3, and get gradients from them."""
    role.join()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    group, stage, peer = mesh.get_group("pp"), mesh.get_local_rank("pp"), role.rank ^ 1
    torch.manual_seed(1)
    with role.watch() as watch:
        model = DistributedDataParallel(torch.nn.Linear(WIDTH, WIDTH), process_group=mesh.get_group("dp"))
        watch.model(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        rows = Rows(BATCH * BATCHES, 10_000 * mesh.get_local_rank("dp"))
        for number, batch in enumerate(watch.loader(DataLoader(rows, BATCH))):
            _stop(role, number)
            passed = torch.empty(BATCH, WIDTH, requires_grad=True)
            if stage == 0:
                output = model(batch)
                dist.send(output.detach(), peer, group=group)
                gradient = torch.empty_like(output)
                dist.recv(gradient, peer, group=group)
                output.backward(gradient)
            else:
                with torch.no_grad():
                    dist.recv(passed, peer, group=group)
                model(passed).square().mean().backward()
                dist.send(passed.grad, peer, group=group)
            optimizer.step()
            optimizer.zero_grad()
            watch.step()
    dist.destroy_process_group()
