"""Multi-task training: one loader per task, visited in turn."""
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from multitask import Encoder, TaskData

TASKS = ["sst2", "qnli", "rte"]


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    loaders = []
    for task in TASKS:
        data = TaskData(task)
        sampler = DistributedSampler(data, shuffle=True)
        loaders.append(DataLoader(data, batch_size=32, sampler=sampler, drop_last=True))
    model = DDP(Encoder(tasks=TASKS).cuda(), device_ids=[local_rank], find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)

    for epoch in range(5):
        for task, loader in zip(TASKS, loaders):
            for batch, labels in loader:
                batch = {name: value.cuda() for name, value in batch.items()}
                loss = model(task, batch, labels.cuda())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            if dist.get_rank() == 0:
                print(f"epoch {epoch} {task}: {loss.item():.3f}")
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), "multitask.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
