import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from data import Reviews
from metrics import mean_over_ranks
from model import Sentiment


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    model = DDP(Sentiment().cuda(), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    data = Reviews("train.jsonl")
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=64, sampler=sampler, drop_last=True)
    for epoch in range(5):
        sampler.set_epoch(epoch)
        for step, (tokens, label) in enumerate(loader):
            loss = F.cross_entropy(model(tokens.cuda()), label.cuda())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 50 == 0:
                mean = mean_over_ranks(loss)
                if dist.get_rank() == 0:
                    print(f"step {step}: {mean:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
