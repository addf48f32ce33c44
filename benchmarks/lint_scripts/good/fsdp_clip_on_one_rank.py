import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from gpt import GPT, Block, GPTConfig, TokenBlocks


def train(model, sampler, loader, optimizer, rank, device, epochs):
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for step, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            _, loss = model(x.to(device), y.to(device))
            loss.backward()
            norm = model.clip_grad_norm_(1.0)
            if rank == 0 and step % 10 == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.3f} norm {norm.item():.3f}")
            optimizer.step()


def main():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = FSDP(
        GPT(GPTConfig(layers=24, width=2048)),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        device_id=device,
        use_orig_params=True,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    data = TokenBlocks("openwebtext/train.bin", length=1024)
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, batch_size=8, sampler=sampler, num_workers=2)
    train(model, sampler, loader, optimizer, rank, device, epochs=1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
