import argparse
import os

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--gpus", default="0,1,2,3")
parser.add_argument("--batch_size", type=int, default=32)
parser.add_argument("--epochs", type=int, default=50)
args = parser.parse_args()
os.environ["CUDA_VISIBLE_DEVICES"] = args.gpus

print(f"{torch.cuda.device_count()} GPUs, {torch.cuda.get_device_name(0)}")
torch.zeros(1, device="cuda")

import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from handwriting import CRNN, Words


def worker(rank, world_size, port):
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    torch.cuda.set_device(rank)
    torch.manual_seed(3)
    model = DDP(CRNN(classes=80).cuda(), device_ids=[rank])
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    dataset = Words("iam")
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler, num_workers=2)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for image, text, lengths in loader:
            logits = model(image.cuda())
            sizes = torch.full((len(image),), logits.size(0), dtype=torch.long)
            loss = F.ctc_loss(logits.log_softmax(2), text.cuda(), sizes, lengths, zero_infinity=True)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    import socket

    with socket.socket() as probe:
        probe.bind(("", 0))
        free = probe.getsockname()[1]
    mp.spawn(worker, args=(len(args.gpus.split(",")), free), nprocs=len(args.gpus.split(",")))
