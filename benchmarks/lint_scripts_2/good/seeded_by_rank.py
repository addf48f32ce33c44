import argparse
import os
import random

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler

from segmentation import Tiles, UNet


def seed_all(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.cuda.manual_seed_all(seed)


def average_gradients(model):
    size = float(dist.get_world_size())
    for param in model.parameters():
        dist.all_reduce(param.grad.data, op=dist.ReduceOp.SUM)
        param.grad.data /= size


def main(args):
    dist.init_process_group(backend="nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    seed_all(args.seed)
    model = UNet(3, 6).cuda()
    seed_all(args.seed + dist.get_rank())
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    dataset = Tiles(args.root)
    sampler = DistributedSampler(dataset, seed=args.seed)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler, num_workers=4, drop_last=True)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for image, mask in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(image.cuda()), mask.cuda())
            loss.backward()
            average_gradients(model)
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", default="tiles")
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--epochs", type=int, default=60)
    main(parser.parse_args())
