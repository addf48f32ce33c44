import os

import lightning as L
import torch

from segmentation import LitUNet, SegmentationModule

os.environ.setdefault("NCCL_P2P_LEVEL", "NVLINK")


def main():
    torch.set_float32_matmul_precision("high")
    L.seed_everything(1)
    data = SegmentationModule("/data/cityscapes", batch_size=8)
    trainer = L.Trainer(
        accelerator="gpu",
        devices=8,
        strategy="ddp",
        precision="bf16-mixed",
        max_epochs=80,
    )
    trainer.fit(LitUNet(classes=19), datamodule=data)


if __name__ == "__main__":
    main()
