"""Rank 1 sleeps while the others wait in all_reduce."""

import sys
import time

import torch
import torch.distributed as dist


def read_shard(path):
    print("asleep", flush=True)
    time.sleep(600)


def train(rank):
    weights = torch.ones(4)
    dist.all_reduce(weights)
    if rank == 1:
        read_shard("/data/shard-17")
    dist.all_reduce(weights)


if __name__ == "__main__":
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=int(sys.argv[2]), world_size=3)
    train(dist.get_rank())
