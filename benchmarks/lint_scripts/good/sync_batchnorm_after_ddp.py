import os

import torch
import torch.distributed as dist
import torchvision
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from mydata import SegmentationData


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group(backend="nccl", init_method="env://")

    model = torchvision.models.segmentation.deeplabv3_resnet50(num_classes=21).cuda()
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model = DDP(model, device_ids=[local_rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
    criterion = nn.CrossEntropyLoss(ignore_index=255)

    data = SegmentationData("/data/voc", split="train", crop=513)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=2, sampler=sampler, num_workers=4, drop_last=True)
    scheduler = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=50, power=0.9)

    for epoch in range(50):
        sampler.set_epoch(epoch)
        model.train()
        for image, mask in loader:
            output = model(image.cuda(non_blocking=True))["out"]
            loss = criterion(output, mask.cuda(non_blocking=True))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        scheduler.step()
        if dist.get_rank() == 0:
            torch.save(model.module.state_dict(), f"deeplab_{epoch}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
