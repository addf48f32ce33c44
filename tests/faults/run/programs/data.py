"""Loaders and samplers that differ between ranks, or don't where they should."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, Sampler, SequentialSampler

from tests.faults.run.programs.parts import AT, BATCH, BEAT, LONG, Net, Rows, Stream, rows, shard, stream
from tests.faults.run.role import Role

BATCHES = 10


class LogsEpoch(Net):
    """Logs with sync at the end of each epoch."""

    def training_step(self, batch: torch.Tensor, index: int) -> Any:
        loss = super().training_step(batch, index)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        if index == BATCHES - 1:
            self.role.stops()
        return loss


class GathersInValidation(Net):
    """Gathers in every batch of validation."""

    def validation_step(self, batch: torch.Tensor, index: int, dataloader_idx: int = 0) -> Any:
        if index == BATCHES - 1:
            self.role.stops()
        return self.all_gather(self.layer(batch).mean())


def uneven_map(role: Role) -> None:
    """One more batch on rank 1: steps pair in silence with another epoch's, and the last one has no peer."""
    role.fit(Net(role), shard(BATCHES + role.guilty, role), use_distributed_sampler=False)


def uneven_map_logged(role: Role) -> None:
    """The same, and a collective at the epoch's end, where they hang."""
    role.fit(LogsEpoch(role), shard(BATCHES + role.guilty, role), use_distributed_sampler=False)


def uneven_stream(role: Role) -> None:
    """Streams of unknown length; rank 1 ends a batch earlier than the others."""
    role.fit(Net(role, pause=BEAT), stream(BATCHES - role.guilty, role))


def uneven_stream_logged(role: Role) -> None:
    """The same, and a collective at the epoch's end, where they hang."""
    role.fit(LogsEpoch(role), stream(BATCHES + 1 - role.guilty, role))


def uneven_validation(role: Role) -> None:
    """One more batch of validation on rank 1, and a collective in each."""
    options: dict[str, Any] = {"use_distributed_sampler": False, "num_sanity_val_steps": 0}
    role.fit(GathersInValidation(role), shard(BATCHES, role), shard(BATCHES + role.guilty, role), **options)


def uneven_batch_sampler(role: Role) -> None:
    """A batch sampler of the user's own that makes fewer batches on rank 1."""
    size = BATCH * 2 if role.guilty else BATCH
    data = Rows(BATCH * BATCHES, role.rank * 10_000)
    sampler = BatchSampler(SequentialSampler(data), size, drop_last=False)
    role.fit(Net(role), DataLoader(data, batch_sampler=sampler), use_distributed_sampler=False)


_LOCK = threading.Lock()


def _locked(number: int) -> None:
    """Take a lock that the dataset shares with a thread of the training process."""
    with _LOCK:
        pass


def lock_over_fork(role: Role) -> None:
    """A thread of the culprit holds a lock while workers are forked, whose rows need it: in the second epoch."""

    class Holds(Net):
        def on_train_epoch_start(self) -> None:
            if self.guilty and self.current_epoch == 1:
                role.stops()
                _LOCK.acquire()

        def training_step(self, batch: torch.Tensor, index: int) -> Any:
            return super().training_step(batch, index)

    data = Rows(BATCH * BATCHES, role.rank * 10_000, _locked)
    role.fit(Holds(role, pause=BEAT), DataLoader(data, BATCH, num_workers=1), use_distributed_sampler=False)


def batch_size(role: Role) -> None:
    """Twice the batch size on rank 2; all stop after as many batches."""
    size = BATCH * 2 if role.guilty else BATCH
    loader = DataLoader(Rows(size * BATCHES, role.rank * 10_000), batch_size=size)
    role.fit(Net(role), loader, use_distributed_sampler=False)


def no_sampler(role: Role) -> None:
    """The Trainer was told to leave samplers alone, and nobody else parts the data."""
    role.fit(Net(role), rows(BATCHES, role, shuffle=True), use_distributed_sampler=not role.planted)


def sampler_world(role: Role) -> None:
    """A sampler made for four ranks in a job of two."""
    replicas = 4 if role.planted else role.world
    data = Rows(BATCH * BATCHES * replicas)
    sampler: Any = DistributedSampler(data, num_replicas=replicas, rank=role.rank)
    role.fit(Net(role), DataLoader(data, BATCH, sampler=sampler))


def sampler_rank(role: Role) -> None:
    """A sampler that believes to be rank 0 everywhere, as where it is made before the ranks are known."""
    data = Rows(BATCH * BATCHES * role.world)
    sampler: Any = DistributedSampler(data, role.world, rank=0 if role.planted else role.rank)
    role.fit(Net(role), DataLoader(data, BATCH, sampler=sampler))


class Part(Sampler[int]):
    """Every ``of``-th row from ``part`` on; shuffled by ``seed``, identical in each epoch unless that is told."""

    def __init__(self, length: int, part: int, of: int, seed: int | None = None) -> None:
        self.numbers = list(range(part, length, of))
        self.seed = seed

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Iterator[int]:
        if self.seed is None:
            return iter(self.numbers)
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(self.seed))
        return iter([self.numbers[place] for place in order.tolist()])


class PartByEpoch(Part):
    """The same with the epoch in the seed."""

    def set_epoch(self, epoch: int) -> None:
        self.seed = epoch


def same_part(role: Role) -> None:
    """Ranks 1 and 2 read the same part of the data, by a sampler of the user's own."""
    data = Rows(BATCH * BATCHES * role.world)
    part = 1 if role.guilty else role.rank
    role.fit(
        Net(role), DataLoader(data, BATCH, sampler=Part(len(data), part, role.world)), use_distributed_sampler=False
    )


def same_order(role: Role) -> None:
    """A sampler of the user's own that shuffles alike in each epoch."""
    data = Rows(BATCH * BATCHES * role.world)
    kind = Part if role.planted else PartByEpoch
    sampler = kind(len(data), role.rank, role.world, seed=0)
    role.fit(Net(role), DataLoader(data, BATCH, sampler=sampler), max_epochs=3, use_distributed_sampler=False)


def same_order_in_a_loop(role: Role) -> None:
    """A plain loop with a DistributedSampler that nobody tells the epoch."""
    role.join()
    data = Rows(BATCH * BATCHES * role.world)
    sampler: Any = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, BATCH, sampler=sampler)
    with role.watch() as watch:
        for epoch in range(3):
            if not role.planted:
                sampler.set_epoch(epoch)
            for batch in watch.loader(loader):
                dist.all_reduce(batch.sum())
    dist.destroy_process_group()


def same_stream(role: Role) -> None:
    """A stream that nobody parts between ranks."""
    first = 0 if role.planted else role.rank * 10_000
    role.fit(Net(role), DataLoader(Stream(BATCH * BATCHES, first), batch_size=BATCH))


def many_workers(role: Role) -> None:
    """Three workers on each of two ranks that have two processors."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    role.fit(Net(role), rows(BATCHES, role, num_workers=3 if role.planted else 1), max_epochs=1)


def seeds(role: Role) -> None:
    """Rank 2 shuffles by another seed: parts overlap."""
    data = Rows(BATCH * BATCHES * role.world)
    sampler: Any = DistributedSampler(data, role.world, role.rank, shuffle=True, seed=7 if role.guilty else 0)
    role.fit(Net(role), DataLoader(data, BATCH, sampler=sampler))


def padded_validation(role: Role) -> None:
    """Nine rows of validation for two ranks: one counts twice."""
    validation = DataLoader(Rows(9 if role.planted else 8), batch_size=1)
    role.fit(Net(role), rows(BATCHES, role), validation)


def slow_row(role: Role) -> None:
    """One row takes for ever on rank 1, in the training process."""
    role.fit(Net(role), _with_slow_row(role, workers=0), use_distributed_sampler=False)


def slow_row_in_a_worker(role: Role) -> None:
    """The same in a data worker."""
    role.fit(Net(role), _with_slow_row(role, workers=1), use_distributed_sampler=False)


def _with_slow_row(role: Role, workers: int) -> Any:
    def meanwhile(number: int) -> None:
        if role.guilty and number == AT * BATCH:
            role.stops()
            _tokenize(LONG)

    return DataLoader(Rows(BATCH * BATCHES, role.rank * 10_000, meanwhile), BATCH, num_workers=workers)


def _tokenize(seconds: float) -> None:
    """What takes so long."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.05)


def slow_loader(role: Role) -> None:
    """Every rank waits for its rows for most of a step."""
    delay = 0.01 if role.planted else 0.0
    data = Rows(BATCH * 120 * role.world, meanwhile=lambda _: time.sleep(delay))
    role.fit(Net(role, pause=0.002), DataLoader(data, BATCH), max_epochs=1)


def slow_loader_on_one(role: Role) -> None:
    """Rank 1 waits for its rows, the others for rank 1."""
    delay = 0.01 if role.guilty else 0.0
    data = Rows(BATCH * 120 * role.world, meanwhile=lambda _: time.sleep(delay))
    role.fit(Net(role, pause=0.005), DataLoader(data, BATCH), max_epochs=1)
