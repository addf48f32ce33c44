"""Two-stage image classifier: a backbone and a head, trained with DDP."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import torchvision
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision import transforms


class Classifier(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.backbone = torchvision.models.resnet18(num_classes=256)
        self.head = nn.Linear(256, classes)

    def forward(self, x):
        return self.head(F.relu(self.backbone(x)))


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    model = DDP(Classifier(100).cuda(local_rank), device_ids=[local_rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    transform = transforms.Compose([transforms.RandomResizedCrop(224), transforms.ToTensor()])
    data = torchvision.datasets.ImageFolder("/data/imagenet100/train", transform)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=64, sampler=sampler, num_workers=4, drop_last=True)

    for epoch in range(30):
        sampler.set_epoch(epoch)
        model.train()
        for images, labels in loader:
            images, labels = images.cuda(local_rank), labels.cuda(local_rank)
            optimizer.zero_grad()
            logits = model(images)
            loss = F.cross_entropy(logits, labels)
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {loss.item():.3f}")
            torch.save(model.module.state_dict(), "classifier.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
