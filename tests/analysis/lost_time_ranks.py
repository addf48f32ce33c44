"""Two ranks of DistributedDataParallel over Gloo whose loops lose time in known ways; forked after torch is loaded.

``python lost_time_ranks.py FOLDER SHAPE…``: writes ``FOLDER/SHAPE/report.json`` and, for each rank,
``FOLDER/SHAPE/truth-RANK.json``: the seconds that were planted, on the clock of the rank itself, and the seconds from
its first batch to its end.
"""

import json
import os
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch._dynamo  # by optimizers: once, and not in both ranks
import torch.distributed as dist
from torch.autograd import backward
from torch.nn.parallel import DistributedDataParallel

import doctor
from tests.lab.forked_ranks import play_ranks
from tests.lab.ports import free_port

BATCHES, WORK, DELAY, LONG = 64, 0.015, 0.03, 0.6
"""Steps of a run; seconds of work in each, of what makes each slower, and of what is done now and then."""


class Batches:
    """Batches of a loader that is slow on one rank."""

    def __init__(self, loop, delay):
        self.loop, self.delay = loop, delay

    def __len__(self):
        return BATCHES

    def __iter__(self):
        for number in range(BATCHES):
            if self.delay:
                self.loop.lose(self.delay, counts=number > 0)  # the time before the first batch is not counted
            yield torch.ones(4, 4)


class Loop:
    """One rank. ``marks``: the loop marks its passes; else its backward pass is not seen either, because it is called
    by a name that was bound before."""

    def __init__(self, rank, watch, *, marks=True, loader=0.0):
        self.rank, self.watch, self.marks = rank, watch, marks
        self.model = DistributedDataParallel(torch.nn.Linear(4, 4))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.loader = Batches(self, loader)
        self.planted, self.began = 0.0, None
        watch.model(self.model)

    def lose(self, seconds, *, counts=True):
        began = time.perf_counter()
        time.sleep(seconds)
        self.planted += (time.perf_counter() - began) * counts

    def mark(self, point):
        if self.marks:
            self.watch.mark(point)

    def batches(self):
        for number, batch in enumerate(self.watch.loader(self.loader)):
            if self.began is None:
                self.began = time.perf_counter()
            yield number, batch

    def step(self, batch, slower=0.0):
        loss = self.model(batch).square().mean()
        time.sleep(WORK)
        if slower:
            self.lose(slower)
        if self.marks:
            self.watch.mark("backward")
            loss.backward()
        else:
            backward(loss)
        self.mark("optimizer")
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.watch.step(loss=loss.detach())
        self.mark("batch-end")


def healthy(rank, watch):
    """Nothing is lost on purpose."""
    loop = Loop(rank, watch)
    for _, batch in loop.batches():
        loop.step(batch)
    return loop


def slow_loader(rank, watch):
    """Rank 1 waits for each batch; no pass is marked."""
    loop = Loop(rank, watch, marks=False, loader=DELAY * rank)
    for _, batch in loop.batches():
        loop.step(batch)
    return loop


def slow_rank(rank, watch, marks=True):
    """Rank 1 is slower in the forward pass."""
    loop = Loop(rank, watch, marks=marks)
    for _, batch in loop.batches():
        loop.step(batch, DELAY * rank)
    return loop


def slow_rank_unmarked(rank, watch):
    """The same; no pass is marked."""
    return slow_rank(rank, watch, marks=False)


def long_checkpoint(rank, watch):
    """Rank 0 alone writes a checkpoint now and then."""
    loop = Loop(rank, watch)
    for number, batch in loop.batches():
        loop.step(batch)
        if rank == 0 and number % 20 == 15:  # the last batch of a span and others
            watch.mark("checkpoint")
            loop.lose(LONG)
    return loop


def lone_evaluation(rank, watch):
    """Rank 0 alone evaluates now and then."""
    loop = Loop(rank, watch)
    for number, batch in loop.batches():
        loop.step(batch)
        if rank == 0 and number % 20 == 15:
            for _ in watch.loader([0, 1], stage="validate"):
                loop.lose(LONG / 2)
    return loop


def early_end(rank, watch):
    """Rank 0 works on after the last step of all, and rank 1 has ended."""
    loop = Loop(rank, watch)
    for _, batch in loop.batches():
        loop.step(batch)
    if rank == 0:
        loop.lose(3 * LONG)
    return loop


SHAPES = {
    one.__name__: one
    for one in (healthy, slow_loader, slow_rank, slow_rank_unmarked, long_checkpoint, lone_evaluation, early_end)
}


def be(rank, folder, names, port):
    """Run the shapes as one rank, each as a run of its own."""
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1")
    os.environ["MASTER_PORT"] = str(port)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    threading.current_thread().name = f"rank {rank}"
    for name in names:
        own = folder / name
        own.mkdir(parents=True, exist_ok=True)
        with doctor.watch(dirpath=own) as watch:
            loop = SHAPES[name](rank, watch)
            seconds = time.perf_counter() - loop.began
        truth = {"planted": loop.planted, "seconds": seconds}
        (own / f"truth-{rank}.json").write_text(json.dumps(truth))
        dist.barrier()
    dist.destroy_process_group()


def main(folder, names):
    """Fork the ranks, and wait for them; the status says whether all did well."""
    port = free_port()
    return 0 if play_ranks(2, lambda rank: be(rank, folder, names, port)) else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:] or [*SHAPES]))
