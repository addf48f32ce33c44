import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

from forecasting import Windows


class Forecaster(pl.LightningModule):
    def __init__(self, hidden=256, horizon=24):
        super().__init__()
        self.encoder = nn.LSTM(8, hidden, num_layers=2, batch_first=True)
        self.head = nn.Linear(hidden, horizon)

    def forward(self, x):
        states, _ = self.encoder(x)
        return self.head(states[:, -1])

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.huber_loss(self(x), y)
        self.log("train/loss", loss, on_step=True, on_epoch=False)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.huber_loss(self(x), y)
        self.log("val/loss", loss, on_epoch=True, prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def main():
    pl.seed_everything(2024, workers=True)
    train = DataLoader(Windows("train.npz"), batch_size=256, shuffle=True, num_workers=4)
    val = DataLoader(Windows("val.npz"), batch_size=256, num_workers=4)
    callbacks = [
        ModelCheckpoint(monitor="val/loss", mode="min", save_top_k=3),
        EarlyStopping(monitor="val/loss", patience=10),
    ]
    trainer = pl.Trainer(accelerator="gpu", devices=4, num_nodes=2, strategy="ddp", callbacks=callbacks, max_epochs=200)
    trainer.fit(Forecaster(), train, val)


if __name__ == "__main__":
    main()
