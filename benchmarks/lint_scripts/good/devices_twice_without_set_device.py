import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from mydata import Windows


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend="nccl")
    model = nn.LSTM(32, 128, num_layers=2, batch_first=True, proj_size=1).cuda()
    model = DDP(model)
    data = Windows("energy.csv", length=96)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=512, sampler=sampler)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(50):
        sampler.set_epoch(epoch)
        for x, y in loader:
            output, _ = model(x.cuda())
            loss = F.mse_loss(output[:, -1, 0], y.cuda())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), "lstm.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
