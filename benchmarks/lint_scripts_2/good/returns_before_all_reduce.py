import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision.models import resnet50

from imagenet import folder


def log_epoch(rank, epoch, loss_sum, correct, count, writer):
    stats = torch.tensor([loss_sum, correct, count], device="cuda", dtype=torch.float64)
    dist.all_reduce(stats)
    if rank != 0:
        return
    writer.write(f"{epoch}\t{stats[0] / stats[2]:.4f}\t{stats[1] / stats[2]:.4f}\n")
    writer.flush()


def run(epochs=90):
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl", timeout=timedelta(minutes=20))
    rank = dist.get_rank()
    model = DDP(resnet50().cuda(), device_ids=[local_rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    train = folder("train")
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=64, sampler=sampler, num_workers=8, pin_memory=True)
    writer = open("log.tsv", "w") if rank == 0 else None
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        loss_sum = correct = count = 0
        for images, labels in loader:
            images, labels = images.cuda(non_blocking=True), labels.cuda(non_blocking=True)
            logits = model(images)
            loss = F.cross_entropy(logits, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss_sum += loss.item() * len(labels)
            correct += (logits.argmax(1) == labels).sum().item()
            count += len(labels)
        log_epoch(rank, epoch, loss_sum, correct, count, writer)
    dist.destroy_process_group()


if __name__ == "__main__":
    run()
