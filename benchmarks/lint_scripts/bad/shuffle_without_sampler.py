"""Tabular regression, ported from one GPU to four with torch.multiprocessing."""
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def load(split):
    x, y = torch.load(f"housing_{split}.pt", map_location="cpu")
    return TensorDataset(x, y)


def worker(rank, world_size):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=world_size)
    model = nn.Sequential(nn.Linear(13, 64), nn.ReLU(), nn.Linear(64, 1)).cuda(rank)
    model = DDP(model, device_ids=[rank])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.MSELoss()
    loader = DataLoader(load("train"), batch_size=256, shuffle=True)
    for epoch in range(100):
        for x, y in loader:
            prediction = model(x.cuda(rank)).squeeze(1)
            loss = criterion(prediction, y.cuda(rank))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0 and epoch % 10 == 0:
            print(f"epoch {epoch}: {loss.item():.4f}")
    if rank == 0:
        torch.save(model.module.state_dict(), "housing.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29512")
    world_size = torch.cuda.device_count()
    mp.spawn(worker, args=(world_size,), nprocs=world_size)
