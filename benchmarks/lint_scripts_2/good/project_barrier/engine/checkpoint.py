import os

import torch

from .comm import is_main_process, synchronize


class Checkpointer:
    def __init__(self, model, optimizer, folder):
        self.model = model
        self.optimizer = optimizer
        self.folder = folder

    def save(self, iteration):
        if is_main_process():
            path = os.path.join(self.folder, f"model_{iteration:07d}.pth")
            torch.save({"model": self.model.module.state_dict(), "iteration": iteration}, path)
        synchronize()
