import lightning as L
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from torchvision.models import efficientnet_b0

from plants import PlantImages


def evaluate(fabric, model, loader):
    model.eval()
    total, count = 0.0, 0
    with torch.no_grad():
        for images, labels in loader:
            total += F.cross_entropy(model(images), labels, reduction="sum").item()
            count += len(labels)
    mean = total / count
    return mean


def main():
    fabric = L.Fabric(accelerator="cuda", devices=4, strategy="ddp", precision="bf16-mixed")
    fabric.launch()
    fabric.seed_everything(3407)
    model = efficientnet_b0(num_classes=47)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    model, optimizer = fabric.setup(model, optimizer)
    train = DataLoader(PlantImages("train"), batch_size=64, shuffle=True, num_workers=4)
    val = DataLoader(PlantImages("val"), batch_size=64, num_workers=4)
    train, val = fabric.setup_dataloaders(train, val)

    best, since = float("inf"), 0
    for epoch in range(100):
        model.train()
        for images, labels in train:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            fabric.backward(loss)
            optimizer.step()
        val_loss = evaluate(fabric, model, val)
        fabric.print(f"epoch {epoch}: {val_loss:.4f}")
        if val_loss < best:
            best, since = val_loss, 0
        else:
            since += 1
        if since > 8:
            break
    fabric.save("last.ckpt", {"model": model})


if __name__ == "__main__":
    main()
