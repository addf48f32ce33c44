"""Training runs whose numbers depend on their seeds alone, and what is left of them on each rank.

Files in the folder of a run control it: ``steps`` is the number of the last step; without it, the run ends after a file
``enough`` was made. ``pace`` has the seconds that each step takes longer, which change no number.
"""

import hashlib
import json
import random
import struct
import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

FEWEST_STEPS = 20


class Record:
    """Digests of what a training run computes on this rank from now on, and whether this was its last step."""

    def __init__(self, folder):
        random.seed(dist.get_rank())
        self.steps = 0
        self._folder = folder
        self._losses = hashlib.sha256()
        last = folder / "steps"
        self._last = int(last.read_text()) if last.exists() else None

    def add(self, loss):
        """Count a step. The sum of what the ranks return is not zero after the last one, as rank 0 decides."""
        self.steps += 1
        self._losses.update(struct.pack("d", loss.item()))
        return torch.full((8,), float(dist.get_rank() == 0 and self._is_last()))

    def _is_last(self):
        if self._last is not None:
            return self.steps >= self._last
        return self.steps >= FEWEST_STEPS and (self._folder / "enough").exists()

    def write(self, model, optimizer):
        """Write the digests of this rank."""
        state = [*model.state_dict().values()]
        state += [value for one in optimizer.state_dict()["state"].values() for value in one.values()]
        parameters = hashlib.sha256(b"".join(map(_bytes_of, state)))
        generators = hashlib.sha256(torch.get_rng_state().numpy().tobytes() + repr(random.getstate()).encode())
        found = {"losses": self._losses, "parameters": parameters, "generators": generators}
        digests = {"steps": self.steps, **{name: digest.hexdigest() for name, digest in found.items()}}
        file = self._folder / f"digests-{dist.get_rank()}"
        file.with_suffix(".part").write_text(json.dumps(digests))
        file.with_suffix(".part").rename(file)


def _bytes_of(value):
    """The part of a sharded tensor that this rank has, or all of another value."""
    value = value.to_local() if hasattr(value, "to_local") else value
    return value.numpy().tobytes() if isinstance(value, torch.Tensor) else repr(value).encode()


class RandomRows(Dataset):
    """Rows that the seed of the worker decides."""

    def __len__(self):
        return 4_000

    def __getitem__(self, index):
        return torch.randn(8) + index + random.random()


def train(folder, arrived):
    """Train with all that draws random numbers: dropout, data workers, a sampler."""
    pace = float((folder / "pace").read_text()) if (folder / "pace").exists() else 0.0
    torch.manual_seed(dist.get_rank())
    layers = (torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Dropout(0.3), torch.nn.Linear(32, 4))
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.Adam(model.parameters())
    rows = RandomRows()
    record = Record(folder)
    epoch = 0
    while True:
        epoch += 1
        sampler = DistributedSampler(rows, seed=epoch)
        for batch in DataLoader(rows, batch_size=2, sampler=sampler, num_workers=2):
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            compute_for(pace)
            is_last = record.add(loss)
            if record.steps == 5:
                arrived()
            dist.all_reduce(is_last)
            if is_last.any():
                record.write(model, optimizer)
                return


def compute_for(seconds):
    """A rank that is asleep on one line whenever it is read would not be seen to make progress."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        sum(range(100))
