"""Data parallelism with all_reduce alone, after the tutorial on writing distributed applications."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision import datasets, transforms


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(784, 512)
        self.fc2 = nn.Linear(512, 10)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x):
        return self.fc2(self.dropout(F.relu(self.fc1(x.flatten(1)))))


def average_gradients(model):
    size = float(dist.get_world_size())
    for param in model.parameters():
        dist.all_reduce(param.grad.data, op=dist.ReduceOp.SUM)
        param.grad.data /= size


def run():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1234)
    model = Net()
    torch.manual_seed(1234 + rank)
    data = datasets.MNIST("/data/mnist", train=True, transform=transforms.ToTensor())
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=128, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    for epoch in range(10):
        sampler.set_epoch(epoch)
        epoch_loss = 0.0
        for x, target in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), target)
            epoch_loss += loss.item()
            loss.backward()
            average_gradients(model)
            optimizer.step()
        print("Rank", rank, "epoch", epoch, ":", epoch_loss / len(loader))


if __name__ == "__main__":
    run()
