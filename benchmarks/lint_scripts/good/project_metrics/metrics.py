import torch.distributed as dist


def mean_over_ranks(value):
    """Average a scalar tensor over all ranks."""
    value = value.detach().clone()
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()
