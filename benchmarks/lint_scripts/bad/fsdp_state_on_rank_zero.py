"""FSDP fine-tuning of a vision transformer with a full checkpoint at the end of each epoch."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchvision
from torch.distributed.fsdp import FullStateDictConfig, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision.models.vision_transformer import EncoderBlock

from mydata import Photos


def save(model, rank, path):
    config = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    if rank == 0:
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
            state = model.state_dict()
        torch.save(state, path)


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    model = torchvision.models.vit_l_16(weights=None, num_classes=1000)
    model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({EncoderBlock}), device_id=local_rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.05)
    data = Photos("/data/photos")
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32, sampler=sampler, num_workers=4, drop_last=True)
    for epoch in range(12):
        sampler.set_epoch(epoch)
        for image, label in loader:
            loss = F.cross_entropy(model(image.cuda()), label.cuda(), label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        save(model, rank, f"vit_{epoch}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
