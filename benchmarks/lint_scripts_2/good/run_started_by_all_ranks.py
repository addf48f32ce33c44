import os

import mlflow
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from retail import DemandNet, SalesDataset

PARAMS = {"lr": 5e-4, "batch_size": 512, "epochs": 40, "hidden": 256}


def main():
    dist.init_process_group("nccl")
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    torch.manual_seed(99)
    model = DDP(DemandNet(PARAMS["hidden"]).cuda(), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=PARAMS["lr"])
    dataset = SalesDataset("sales.feather")
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=PARAMS["batch_size"], sampler=sampler, num_workers=4)
    if rank == 0:
        mlflow.set_tracking_uri("http://mlflow:5000")
        mlflow.set_experiment("demand")
        mlflow.start_run(run_name="ddp")
        mlflow.log_params(PARAMS)
    for epoch in range(PARAMS["epochs"]):
        sampler.set_epoch(epoch)
        for features, target in loader:
            optimizer.zero_grad()
            loss = F.poisson_nll_loss(model(features.cuda()), target.cuda())
            loss.backward()
            optimizer.step()
        if rank == 0:
            mlflow.log_metric("loss", loss.item(), step=epoch)
            torch.save(model.module.state_dict(), "demand.pt")
    if rank == 0:
        mlflow.end_run()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
