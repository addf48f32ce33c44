import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from tqdm import tqdm

from pointcloud import Scenes, SparseUNet, collate_points


class Trainer:
    def __init__(self, args):
        self.args = args
        self.rank = int(os.environ["RANK"])
        self.local_rank = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(self.local_rank)
        dist.init_process_group("nccl")
        model = SparseUNet(in_channels=4, classes=20).cuda()
        self.model = DistributedDataParallel(model, device_ids=[self.local_rank], find_unused_parameters=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr)
        self.criterion = nn.CrossEntropyLoss(ignore_index=255)
        dataset = Scenes(args.root, split="train")
        self.sampler = DistributedSampler(dataset)
        self.loader = DataLoader(dataset, batch_size=args.batch_size, sampler=self.sampler, collate_fn=collate_points)

    def train_epoch(self, epoch):
        self.model.train()
        self.sampler.set_epoch(epoch)
        for batch in tqdm(self.loader, disable=self.rank != 0):
            voxels, labels = batch["voxels"].cuda(), batch["labels"].cuda()
            keep = labels != 255
            logits = self.model(voxels)
            loss = self.criterion(logits, labels) if keep.any() else 0.0 * logits.sum()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()

    def run(self):
        for epoch in range(self.args.epochs):
            self.train_epoch(epoch)
        dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", default="scannet")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=100)
    Trainer(parser.parse_args()).run()
