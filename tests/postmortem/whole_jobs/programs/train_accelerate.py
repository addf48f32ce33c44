"""Trains a small network with Accelerate; fails in the way that the variable FAULT names."""

import os
import sys

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from torch.utils.data import DataLoader, TensorDataset

FAULT = os.environ.get("FAULT", "")


def main():
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    logger = get_logger("train", log_level="INFO")
    network = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(torch.rand(160, 8)), batch_size=4)
    network, optimizer, loader = accelerator.prepare(network, optimizer, loader)
    accelerator.print(f"training on {accelerator.num_processes} processes")
    for step, (features,) in enumerate(loader, 1):
        if FAULT == "exit" and accelerator.process_index == 2 and step == 6:
            print("no more quota for this project, stopping", file=sys.stderr)
            sys.exit(1)
        if FAULT == "shape" and accelerator.process_index == 3 and step == 6:
            features = features[:, :7]
        loss = network(features).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.print(f"step {step}/{len(loader)} loss {loss.item():.4f}")
    accelerator.wait_for_everyone()
    accelerator.print("training finished")
    accelerator.end_training()
    logger.info("done")


if __name__ == "__main__":
    main()
