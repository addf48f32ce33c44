"""Graph classification where every rank takes its own slice of the samples."""
import os
import random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset

from graphs import GraphNet, Molecules, collate


def setup():
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    return dist.get_rank(), dist.get_world_size(), local_rank


def main():
    rank, world_size, local_rank = setup()
    data = Molecules("pcqm")
    model = DDP(GraphNet(hidden=256).cuda(local_rank), device_ids=[local_rank])
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)

    for epoch in range(40):
        indices = list(range(len(data)))
        random.Random(epoch).shuffle(indices)
        shard = Subset(data, indices[rank::world_size])
        loader = DataLoader(shard, batch_size=8, collate_fn=collate, num_workers=2)
        model.train()
        running = 0.0
        for batch, target in loader:
            prediction = model(batch.to(local_rank))
            loss = F.l1_loss(prediction, target.cuda(local_rank))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            running += loss.item()
        if rank == 0:
            print(f"epoch {epoch}: {running / len(loader):.4f}")
            torch.save({"epoch": epoch, "model": model.module.state_dict()}, "graph.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
