"""Two-node DDP run on a cluster with InfiniBand."""
import os

os.environ["NCCL_DEBGU"] = "WARN"
os.environ["NCCL_IB_TIMEOUT"] = "22"

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from gpt import GPT, GPTConfig, batches

local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group("nccl")
rank, world_size = dist.get_rank(), dist.get_world_size()
model = DDP(GPT(GPTConfig()).cuda(), device_ids=[local_rank])
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
for step, (x, y) in enumerate(batches("train.bin", rank, world_size, steps=10_000)):
    optimizer.zero_grad()
    _, loss = model(x.cuda(), y.cuda())
    loss.backward()
    optimizer.step()
    if rank == 0 and step % 100 == 0:
        print(step, loss.item())
dist.destroy_process_group()
