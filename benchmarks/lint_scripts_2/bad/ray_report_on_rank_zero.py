import os
import tempfile

import ray.train
import ray.train.torch
import torch
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn
from torch.utils.data import DataLoader

from tabular import ChurnDataset


def train_loop(config):
    model = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Dropout(0.2), nn.Linear(512, 2))
    model = ray.train.torch.prepare_model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    loader = DataLoader(ChurnDataset("train.parquet"), batch_size=config["batch_size"], shuffle=True)
    loader = ray.train.torch.prepare_data_loader(loader)
    criterion = nn.CrossEntropyLoss()
    context = ray.train.get_context()

    for epoch in range(config["epochs"]):
        if context.get_world_size() > 1:
            loader.sampler.set_epoch(epoch)
        total = 0.0
        for features, labels in loader:
            optimizer.zero_grad()
            loss = criterion(model(features), labels)
            loss.backward()
            optimizer.step()
            total += loss.item()
        metrics = {"loss": total / len(loader), "epoch": epoch}
        if context.get_world_rank() == 0:
            with tempfile.TemporaryDirectory() as folder:
                torch.save(model.module.state_dict(), os.path.join(folder, "model.pt"))
                ray.train.report(metrics, checkpoint=Checkpoint.from_directory(folder))


def main():
    trainer = TorchTrainer(
        train_loop,
        train_loop_config={"lr": 1e-3, "batch_size": 256, "epochs": 20},
        scaling_config=ScalingConfig(num_workers=8, use_gpu=True),
        run_config=RunConfig(name="churn", storage_path="/mnt/shared/ray"),
    )
    result = trainer.fit()
    print(result.metrics)


if __name__ == "__main__":
    main()
