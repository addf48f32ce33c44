import os

import torch
import torch.distributed as dist
import torchvision
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision import transforms


def evaluate(model, loader, device):
    model.eval()
    correct = count = 0
    with torch.no_grad():
        for images, labels in loader:
            outputs = model(images.to(device))
            correct += (outputs.argmax(dim=1).cpu() == labels).sum().item()
            count += labels.size(0)
    model.train()
    return correct / count


def main():
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device(f"cuda:{local_rank}")
    torch.cuda.set_device(device)

    transform = transforms.ToTensor()
    train_set = torchvision.datasets.CIFAR10("./data", train=True, transform=transform)
    test_set = torchvision.datasets.CIFAR10("./data", train=False, transform=transform)
    sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, batch_size=128, sampler=sampler)
    test_loader = DataLoader(test_set, batch_size=256)

    model = torchvision.models.resnet18(num_classes=10).to(device)
    model = DDP(model, device_ids=[local_rank])
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    for epoch in range(10):
        sampler.set_epoch(epoch)
        for images, labels in train_loader:
            loss = criterion(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            accuracy = evaluate(model, test_loader, device)
            print(f"epoch {epoch}: accuracy {accuracy:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
