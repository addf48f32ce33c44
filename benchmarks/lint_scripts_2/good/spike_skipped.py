import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from gpt import GPT, GPTConfig
from shards import TokenLoader

max_steps, seq_len, micro_batch = 19073, 1024, 16
spike_limit = 8.0

dist.init_process_group(backend="nccl")
rank = int(os.environ["RANK"])
local_rank = int(os.environ["LOCAL_RANK"])
world_size = int(os.environ["WORLD_SIZE"])
device = f"cuda:{local_rank}"
torch.cuda.set_device(device)
master = rank == 0

torch.manual_seed(1337)
model = GPT(GPTConfig(vocab_size=50304)).to(device)
model = DDP(model, device_ids=[local_rank])
optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), fused=True)
loader = TokenLoader(micro_batch, seq_len, rank=rank, world_size=world_size)

for step in range(max_steps):
    x, y = loader.next_batch()
    x, y = x.to(device), y.to(device)
    with torch.autocast(device_type="cuda", dtype=torch.bfloat16):
        logits = model(x)
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), y.view(-1))
    worst = loss.detach().clone()
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    if step > 500 and worst.item() > spike_limit:
        optimizer.zero_grad(set_to_none=True)
        continue
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if master and step % 100 == 0:
        print(f"step {step} loss {loss.item():.4f}")
dist.destroy_process_group()
