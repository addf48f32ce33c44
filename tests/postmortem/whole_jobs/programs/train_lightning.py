"""Trains a small module with Lightning's Trainer and DDP over Gloo; fails in the way that the variable FAULT names."""

import os

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping
from torch.utils.data import DataLoader, TensorDataset

FAULT = os.environ.get("FAULT", "")


class Regression(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)
        self.head = torch.nn.Linear(8, 1) if FAULT == "unused" else None

    def read_target(self, batch, batch_idx):
        if FAULT == "exception" and self.global_rank == 1 and batch_idx == 6:
            return torch.stack([batch[0].sum(), batch])
        return batch[0].sum(dim=1, keepdim=True)

    def training_step(self, batch, batch_idx):
        target = self.read_target(batch, batch_idx)
        loss = torch.nn.functional.mse_loss(self.layer(batch[0]), target)
        if FAULT == "nan" and batch_idx == 8:
            loss = loss * float("nan")
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def main():
    torch.set_num_threads(1)
    nodes = int(os.environ.get("SLURM_NNODES", "1"))
    devices = int(os.environ.get("SLURM_NTASKS_PER_NODE", "4"))
    extra = {"gpus": 4} if FAULT == "argument" else {}
    callbacks = [EarlyStopping("train_loss", check_finite=True)] if FAULT == "nan" else []
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        num_nodes=nodes,
        strategy="ddp",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        callbacks=callbacks,
        log_every_n_steps=1,
        **extra,
    )
    data = TensorDataset(torch.rand(40 * devices * nodes, 8))
    trainer.fit(Regression(), DataLoader(data, batch_size=4))


if __name__ == "__main__":
    main()
