"""Speech commands with DDP; loaders and the loop are functions of their own."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from audio import KeywordNet, SpeechCommands, pad_batch


def make_loader(split, batch_size):
    data = SpeechCommands("/data/speech_commands", split)
    sampler = DistributedSampler(data, shuffle=split == "train")
    return DataLoader(data, batch_size=batch_size, sampler=sampler, collate_fn=pad_batch, num_workers=2)


def train_one_epoch(model, loader, optimizer, device):
    model.train()
    for waveform, label in loader:
        loss = F.cross_entropy(model(waveform.to(device)), label.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def main():
    dist.init_process_group("nccl")
    device = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(device)
    train_loader = make_loader("train", 128)
    model = DDP(KeywordNet(classes=35).to(device), device_ids=[device])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(60):
        loss = train_one_epoch(model, train_loader, optimizer, device)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {loss:.4f}")
            torch.save(model.module.state_dict(), "keywords.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
