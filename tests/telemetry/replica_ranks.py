"""Two ranks of DistributedDataParallel over Gloo, each with its replica watched: one process that forks after torch is
loaded. They train twice; the second time rank 1 flips one bit. Argument: a folder for what the ranks saw."""

import os
import sys
from datetime import timedelta
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from doctor.monitor.telemetry.replica.replica_tracker import ReplicaTracker

try:
    from torch.distributed.fsdp import fully_shard
except ImportError:  # torch before 2.6
    fully_shard = None

BATCHES, EVERY, FLIP_AFTER = 30, 5, 12


def net():
    """Layers of several kinds: batch normalisation, whose running means differ between healthy ranks, a frozen one."""
    made = torch.nn.Sequential(
        torch.nn.Conv2d(3, 6, 3), torch.nn.BatchNorm2d(6), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(216, 7)
    ).to(memory_format=torch.channels_last)
    made[0].bias.requires_grad_(False)
    return made


@torch.no_grad()
def descend(module):
    """Plain gradient descent: the first optimizer of torch loads its compiler, for seconds."""
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter -= 0.05 * parameter.grad
            parameter.grad = None


def train(rank, flip_after):
    """What a rank sees of a run; after batch ``flip_after`` rank 1 flips a bit of one parameter."""
    torch.manual_seed(rank)
    wrapped = DistributedDataParallel(net())
    replica = ReplicaTracker(EVERY)
    replica.attach(wrapped.module, replicated=True, broadcast=True)
    for batch in range(1, BATCHES + 1):
        loss = wrapped(torch.randn(4, 3, 8, 8)).square().mean()
        loss.backward()
        descend(wrapped)
        if rank == 1 and batch == flip_after:
            with torch.no_grad():
                wrapped.module[4].bias.view(torch.int32)[3] ^= 1 << 20
        replica.loss(batch, loss)
        replica.batch_end(batch)
    means = wrapped.module[1].running_mean.tolist()
    return {"model": replica.model(), "replica": replica.facts(), "means": means}


def sharded():
    """Models of which each rank holds pieces."""
    one = FullyShardedDataParallel(layers(), device_id=torch.device("cpu"), use_orig_params=True)
    models = [one, one.module]
    if fully_shard is not None:
        models.append(fully_shard(layers(), mesh=init_device_mesh("cpu", (2,))))
    return [seen_of(model) for model in models]


def layers():
    """A model that is cut unevenly."""
    return torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Linear(3, 2))


def seen_of(module):
    """What a replica says of a model after one batch."""
    replica = ReplicaTracker(1)
    replica.attach(module, replicated=None, broadcast=None)
    replica.batch_end(1)
    return {"model": replica.model(), "replica": replica.facts(), "means": []}


def main(rank, folder):
    """Both runs of a rank and its sharded models, written down."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=20))
    seen = [train(rank, flip_after) for flip_after in (0, FLIP_AFTER)] + sharded()
    (folder / f"{rank}.json").write_bytes(msgspec.json.encode(seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    child = os.fork()
    main(1 if child == 0 else 0, Path(sys.argv[1]))
    if child:
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
