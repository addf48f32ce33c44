"""Train an image classifier with Lightning on 8 GPUs and keep the best checkpoint."""
import argparse

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
import torchvision
from pytorch_lightning.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder


class LitResNet(pl.LightningModule):
    def __init__(self, classes, lr):
        super().__init__()
        self.save_hyperparameters()
        self.model = torchvision.models.resnet50(num_classes=classes)

    def forward(self, x):
        return self.model(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        accuracy = (logits.argmax(dim=1) == y).float().mean()
        self.log("val/accuracy", accuracy, prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 90)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", default="/data/flowers")
    parser.add_argument("--lr", type=float, default=0.1)
    args = parser.parse_args()
    transform = transforms.Compose([transforms.Resize(256), transforms.CenterCrop(224), transforms.ToTensor()])
    train = ImageFolder(f"{args.data}/train", transform)
    val = ImageFolder(f"{args.data}/val", transform)
    trainer = pl.Trainer(
        accelerator="gpu",
        devices=8,
        strategy="ddp",
        max_epochs=90,
        callbacks=[ModelCheckpoint(monitor="val/accuracy", mode="max")],
    )
    trainer.fit(
        LitResNet(len(train.classes), args.lr),
        DataLoader(train, batch_size=64, shuffle=True, num_workers=4),
        DataLoader(val, batch_size=64, num_workers=4),
    )
