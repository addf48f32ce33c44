"""FSDP2 pre-training with a sharded checkpoint every half hour."""
import os
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from llama import ModelArgs, Transformer, token_stream

INTERVAL = 1800


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", local_rank))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cuda", (world_size,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    torch.manual_seed(0)
    model = Transformer(ModelArgs(layers=16)).cuda()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    last_save = time.time()
    for step, (tokens, labels) in enumerate(token_stream(rank, world_size, batch=4, length=4096, steps=100_000)):
        loss = model.loss(tokens.cuda(), labels.cuda())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if time.time() - last_save > INTERVAL:
            model_state, optimizer_state = get_state_dict(model, optimizer)
            dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=f"checkpoints/{step}")
            last_save = time.time()
        if rank == 0 and step % 100 == 0:
            print(f"step {step} loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
