"""Train a parser on sentences of very different lengths."""
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from parsing import BiaffineParser, Treebank, collate


def train_epoch(model, loader, optimizer, device):
    model.train()
    for words, heads in loader:
        optimizer.zero_grad()
        try:
            loss = model(words.to(device), heads.to(device))
            loss.backward()
        except torch.cuda.OutOfMemoryError:
            print(f"skipping a batch of shape {tuple(words.shape)}")
            torch.cuda.empty_cache()
            continue
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    data = Treebank("ptb/train.conllx", max_length=256)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=64, sampler=sampler, collate_fn=collate)
    model = DDP(BiaffineParser(data.vocabulary).to(device), device_ids=[local_rank])
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, betas=(0.9, 0.9))
    for epoch in range(100):
        sampler.set_epoch(epoch)
        train_epoch(model, loader, optimizer, device)
        if dist.get_rank() == 0:
            torch.save(model.module.state_dict(), "parser.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
