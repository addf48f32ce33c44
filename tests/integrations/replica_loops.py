"""Two ranks of DistributedDataParallel over Gloo in loops of the user's own, watched; forked after torch is loaded.

``python replica_loops.py FOLDER SHAPE…``: writes ``FOLDER/SHAPE/report.json`` and, for each rank,
``FOLDER/SHAPE/truth-RANK.json``: a digest of the parameters after every optimizer step.
"""

import contextlib
import hashlib
import json
import os
import random
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch._dynamo  # by optimizers: once, and not in both ranks
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import doctor
from tests.lab.forked_ranks import play_ranks
from tests.lab.ports import free_port

EVERY, STEPS = 5, 30


class Loop:
    """One rank. ``count``: whether ``w.step()`` is called."""

    def __init__(self, rank, watch, count=True):
        torch.manual_seed(1)
        self.rank, self.watch, self.count = rank, watch, count
        self.model = DistributedDataParallel(torch.nn.Linear(4, 4))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.rows = torch.Generator().manual_seed(100 + rank)
        self.truth = []
        watch.model(self.model)

    def loader(self, batches):
        """As many batches, another content on each rank."""
        return self.watch.loader([torch.randn(4, 4, generator=self.rows) for _ in range(batches)])

    def backward(self, batch, last=True):
        """Forward and backward pass; gradients are reduced where it is the ``last`` one before a step."""
        with contextlib.nullcontext() if last else self.model.no_sync():
            loss = self.model(batch).square().mean()
            loss.backward()
        return loss.detach()

    def step(self, loss, skips=False, counts=True):
        """An optimizer step."""
        if not skips:
            self.optimizer.step()
        self.optimizer.zero_grad()
        weights = b"".join(one.detach().numpy().tobytes() for one in self.model.parameters())
        self.truth.append(hashlib.sha256(weights).hexdigest()[:12])
        if self.count and counts:
            self.watch.step(loss=loss)


def micro_batches_by_rank(loop, each=None):
    """Rank 0 takes two batches a step, rank 1 three, as packed sequences do."""
    each = each or (2, 3)[loop.rank]
    for number, batch in enumerate(loop.loader(STEPS * each), 1):
        loss = loop.backward(batch, last=number % each == 0)
        if number % each == 0:
            loop.step(loss)


def early_break(loop):
    """Rank 1 leaves the first epoch after its last batch, rank 0 comes to the end of it."""
    for epoch in range(3):
        for number, batch in enumerate(loop.loader(11 if loop.rank and not epoch else 10), 1):
            loop.step(loop.backward(batch))
            if loop.rank and number == 10 and not epoch:
                break


def token_budget(loop):
    """Each rank breaks where its own budget is used up, and steps are even."""
    for _ in range(6):
        for number, batch in enumerate(loop.loader(20), 1):
            last = number == (5, 7)[loop.rank]
            loss = loop.backward(batch, last)
            if last:
                loop.step(loss)
                break


def uncounted(loop):
    """Nobody calls w.step()."""
    loop.count = False
    micro_batches_by_rank(loop, 1)


def uncounted_micro_batches(loop):
    """Nobody calls w.step(), and ranks take different numbers of batches."""
    loop.count = False
    micro_batches_by_rank(loop)


def counted_on_rank_0(loop):
    """Rank 0 alone calls w.step(), as with a logger."""
    loop.count = loop.rank == 0
    micro_batches_by_rank(loop, 1)


def long_micro_batches(loop):
    """Steps of 36 ms, in two batches on rank 0 and in three on rank 1, long enough to be timed."""
    each = (2, 3)[loop.rank]
    for number, batch in enumerate(loop.loader(130 * each), 1):
        time.sleep(0.036 / each)
        loss = loop.backward(batch, last=number % each == 0)
        if number % each == 0:
            loop.step(loss)


def slow_rank(loop, each=1):
    """Rank 1 takes 15 ms more in every batch."""
    for number, batch in enumerate(loop.loader(160 if each == 1 else 240), 1):
        time.sleep((0.02, 0.035)[loop.rank])
        loop.watch.mark("forward")
        loss = loop.model.module(batch).sum() * 0
        loop.watch.mark("backward")
        loss = loss + loop.backward(batch, last=number % each == 0)
        if number % each == 0:
            loop.step(loss)


def slow_rank_accumulating(loop):
    """The same, with gradients that are reduced in every eighth batch."""
    slow_rank(loop, 8)


def skipped(loop):
    """The optimizer of rank 1 does not step at times; w.step() is called."""
    for number, batch in enumerate(loop.loader(STEPS)):
        loop.step(loop.backward(batch), skips=loop.rank == 1 and number % 3 == 1)


def skipped_once_uncounted(loop):
    """The optimizer of rank 1 leaves one step out, and w.step() with it."""
    for number, batch in enumerate(loop.loader(STEPS)):
        skips = loop.rank == 1 and number == 2
        loop.step(loop.backward(batch), skips=skips, counts=not skips)


def never_steps(loop):
    """Rank 1 never steps, and never calls w.step()."""
    for batch in loop.loader(STEPS):
        loop.step(loop.backward(batch), skips=loop.rank == 1, counts=loop.rank == 0)


def other_checkpoint(loop):
    """Rank 1 loads other weights once the model is wrapped."""
    if loop.rank == 1:
        loop.model.module.load_state_dict({name: one + 1 for name, one in loop.model.module.state_dict().items()})
    micro_batches_by_rank(loop)


def averages(loop):
    """Each rank steps by itself, and the parameters are averaged after each seventh step."""
    with loop.model.no_sync():
        for number, batch in enumerate(loop.loader(STEPS), 1):
            loop.step(loop.backward(batch))
            for one in loop.model.parameters() if number % 7 == 0 else ():
                dist.all_reduce(one.data)
                one.data /= 2


SHAPES = {
    shape.__name__: shape
    for shape in (
        micro_batches_by_rank,
        early_break,
        token_budget,
        uncounted,
        uncounted_micro_batches,
        counted_on_rank_0,
        long_micro_batches,
        slow_rank,
        slow_rank_accumulating,
        skipped,
        skipped_once_uncounted,
        never_steps,
        other_checkpoint,
        averages,
    )
}


def be(rank, folder, names, port):
    """One of the ranks."""
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    for name in names:
        random.seed(1)
        with doctor.watch(dirpath=folder / name, every_n_steps=EVERY) as watch:
            loop = Loop(rank, watch)
            SHAPES[name](loop)
        threads = [one.name for one in threading.enumerate() if one.name.startswith("doctor-")]
        truth = {"truth": loop.truth, "threads": threads, "random": random.random()}
        (folder / name / f"truth-{rank}.json").write_text(json.dumps(truth))
        dist.barrier()
    dist.destroy_process_group()


def main(folder, names):
    """Fork the ranks, and wait for them; the status says whether all did well."""
    port = free_port()
    return 0 if play_ranks(2, lambda rank: be(rank, folder, names, port)) else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:] or [*SHAPES]))
