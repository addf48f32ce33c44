"""A loop that Accelerate prepared, with our tracker. ``python tracked.py FOLDER [KIND]``."""

import json
import random
import sys
import time
from pathlib import Path

import numpy
import torch
from accelerate import Accelerator
from loop import BATCH, Rows, net, states
from torch.utils.data import DataLoader


def tracker(folder, kind):
    """Ours; none in the job that it is compared with."""
    if kind == "bare":
        return None
    from doctor import DoctorTracker

    return [DoctorTracker(dirpath=folder / "own", every_n_steps=3, on_hang="abort")]


def train(folder, kind):
    """Train, and write down all steps; rank 1 stops (hang), takes longer (slow), or raises (crash);
    ``edited``: the program has ``doctor.watch``, too."""
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True, log_with=tracker(folder, kind))
    rank = accelerator.process_index
    for seed in (random.seed, numpy.random.seed, torch.manual_seed):
        seed(7 + rank)
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = DataLoader(Rows(), BATCH, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.init_trackers("project", config={"rate": 0.01})
    trace = []
    if kind == "edited":
        import doctor

        watch = doctor.watch(dirpath=folder / "edited").__enter__()
        watch.model(model)
        loader = watch.loader(loader)
    for epoch in range(25 if kind == "slow" else 2):
        for number, batch in enumerate(loader):
            if rank == 1 and kind == "slow":
                time.sleep(0.1)
            if rank == 1 and (epoch, number) == (1, 3) and kind == "hang":
                time.sleep(1000)
            if rank == 1 and (epoch, number) == (1, 3) and kind == "crash":
                raise ValueError("of rank 1")
            loss = model(batch).square().mean() + random.random()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            accelerator.log({"loss": loss.item()})
            trace.append((loss.item().hex(), states()))
    if kind == "edited":
        watch.__exit__(None, None, None)
    (folder / f"trace-{rank}.json").write_text(json.dumps(trace))
    accelerator.end_training()


if __name__ == "__main__":
    train(Path(sys.argv[1]), (sys.argv[2:] or ["plain"])[0])
