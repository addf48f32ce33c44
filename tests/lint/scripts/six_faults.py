"""A training script as people write it, with six faults that show on more than one rank."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def data(count: int) -> TensorDataset:
    return TensorDataset(torch.randn(count, 32), torch.randint(0, 10, (count,)))


def evaluate(model: nn.Module, loader: DataLoader, rank: int) -> float:
    right = torch.zeros(1, device="cuda")
    with torch.no_grad():
        for inputs, labels in loader:
            right += (model(inputs.cuda()).argmax(1) == labels.cuda()).sum()
    if rank == 0:
        dist.all_reduce(right)
    return right.item()


def main() -> None:
    rank = int(os.environ["RANK"])
    dist.init_process_group("nccl")

    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10)).cuda()
    if os.path.exists("last.pt"):
        model.load_state_dict(torch.load("last.pt"))
    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    train_set, val_set = data(4096), data(512)
    sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, batch_size=32, sampler=sampler)
    val_loader = DataLoader(val_set, batch_size=32, shuffle=False, sampler=DistributedSampler(val_set, shuffle=False))

    for epoch in range(10):
        losses = []
        for inputs, labels in train_loader:
            loss = nn.functional.cross_entropy(model(inputs.cuda()), labels.cuda())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss)
        right = evaluate(model, val_loader, rank)
        torch.save(model.module.state_dict(), "last.pt")
        if rank == 0:
            print(epoch, sum(losses) / len(losses), right)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
