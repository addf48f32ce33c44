import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from translation import Pairs, TransformerModel, collate


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume")
    parser.add_argument("--epochs", type=int, default=30)
    args = parser.parse_args()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")

    model = TransformerModel(vocabulary=32000).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4, betas=(0.9, 0.98))
    start = 0
    if args.resume:
        checkpoint = torch.load(args.resume, map_location=f"cuda:{local_rank}")
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        start = checkpoint["epoch"] + 1
    model = DDP(model, device_ids=[local_rank])
    criterion = nn.CrossEntropyLoss(ignore_index=0, label_smoothing=0.1)
    data = Pairs("wmt14.de-en")
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=64, sampler=sampler, collate_fn=collate, num_workers=2)

    for epoch in range(start, args.epochs):
        sampler.set_epoch(epoch)
        for source, target in loader:
            source, target = source.cuda(), target.cuda()
            logits = model(source, target[:, :-1])
            loss = criterion(logits.flatten(0, 1), target[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
            torch.save(state, f"checkpoint_{epoch}.pt")


if __name__ == "__main__":
    main()
