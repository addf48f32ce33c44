import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def validate(rank):
    if rank == 0:
        dist.barrier()


def train(rank):
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(100):
        loss = model(torch.ones(2, 4)).sum()
        loss.backward()
        optimizer.step()
        if step == 3:
            validate(rank)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(dist.get_rank())
