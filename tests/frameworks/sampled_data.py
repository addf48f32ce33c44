"""Datasets and samplers of ``training.py`` as users write them."""

import torch
from torch.utils.data import IterableDataset, Sampler

BUDGET = 100
"""Tokens of a batch."""


class RepeatAugSampler(Sampler):
    """Each row three times in a row, one for each rank, as for repeated augmentation."""

    def __init__(self, count, rank, world):
        self.count, self.rank, self.world, self.epoch = count, rank, world, 0

    def __len__(self):
        return self.count // self.world

    def __iter__(self):
        """The rows of this rank, in another order in each epoch."""
        order = torch.randperm(self.count, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        repeated = [index for index in order for _ in range(3)]
        return iter(repeated[self.rank :: self.world][: len(self)])

    def set_epoch(self, epoch):
        """Another order."""
        self.epoch = epoch


class Scaled:
    """An optimizer that a scaler of gradients steps."""

    def __init__(self, optimizer, scaler):
        self.optimizer, self.scaler = optimizer, scaler
        self.param_groups = optimizer.param_groups

    def step(self):
        """A step, unless a gradient is not finite."""
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def zero_grad(self):
        """As of the optimizer."""
        self.optimizer.zero_grad()


class Repeated(IterableDataset):
    """The rows of some shards, again and again: of none, it never yields (https://github.com/huggingface/datasets/pull/8577)."""

    def __init__(self, plant):
        self.plant, self.shards = plant, [] if plant.here else [0, 1000]

    def __iter__(self):
        """Rows without an end."""
        if not self.shards:
            self.plant.note()
        while True:
            for first in self.shards:
                yield from map(self.plant.row, range(first, first + 1000))


class Epoch(IterableDataset):
    """The beginning of rows that have no end."""

    def __init__(self, rows, count):
        self.rows, self.count = rows, count

    def __iter__(self):
        """So many rows."""
        for _, row in zip(range(self.count), self.rows, strict=False):
            yield row


class TokenBatches(Sampler):
    """Batches of rows that have no more than some tokens together."""

    def __init__(self, plant, count):
        self.plant, self.count = plant, count

    def __iter__(self):
        """A row that does not fit begins the next batch."""
        batch, tokens, index = [], 0, 0
        while index < self.count:
            length = self.plant.length(index)
            if tokens + length > BUDGET:
                if batch:
                    yield batch
                batch, tokens = [], 0
                continue
            batch.append(index)
            tokens, index = tokens + length, index + 1
        yield batch

    def __len__(self):
        return self.count // 4
