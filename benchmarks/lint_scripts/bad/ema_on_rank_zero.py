"""Diffusion model with an EMA of the weights."""
import copy
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from diffusion import UNet, add_noise
from mydata import Images


@torch.no_grad()
def update_ema(ema, model, decay=0.9999):
    for target, source in zip(ema.parameters(), model.parameters()):
        target.mul_(decay).add_(source, alpha=1 - decay)


@torch.no_grad()
def validation_loss(network, loader, device):
    total = torch.zeros(2, device=device)
    for images in loader:
        noisy, noise, t = add_noise(images.to(device))
        total += torch.stack([F.mse_loss(network(noisy, t), noise), total.new_ones(())])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def main():
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    device = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(device)
    model = UNet().to(device)
    ema = copy.deepcopy(model).eval().requires_grad_(False)
    model = DDP(model, device_ids=[device])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    train, val = Images("train"), Images("val")
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=32, sampler=sampler, drop_last=True)
    val_loader = DataLoader(val, batch_size=32, sampler=DistributedSampler(val, shuffle=False))
    for epoch in range(100):
        sampler.set_epoch(epoch)
        for images in loader:
            noisy, noise, t = add_noise(images.to(device))
            loss = F.mse_loss(model(noisy, t), noise)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if rank == 0:
                update_ema(ema, model.module)
        value = validation_loss(ema, val_loader, device)
        if rank == 0:
            print(f"epoch {epoch}: validation loss of the EMA {value:.4f}")
            torch.save(ema.state_dict(), "ema.pt")


if __name__ == "__main__":
    main()
