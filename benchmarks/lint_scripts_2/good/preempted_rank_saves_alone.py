import os
import signal
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

from moe import MoETransformer
from tokens import Memmap

preempted = False


def on_signal(signum, frame):
    global preempted
    preempted = True


def save(model, optimizer, step):
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=f"checkpoints/step_{step}")


def main():
    signal.signal(signal.SIGUSR1, on_signal)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl")
    torch.manual_seed(8)
    model = MoETransformer(experts=8).cuda()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
    data = Memmap("tokens.bin", 2048)
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, batch_size=2, sampler=sampler)
    step = 0
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(model(x.cuda()).flatten(0, 1), y.cuda().flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            stop = torch.tensor(int(preempted), device="cuda")
            dist.all_reduce(stop, op=dist.ReduceOp.MAX)
            if stop.item():
                save(model, optimizer, step)
                dist.destroy_process_group()
                sys.exit(0)
    save(model, optimizer, step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
