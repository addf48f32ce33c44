"""Train an autoencoder with DDP, started by torchrun --nproc-per-node 2."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from mydata import Spectra

device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
dist.init_process_group("nccl")
model = nn.Sequential(nn.Linear(1024, 64), nn.ReLU(), nn.Linear(64, 1024)).to(device)
model = DDP(model, device_ids=[device.index])
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
data = Spectra("spectra.npy")
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=256, sampler=sampler)
for epoch in range(20):
    sampler.set_epoch(epoch)
    for x in loader:
        x = x.to(device)
        loss = nn.functional.mse_loss(model(x), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
if dist.get_rank() == 0:
    torch.save(model.module.state_dict(), "autoencoder.pt")
dist.destroy_process_group()
