"""Hard-example mining: collect the worst samples of every rank after each epoch."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from models import build_model
from mydata import IndexedImages


def main():
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", local_rank))
    world_size = dist.get_world_size()
    model = DDP(build_model().cuda(), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    data = IndexedImages("/data/train")
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=32, sampler=sampler, num_workers=2, drop_last=True)

    for epoch in range(20):
        sampler.set_epoch(epoch)
        hard = []
        for index, image, label in loader:
            losses = F.cross_entropy(model(image.cuda()), label.cuda(), reduction="none")
            optimizer.zero_grad()
            losses.mean().backward()
            optimizer.step()
            hard += [(int(i), float(v)) for i, v in zip(index, losses.detach().cpu()) if v > 4.0]

        if len(hard) > 0:
            everyone = [None] * world_size
            dist.all_gather_object(everyone, hard)
            hard = [pair for part in everyone for pair in part]
        data.emphasize(index for index, _ in hard)
        if rank == 0:
            print(f"epoch {epoch}: {len(hard)} hard examples")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
