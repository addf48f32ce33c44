import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision import datasets, models, transforms

from utils import is_main, setup_distributed


def main():
    setup_distributed()
    transform = transforms.Compose([transforms.RandomResizedCrop(224), transforms.ToTensor()])
    data = datasets.ImageFolder("/data/pets/train", transform)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=64, sampler=sampler, num_workers=4)
    model = DDP(models.resnet34(num_classes=37).cuda())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(40):
        sampler.set_epoch(epoch)
        for image, label in loader:
            loss = F.cross_entropy(model(image.cuda()), label.cuda())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if is_main():
            torch.save(model.module.state_dict(), "pets.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
