import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from detector import Detector, detection_loss
from voc import VOCDetection, collate


class Runner:
    def __init__(self, opt):
        self.opt = opt
        self.device = torch.device("cuda", opt.local_rank)
        self.model = Detector(num_classes=20).to(self.device)
        if opt.sync_bn:
            self.model = nn.SyncBatchNorm.convert_sync_batchnorm(self.model)
        self.model = nn.parallel.DistributedDataParallel(self.model, device_ids=[opt.local_rank])
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=opt.lr, momentum=0.937)
        dataset = VOCDetection(opt.data)
        self.sampler = DistributedSampler(dataset)
        self.loader = DataLoader(dataset, batch_size=opt.batch, sampler=self.sampler, collate_fn=collate, num_workers=8)

    def fit(self):
        for epoch in range(self.opt.epochs):
            self.sampler.set_epoch(epoch)
            for images, targets in self.loader:
                loss = detection_loss(self.model(images.to(self.device)), targets.to(self.device))
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
            if self.opt.rank == 0:
                torch.save(self.model.module.state_dict(), "last.pt")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", default="VOCdevkit")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--sync-bn", action="store_true")
    opt = parser.parse_args()
    opt.rank, opt.local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(opt.local_rank)
    dist.init_process_group("nccl")
    Runner(opt).fit()
    dist.destroy_process_group()
