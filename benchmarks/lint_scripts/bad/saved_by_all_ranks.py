import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from tqdm import tqdm

from contrastive import PairAugment, ResNetEncoder, Unlabelled, nt_xent


class SimCLR(nn.Module):
    def __init__(self, width=128):
        super().__init__()
        self.encoder = ResNetEncoder()
        self.projector = nn.Sequential(nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, width))

    def forward(self, x):
        return nn.functional.normalize(self.projector(self.encoder(x)), dim=1)


def main():
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    device = rank % torch.cuda.device_count()
    torch.cuda.set_device(device)
    model = DDP(nn.SyncBatchNorm.convert_sync_batchnorm(SimCLR()).to(device), device_ids=[device])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.6, momentum=0.9)
    data = Unlabelled("/data/stl10", PairAugment())
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=128, sampler=sampler, num_workers=4, drop_last=True)
    for epoch in range(200):
        sampler.set_epoch(epoch)
        for first, second in tqdm(loader, disable=rank != 0):
            loss = nt_xent(model(first.to(device)), model(second.to(device)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if epoch % 10 == 0:
            torch.save(model.module.state_dict(), f"simclr_{epoch:03d}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
