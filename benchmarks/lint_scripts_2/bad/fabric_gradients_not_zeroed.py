import lightning as L
import torch
import torch.nn as nn
from lightning.fabric.strategies import FSDPStrategy
from torch.utils.data import DataLoader

from proteins import ProteinEncoder, SequenceDataset, mask_tokens


class Pretraining:
    def __init__(self, epochs=10, lr=4e-4):
        self.fabric = L.Fabric(accelerator="cuda", devices=4, strategy=FSDPStrategy(), precision="bf16-mixed")
        self.epochs, self.lr = epochs, lr

    def run(self):
        self.fabric.launch()
        self.fabric.seed_everything(17)
        model = self.fabric.setup_module(ProteinEncoder(layers=12, width=768))
        optimizer = self.fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=self.lr))
        loader = DataLoader(SequenceDataset("uniref50.fasta"), batch_size=32, shuffle=True, num_workers=4)
        loader = self.fabric.setup_dataloaders(loader)
        criterion = nn.CrossEntropyLoss(ignore_index=-100)
        for epoch in range(self.epochs):
            for index, tokens in enumerate(loader):
                inputs, labels = mask_tokens(tokens)
                logits = model(inputs)
                loss = criterion(logits.flatten(0, 1), labels.flatten())
                self.fabric.backward(loss)
                self.fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                if index % 100 == 0:
                    self.fabric.print(f"{epoch}/{index}: {loss.item():.3f}")
            self.fabric.save(f"encoder-{epoch}.ckpt", {"model": model})


if __name__ == "__main__":
    Pretraining().run()
