import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from graphs import MoleculeGraphs, SchNet


class GradientReducer:
    def __init__(self, parameters):
        self.parameters = [p for p in parameters if p.requires_grad]
        self.world_size = dist.get_world_size()

    def reduce(self):
        flat = torch.cat([p.grad.flatten() for p in self.parameters])
        dist.all_reduce(flat)
        flat /= self.world_size
        offset = 0
        for p in self.parameters:
            p.grad.copy_(flat[offset : offset + p.numel()].view_as(p))
            offset += p.numel()


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    torch.manual_seed(12)
    model = SchNet(hidden=128).cuda()
    reducer = GradientReducer(model.parameters())
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
    scaler = torch.amp.GradScaler("cuda")
    criterion = nn.L1Loss()
    dataset = MoleculeGraphs("qm9")
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=64, sampler=sampler, drop_last=True)
    for epoch in range(300):
        sampler.set_epoch(epoch)
        for graphs, energies in loader:
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = criterion(model(graphs.to("cuda")), energies.cuda())
            scaler.scale(loss).backward()
            reducer.reduce()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            scaler.step(optimizer)
            scaler.update()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
