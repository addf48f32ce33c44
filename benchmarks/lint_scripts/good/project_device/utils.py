import os

import torch
import torch.distributed as dist


def setup_distributed():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if not dist.is_initialized():
        dist.init_process_group(backend="nccl")


def is_main():
    return dist.get_rank() == 0
