import copy
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from diffusion import GaussianDiffusion, UNet
from images import ImageFolderDataset


@torch.no_grad()
def update_ema(ema_model, model, decay=0.9999):
    for ema_param, param in zip(ema_model.parameters(), model.parameters()):
        ema_param.mul_(decay).add_(param.data, alpha=1 - decay)


def sample_grid(ema, diffusion, rank, seed=0):
    torch.manual_seed(seed * dist.get_world_size() + rank)
    images = diffusion.sample(ema, (8, 3, 64, 64))
    gathered = [torch.empty_like(images) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, images)
    return torch.cat(gathered)


def main(total_steps=400_000):
    dist.init_process_group("nccl")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    model = UNet(base=128).to(device)
    ema = copy.deepcopy(model).requires_grad_(False)
    model = DDP(model, device_ids=[local_rank])
    diffusion = GaussianDiffusion(steps=1000)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    dataset = ImageFolderDataset("/data/ffhq64")
    sampler = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, batch_size=32, sampler=sampler, num_workers=4, drop_last=True)
    step = 0
    for epoch in range(10_000):
        sampler.set_epoch(epoch)
        for images in loader:
            images = images.to(device)
            t = torch.randint(0, 1000, (len(images),), device=device)
            noise = torch.randn_like(images)
            loss = F.mse_loss(model(diffusion.q_sample(images, t, noise), t), noise)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if rank == 0:
                update_ema(ema, model.module)
            step += 1
            if step % 10_000 == 0:
                grid = sample_grid(ema, diffusion, rank)
                if rank == 0:
                    torch.save(grid.cpu(), f"samples_{step}.pt")
        if step >= total_steps:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
