"""A training run whose numbers depend on its seeds alone, and what is left of it on each rank."""

import hashlib
import json
import random
import struct
import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class RandomRows(Dataset):
    """Rows that the seed of the worker decides."""

    def __len__(self):
        return 4_000

    def __getitem__(self, index):
        return torch.randn(8) + index + random.random()


def train(folder, arrived):
    """Train until a file ``steps`` or, without one, a file ``enough`` says so; write digests for each rank.

    A file ``pace`` has the seconds that each step takes longer, which change no number."""
    pace = float((folder / "pace").read_text()) if (folder / "pace").exists() else 0.0
    steps = int((folder / "steps").read_text()) if (folder / "steps").exists() else None
    random.seed(dist.get_rank())
    torch.manual_seed(dist.get_rank())
    layers = (torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Dropout(0.3), torch.nn.Linear(32, 4))
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.Adam(model.parameters())
    rows = RandomRows()
    losses = hashlib.sha256()
    step = epoch = 0
    while True:
        epoch += 1
        sampler = DistributedSampler(rows, seed=epoch)
        for batch in DataLoader(rows, batch_size=2, sampler=sampler, num_workers=2):
            step += 1
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            compute_for(pace)
            losses.update(struct.pack("d", loss.item()))
            if step == 5:
                arrived()
            if is_last_step(step, steps, folder):
                write_digests(folder, step, losses, model, optimizer)
                return


def compute_for(seconds):
    """A rank that is asleep on one line whenever it is read would not be seen to make progress."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        sum(range(100))


def is_last_step(step, steps, folder):
    """Whether rank 0 decides so; all ranks exchange it in every step, whatever it depends on."""
    enough = step == steps if steps is not None else (folder / "enough").exists()
    decision = torch.tensor([int(enough)])
    dist.broadcast(decision, 0)
    return bool(decision.item())


def write_digests(folder, step, losses, model, optimizer):
    state = [*model.state_dict().values()]
    state += [value for one in optimizer.state_dict()["state"].values() for value in one.values()]
    parameters = hashlib.sha256(b"".join(value.numpy().tobytes() for value in state))
    generators = hashlib.sha256(torch.get_rng_state().numpy().tobytes() + repr(random.getstate()).encode())
    found = {"losses": losses, "parameters": parameters, "generators": generators}
    digests = {"steps": step, **{name: digest.hexdigest() for name, digest in found.items()}}
    file = folder / f"digests-{dist.get_rank()}"
    file.with_suffix(".part").write_text(json.dumps(digests))
    file.with_suffix(".part").rename(file)
