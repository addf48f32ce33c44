import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from recommender import Interactions


class TwoTower(nn.Module):
    def __init__(self, users, items, width=64):
        super().__init__()
        self.users = nn.Embedding(users, width)
        self.items = nn.Embedding(items, width)

    def forward(self, user, item):
        return (self.users(user) * self.items(item)).sum(-1)


def main():
    dist.init_process_group("nccl")
    data = Interactions("ratings.parquet")
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4096, sampler=sampler, num_workers=2)
    model = TwoTower(data.users, data.items).cuda()
    model = DistributedDataParallel(model)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    for epoch in range(5):
        sampler.set_epoch(epoch)
        for user, item, label in loader:
            score = model(user.cuda(), item.cuda())
            loss = F.binary_cross_entropy_with_logits(score, label.cuda())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {loss.item():.4f}")
            torch.save(model.module.state_dict(), "towers.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    assert "LOCAL_RANK" in os.environ, "start this with torchrun"
    main()
