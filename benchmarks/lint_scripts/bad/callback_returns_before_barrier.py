import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader

from mydata import Features


class ExportWeights(Callback):
    """Write the weights in a form of their own after each validation."""

    def __init__(self, path):
        self.path = path

    def on_validation_epoch_end(self, trainer, pl_module):
        if trainer.global_rank != 0:
            return
        torch.save(pl_module.network.state_dict(), self.path)
        trainer.strategy.barrier()


class Model(L.LightningModule):
    def __init__(self, width=512):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(128, width), nn.GELU(), nn.Linear(width, 10))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.network(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", F.cross_entropy(self.network(x), y), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main():
    train = DataLoader(Features("train"), batch_size=256, shuffle=True, num_workers=2)
    val = DataLoader(Features("val"), batch_size=256, num_workers=2)
    trainer = L.Trainer(
        accelerator="gpu", devices=4, strategy="ddp", max_epochs=20, callbacks=[ExportWeights("network.pt")]
    )
    trainer.fit(Model(), train, val)


if __name__ == "__main__":
    main()
