import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed._composable.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, DistributedSampler

from model import Transformer, TransformerConfig
from wikitext import TokenWindows


def build(config, mesh, lr):
    model = Transformer(config)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.05)
    return model, optimizer


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    mesh = init_device_mesh("cuda", (int(os.environ["WORLD_SIZE"]),))
    torch.manual_seed(0)
    model, optimizer = build(TransformerConfig(layers=24, width=1024), mesh, lr=3e-4)
    data = TokenWindows("wikitext-103", length=1024)
    sampler = DistributedSampler(data, seed=11)
    loader = DataLoader(data, batch_size=8, sampler=sampler, num_workers=4, pin_memory=True)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for step, (x, y) in enumerate(loader):
            logits = model(x.cuda(non_blocking=True))
            loss = F.cross_entropy(logits.flatten(0, 1), y.cuda(non_blocking=True).flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 50 == 0 and dist.get_rank() == 0:
                print(epoch, step, loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
