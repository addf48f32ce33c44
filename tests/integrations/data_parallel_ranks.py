"""Four ranks over Gloo that wrap models in all ways, forked by one process after torch is loaded. Argument: a folder
for what each of them knows of its place."""

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.nn.parallel import DistributedDataParallel

from doctor.monitor.integrations.data_parallel import infer_data_parallel_rank
from doctor.monitor.integrations.torch_state import torch_rank
from tests.lab.forked_ranks import play_ranks

try:
    from torch.distributed.fsdp import fully_shard
except ImportError:  # torch before 2.6
    fully_shard = None

WORLD = 4


def net():
    """Layers without parameters among the others."""
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))


def models(rank):
    """Models by name, as they are wrapped."""
    pairs = [dist.new_group(members) for members in ([0, 2], [1, 3])]
    rows = [dist.new_group(members) for members in ([0, 1], [2, 3])]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    hybrid = {"process_group": (rows[rank // 2], pairs[rank % 2]), "sharding_strategy": ShardingStrategy.HYBRID_SHARD}
    yield "bare", net()
    yield "ddp", DistributedDataParallel(net())
    yield "ddp of two", DistributedDataParallel(net(), process_group=pairs[rank % 2])
    yield "ddp within", torch.nn.ModuleDict({"head": net(), "body": DistributedDataParallel(net())})
    yield "fsdp", FullyShardedDataParallel(net(), process_group=pairs[rank % 2], device_id=torch.device("cpu"))
    yield "hybrid fsdp", FullyShardedDataParallel(net(), device_id=torch.device("cpu"), **hybrid)
    if fully_shard is not None:
        yield "fully_shard", sharded(mesh["dp"])
        yield "hybrid fully_shard", sharded(mesh)


def sharded(mesh):
    """Each layer by itself, so that nothing is left for the outermost module."""
    made = net()
    for layer in (made[0], made[2], made):
        fully_shard(layer, mesh=mesh)
    return made


def be(rank, folder):
    """One of the ranks."""
    store = dist.FileStore(str(folder / "store"), WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=30))
    shares = {name: infer_data_parallel_rank(model, (), torch_rank({})) for name, model in models(rank)}
    (folder / f"{rank}.json").write_text(json.dumps(shares))
    dist.barrier()
    dist.destroy_process_group()


def main(folder):
    """Fork the ranks, and wait for them; the status says whether all did well."""
    torch.set_num_threads(1)
    return 0 if play_ranks(WORLD, lambda rank: be(rank, folder)) else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
