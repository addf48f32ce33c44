"""MNIST with DDP, started by torchrun."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision import datasets, transforms


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 32, 3)
        self.fc = nn.Linear(32 * 13 * 13, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv(x)), 2)
        return F.log_softmax(self.fc(x.flatten(1)), dim=1)


if __name__ == "__main__":
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", local_rank))
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
    if local_rank == 0:
        datasets.MNIST("./data", train=True, download=True)
    dist.barrier()
    train_data = datasets.MNIST("./data", train=True, download=False, transform=transform)
    sampler = DistributedSampler(train_data)
    loader = DataLoader(train_data, batch_size=64, sampler=sampler, pin_memory=True)
    model = DDP(Net().cuda(local_rank), device_ids=[local_rank])
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    for epoch in range(1, 15):
        sampler.set_epoch(epoch)
        for step, (data, target) in enumerate(loader):
            data, target = data.cuda(local_rank), target.cuda(local_rank)
            optimizer.zero_grad()
            loss = F.nll_loss(model(data), target)
            loss.backward()
            optimizer.step()
            if step % 100 == 0 and dist.get_rank() == 0:
                print(f"{epoch} {step} {loss.item():.4f}")
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), "mnist.pt")
    dist.destroy_process_group()
