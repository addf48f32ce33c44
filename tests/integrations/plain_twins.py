"""Loops of the user's own that leave a trace of everything a doctor might disturb; as a program, on two ranks.

``python plain_twins.py FOLDER KIND…``: each kind once with the doctor and once without, each time in two forked
processes; writes ``FOLDER/KIND-WATCHED-RANK.json``. Nothing that the doctor imports is loaded before the fork.
"""

import contextlib
import hashlib
import json
import os
import random
import sys
import threading
from datetime import timedelta
from pathlib import Path

import torch
import torch._dynamo  # by optimizers: once, and not in every child
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from tests.lab.forked_ranks import play_ranks
from tests.lab.ports import free_port

try:
    from torch.distributed.fsdp import fully_shard
except ImportError:  # torch before 2.6
    fully_shard = None

ROWS, BATCH = 48, 4


class Rows(torch.utils.data.Dataset):
    """Rows that depend on the sources of random numbers."""

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        return torch.rand(8) + random.random() + index


class Unwatched:
    """What a loop sees without the doctor."""

    def model(self, module):
        """Nothing is told."""

    def loader(self, loader):
        """The loader itself."""
        return loader

    def step(self, loss):
        """Nothing is told."""


def net():
    """Small, with dropout."""
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))


def plain_ddp(watch):
    """DistributedDataParallel, shuffled."""
    sampler = DistributedSampler(Rows())
    return train(watch, DistributedDataParallel(net()), DataLoader(Rows(), BATCH, sampler=sampler), sampler)


def fsdp2(watch):
    """fully_shard over gloo."""
    model = net()
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=dist.init_device_mesh("cpu", (2,)))
    sampler = DistributedSampler(Rows())
    return train(watch, model, DataLoader(Rows(), BATCH, sampler=sampler), sampler)


def train(watch, model, loader, sampler):
    """Two epochs; what is left of them."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    watch.model(model)
    losses = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for batch in watch.loader(loader):
            loss = model(batch).square().mean() + random.random()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item().hex())
            watch.step(loss=loss)
    return model, losses


def accelerated(watch):
    """A loop that Accelerate prepared, with accumulation."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Rows(), BATCH, shuffle=True))
    watch.model(model)
    losses = []
    for batch in watch.loader(loader):
        with accelerator.accumulate(model):
            loss = model(batch).square().mean() + random.random()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item().hex())
        if accelerator.sync_gradients:
            watch.step(loss=loss)
    return model, losses


KINDS = {"plain_ddp": plain_ddp, "fsdp2": fsdp2, "accelerated": accelerated}


def digest(data):
    """Of bytes."""
    return hashlib.sha256(data).hexdigest()


def be(kind, watched, rank, port, folder):
    """One of the ranks."""
    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    random.seed(7 + rank)
    torch.manual_seed(7)
    if watched:
        import doctor

        opened = doctor.watch(dirpath=folder / f"{kind}-doctor", every_n_steps=2)
    else:
        opened = contextlib.nullcontext(Unwatched())
    with opened as watch:
        model, losses = KINDS[kind](watch)
    parameters = [getattr(one, "_local_tensor", one).detach() for one in model.parameters()]
    traces = {
        "python": digest(repr(random.getstate()).encode()),
        "torch": digest(torch.get_rng_state().numpy().tobytes()),
        "parameters": digest(b"".join(one.numpy().tobytes() for one in parameters)),
        "losses": losses,
        "threads": [one.name for one in threading.enumerate() if one.name.startswith("doctor-")],
    }
    (folder / f"{kind}-{watched}-{rank}.json").write_text(json.dumps(traces))
    dist.barrier()
    dist.destroy_process_group()


def pair(kind, watched, folder):
    """Two ranks; whether both did well."""
    port = free_port()
    return play_ranks(2, lambda rank: be(kind, watched, rank, port, folder))


if __name__ == "__main__":
    torch.set_num_threads(1)
    if "accelerated" in sys.argv:
        import accelerate  # noqa: F401 - once, before the forks
    done = [pair(kind, watched, Path(sys.argv[1])) for kind in sys.argv[2:] for watched in (True, False)]
    sys.exit(not all(done))
