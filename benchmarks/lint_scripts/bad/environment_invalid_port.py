import os
import random

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from speech import Synthesizer, TextAudio, collate


def run(rank, count):
    dist.init_process_group("nccl", init_method="env://", rank=rank, world_size=count)
    torch.cuda.set_device(rank)
    torch.manual_seed(1234)
    data = TextAudio("filelists/train.txt")
    sampler = DistributedSampler(data, num_replicas=count, rank=rank, shuffle=True)
    loader = DataLoader(data, batch_size=32, sampler=sampler, collate_fn=collate, num_workers=2)
    model = DDP(Synthesizer().cuda(rank), device_ids=[rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
    for epoch in range(1000):
        sampler.set_epoch(epoch)
        for text, audio in loader:
            loss = F.l1_loss(model(text.cuda(rank)), audio.cuda(rank))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            torch.save(model.module.state_dict(), "synthesizer.pt")


def main():
    count = torch.cuda.device_count()
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ["MASTER_PORT"] = "80000"
    mp.spawn(run, nprocs=count, args=(count,))


if __name__ == "__main__":
    main()
