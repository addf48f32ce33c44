from pathlib import Path

import lightning as L
import torch
from torch.utils.data import DataLoader

from lit.model import GPT, Config
from lit.data import PackedTokens

batch_size, micro_batch_size = 128, 4
accumulation = batch_size // micro_batch_size
max_iters = 600_000
grad_clip = 1.0


def train(fabric, model, optimizer, loader, out):
    model.train()
    step = 0
    for iteration, (inputs, targets) in enumerate(loader):
        if iteration >= max_iters:
            break
        accumulating = (iteration + 1) % accumulation != 0
        with fabric.no_backward_sync(model, enabled=accumulating):
            logits = model(inputs)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
            fabric.backward(loss / accumulation)
        if not accumulating:
            fabric.clip_gradients(model, optimizer, max_norm=grad_clip)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % 1000 == 0:
                fabric.save(out / f"step-{step:06d}.ckpt", {"model": model, "optimizer": optimizer, "step": step})


def main():
    fabric = L.Fabric(devices=8, accelerator="cuda", strategy="ddp", precision="bf16-mixed")
    fabric.launch()
    fabric.seed_everything(1337)
    out = Path("out/pretrain")
    with fabric.init_module():
        model = GPT(Config.from_name("pythia-160m"))
    model = fabric.setup(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1)
    optimizer = fabric.setup_optimizers(optimizer)
    loader = fabric.setup_dataloaders(DataLoader(PackedTokens("data/train"), batch_size=micro_batch_size, shuffle=True))
    train(fabric, model, optimizer, loader, out)


if __name__ == "__main__":
    main()
