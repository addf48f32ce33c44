import argparse
import os

import torch
import torch.backends.cudnn as cudnn
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils import data
from torchvision.models.segmentation import deeplabv3_resnet50

from cityscapes import CityscapesTrain, CityscapesVal


def get_loaders(args):
    train_set, val_set = CityscapesTrain(args.root), CityscapesVal(args.root)
    if args.distributed:
        train_sampler = data.distributed.DistributedSampler(train_set)
        val_sampler = data.distributed.DistributedSampler(val_set, shuffle=False)
    else:
        train_sampler = data.RandomSampler(train_set)
        val_sampler = data.SequentialSampler(val_set)
    train_loader = data.DataLoader(train_set, batch_size=args.batch_size, shuffle=True, num_workers=8, drop_last=True)
    val_loader = data.DataLoader(val_set, batch_size=1, sampler=val_sampler, num_workers=4)
    return train_loader, train_sampler, val_loader


def train_one_epoch(model, loader, optimizer):
    model.train()
    for image, target in loader:
        output = model(image.cuda(non_blocking=True))["out"]
        loss = F.cross_entropy(output, target.cuda(non_blocking=True), ignore_index=255)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def main(args):
    args.distributed = int(os.environ.get("WORLD_SIZE", 1)) > 1
    args.gpu = int(os.environ.get("LOCAL_RANK", 0))
    torch.cuda.set_device(args.gpu)
    cudnn.benchmark = True
    if args.distributed:
        dist.init_process_group(backend="nccl")
    model = deeplabv3_resnet50(num_classes=19).cuda()
    if args.distributed:
        model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
        model = DistributedDataParallel(model, device_ids=[args.gpu])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    train_loader, train_sampler, val_loader = get_loaders(args)
    for epoch in range(args.epochs):
        if args.distributed:
            train_sampler.set_epoch(epoch)
        train_one_epoch(model, train_loader, optimizer)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", default="/data/cityscapes")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=80)
    main(parser.parse_args())
