"""Train a small GPT with DDP and log to Weights & Biases."""
import os

import numpy as np
import torch
import torch.distributed as dist
import wandb
from torch.nn.parallel import DistributedDataParallel as DDP

from gpt import GPT, GPTConfig

batch_size, block_size, max_steps = 12, 1024, 20_000


def get_batch(data, generator, device):
    starts = torch.randint(len(data) - block_size, (batch_size,), generator=generator)
    x = torch.stack([torch.from_numpy(data[i : i + block_size].astype(np.int64)) for i in starts])
    y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + block_size].astype(np.int64)) for i in starts])
    return x.to(device), y.to(device)


dist.init_process_group(backend="nccl")
rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
device = f"cuda:{local_rank}"
torch.cuda.set_device(device)
torch.manual_seed(1337)
if rank == 0:
    wandb.init(project="small-gpt", config={"batch_size": batch_size, "block_size": block_size})

model = DDP(GPT(GPTConfig(block_size=block_size)).to(device), device_ids=[local_rank])
optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95))
data = np.memmap("train.bin", dtype=np.uint16, mode="r")
generator = torch.Generator().manual_seed(1337 + rank)

for step in range(max_steps):
    x, y = get_batch(data, generator, device)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        _, loss = model(x, y)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if step % 20 == 0:
        if rank == 0:
            wandb.log({"loss": loss.item(), "step": step})
    if rank == 0 and step % 1000 == 0:
        torch.save(model.module.state_dict(), "gpt.pt")

dist.destroy_process_group()
