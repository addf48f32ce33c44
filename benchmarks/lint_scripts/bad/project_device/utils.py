import torch.distributed as dist


def setup_distributed():
    if not dist.is_initialized():
        dist.init_process_group(backend="nccl")


def is_main():
    return dist.get_rank() == 0
