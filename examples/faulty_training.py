"""A training script with three faults that show on more than one rank, as input for `doctor lint`."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


def train(model: torch.nn.Module, dataset: Dataset[torch.Tensor], epochs: int) -> None:
    """Train with DDP."""
    dist.init_process_group("nccl")
    model = DistributedDataParallel(model.cuda())
    optimizer = torch.optim.AdamW(model.parameters())
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=32, sampler=sampler)
    for _ in range(epochs):
        for batch in loader:
            loss = model(batch.cuda()).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if dist.get_rank() == 0:
            dist.all_reduce(loss)
            print("mean loss", loss.item() / dist.get_world_size())
