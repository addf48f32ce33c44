"""A program of several ranks that fails as its first argument says: ``raise``, ``hang``, ``kill`` or not."""

import datetime
import os
import signal
import sys
import time

import torch
import torch.distributed as dist


def load_row(number):
    rows = {"pixels": number}
    return rows["label"]


def training_step(rank, number, fault):
    sample = torch.ones(4) * rank
    if number == 3:
        if fault == "raise" and rank == 2:
            load_row(number)
        if fault == "hang" and rank == 1:
            time.sleep(600)
        if fault == "kill" and rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(sample)


def main():
    for name, other in (("RANK", "SLURM_PROCID"), ("WORLD_SIZE", "SLURM_NTASKS")):
        os.environ.setdefault(name, os.environ.get(other, ""))
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=6))
    rank = dist.get_rank()
    for number in range(10):
        training_step(rank, number, sys.argv[1])
        print(f"step {number}: loss 0.{number}", flush=True)
    dist.destroy_process_group()


main()
