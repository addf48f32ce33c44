"""Trains a small network with DeepSpeed on the CPU; fails in the way that the variable FAULT names."""

import os

import deepspeed
import torch

FAULT = os.environ.get("FAULT", "")
CONFIG = {
    "train_batch_size": 18 if FAULT == "batch" else 16,
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
    "steps_per_print": 2,
    "zero_optimization": {"stage": 0},
}


def main():
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    network = torch.nn.Linear(8, 1)
    engine, _, _, _ = deepspeed.initialize(model=network, model_parameters=network.parameters(), config=CONFIG)
    labels = {"cat": 0.0, "dog": 1.0}
    for step in range(10):
        name = "bird" if FAULT == "exception" and engine.global_rank == 3 and step == 6 else "dog"
        loss = (engine(torch.rand(4, 8)) - labels[name]).square().mean()
        engine.backward(loss)
        engine.step()
        if engine.global_rank == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
