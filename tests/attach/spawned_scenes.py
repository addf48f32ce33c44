"""Starts the ranks of a scene by ``torch.multiprocessing.spawn``: their variables are set in Python alone."""

import os
import runpy
from pathlib import Path

import torch.multiprocessing

WORLD = 2


def start_rank(number):
    os.environ |= {"RANK": str(number), "WORLD_SIZE": str(WORLD)}
    runpy.run_path(str(Path(__file__).with_name("scenes.py")), run_name="__main__")


if __name__ == "__main__":
    torch.multiprocessing.spawn(start_rank, nprocs=WORLD)
