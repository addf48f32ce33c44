"""Fabric training of a pose estimator: the validation set is split off in the script."""
import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, random_split

from pose import HourglassNet, Poses


def validate(fabric, model, loader):
    model.eval()
    total = torch.zeros(2, device=fabric.device)
    with torch.no_grad():
        for image, heatmap in loader:
            total[0] += F.mse_loss(model(image), heatmap)
            total[1] += 1
    total = fabric.all_reduce(total, reduce_op="sum")
    model.train()
    return (total[0] / total[1]).item()


def main():
    fabric = Fabric(accelerator="cuda", devices=4, strategy="ddp", precision="bf16-mixed")
    fabric.launch()
    data = Poses("/data/mpii")
    held = len(data) // 10
    train, val = random_split(data, [len(data) - held, held])
    train_loader = fabric.setup_dataloaders(DataLoader(train, batch_size=16, shuffle=True, num_workers=2))
    val_loader = fabric.setup_dataloaders(DataLoader(val, batch_size=16, num_workers=2))
    model = HourglassNet(joints=16)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=2.5e-4)
    model, optimizer = fabric.setup(model, optimizer)

    best = float("inf")
    for epoch in range(100):
        for image, heatmap in train_loader:
            loss = F.mse_loss(model(image), heatmap)
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()
        value = validate(fabric, model, val_loader)
        fabric.print(f"epoch {epoch}: {value:.5f}")
        if value < best:
            best = value
            fabric.save("best.ckpt", {"model": model, "epoch": epoch})


if __name__ == "__main__":
    main()
