"""Two ranks, of which rank 0 alone calls a barrier: a hang that rankdoctor reports after about 8 seconds.

torchrun --nproc-per-node=2 examples/hang_on_one_rank.py
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from doctor import watch


def save_checkpoint(model: torch.nn.Module, path: str) -> None:
    """Save on rank 0. The barrier belongs below the condition, where every rank calls it."""
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), path)
        dist.barrier()


def main() -> None:
    """Train, and save after the 38th batch."""
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = [torch.randn(4, 8) for _ in range(100)]
    with watch(on_hang="abort") as run:
        run.model(model)
        for index, batch in enumerate(run.loader(batches)):
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if index == 37:
                save_checkpoint(model, "last.pt")
            run.step(loss=loss)


if __name__ == "__main__":
    main()
