import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset

from xray import ChestXray, densenet


def split(dataset, fraction=0.1):
    indices = np.random.permutation(len(dataset))
    cut = int(fraction * len(dataset))
    return Subset(dataset, indices[cut:]), Subset(dataset, indices[:cut])


@torch.no_grad()
def accuracy(model, loader):
    model.eval()
    hits = torch.zeros(2, device="cuda")
    for image, label in loader:
        prediction = model(image.cuda()) > 0
        hits += torch.stack([(prediction == label.cuda().bool()).sum(), torch.tensor(label.numel(), device="cuda")])
    dist.all_reduce(hits)
    return (hits[0] / hits[1]).item()


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    train, val = split(ChestXray("/data/nih"))
    model = DDP(densenet(outputs=14).cuda(), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=32, sampler=sampler, num_workers=6)
    val_loader = DataLoader(val, batch_size=32, sampler=DistributedSampler(val, shuffle=False))
    for epoch in range(20):
        sampler.set_epoch(epoch)
        model.train()
        for image, label in loader:
            optimizer.zero_grad()
            loss = F.binary_cross_entropy_with_logits(model(image.cuda()), label.cuda())
            loss.backward()
            optimizer.step()
        score = accuracy(model, val_loader)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {score:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
