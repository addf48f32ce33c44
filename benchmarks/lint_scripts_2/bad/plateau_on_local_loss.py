import argparse
import os

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from audio.dataset import Clips
from audio.model import ConvTasNet
from audio.loss import si_snr


def validate(model, loader, device):
    model.eval()
    losses = []
    with torch.no_grad():
        for mixture, sources in loader:
            losses.append(si_snr(model(mixture.to(device)), sources.to(device)).item())
    value = sum(losses) / len(losses)
    return value


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=150)
    parser.add_argument("--data", default="/data/wsj0-2mix")
    args = parser.parse_args()
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    model = DDP(ConvTasNet().to(device), device_ids=[local_rank])
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    scheduler = optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=3)
    train, valid = Clips(args.data, "tr"), Clips(args.data, "cv")
    sampler = DistributedSampler(train)
    train_loader = DataLoader(train, batch_size=4, sampler=sampler, num_workers=4)
    valid_loader = DataLoader(valid, batch_size=4, sampler=DistributedSampler(valid, shuffle=False))
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for mixture, sources in train_loader:
            optimizer.zero_grad()
            loss = si_snr(model(mixture.to(device)), sources.to(device))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5)
            optimizer.step()
        scheduler.step(validate(model, valid_loader, device))
        if dist.get_rank() == 0:
            torch.save(model.module.state_dict(), f"epoch{epoch}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
