import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader
from torchmetrics.detection import MeanAveragePrecision
from torchvision.models.detection import retinanet_resnet50_fpn_v2

from crowns.data import CrownDataset, collate


class TreeDetector(pl.LightningModule):
    def __init__(self, num_classes=2, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.model = retinanet_resnet50_fpn_v2(num_classes=num_classes)
        self.mean_precision = MeanAveragePrecision()
        self.boxes_seen = 0

    def training_step(self, batch, batch_idx):
        images, targets = batch
        losses = self.model(images, targets)
        loss = sum(losses.values())
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        images, targets = batch
        predictions = self.model(images)
        for prediction, target in zip(predictions, targets):
            if len(target["boxes"]) > 0:
                self.boxes_seen += len(target["boxes"])
                self.mean_precision.update([prediction], [target])

    def on_validation_epoch_end(self):
        if len(self.mean_precision.groundtruth_labels) > 0:
            result = self.mean_precision.compute()
            self.log("val_map", result["map"], sync_dist=True)
        self.mean_precision.reset()
        self.boxes_seen = 0

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)


def main():
    pl.seed_everything(7)
    train = DataLoader(CrownDataset("train.csv"), batch_size=4, shuffle=True, collate_fn=collate, num_workers=4)
    val = DataLoader(CrownDataset("val.csv"), batch_size=4, collate_fn=collate, num_workers=4)
    trainer = pl.Trainer(max_epochs=40, accelerator="gpu", devices=4, strategy="ddp")
    trainer.fit(TreeDetector(), train, val)


if __name__ == "__main__":
    main()
