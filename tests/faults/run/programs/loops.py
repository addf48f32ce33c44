"""Loops of the user's own over DDP, in which ranks leave early, start loaders anew, or train by other settings."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from tests.faults.run.programs.parts import AT, BATCH, BEAT, WIDTH, Rows
from tests.faults.run.role import Role

BATCHES = 20
LONG_RUN = 300
"""Batches of a run that takes a sample of what is compared several times."""


class Loop:
    """A model under DDP and its optimizer. ``watch``: the doctor's."""

    def __init__(self, role: Role, watch: Any, **options: Any) -> None:
        torch.manual_seed(1)
        self.role, self.watch = role, watch
        self.model = DistributedDataParallel(torch.nn.Linear(WIDTH, 2), **options)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        watch.model(self.model)

    def loader(self, batches: int = BATCHES) -> Any:
        """Batches of rows that this rank alone has."""
        return self.watch.loader(DataLoader(Rows(BATCH * batches, self.role.rank * 10_000), BATCH))

    def step(self, batch: torch.Tensor, beat: float = BEAT) -> None:
        """Forward, backward and optimizer."""
        self.role.begins()
        time.sleep(beat)
        loss = self.model(batch).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.watch.step(loss=loss)


def _train(role: Role, body: Any) -> None:
    role.join()
    with role.watch() as watch:
        body(Loop(role, watch))
    dist.destroy_process_group()


# ---- ranks that leave their loop early ----


def leaving_by_break(role: Role) -> None:
    """Rank 1 breaks out of its loop, and waits at the barrier behind it."""

    def body(loop: Loop) -> None:
        for number, batch in enumerate(loop.loader()):
            if role.guilty and number == AT:
                role.stops()
                break
            loop.step(batch)
        dist.barrier()

    _train(role, body)


def leaving_by_return(role: Role) -> None:
    """Rank 1 returns out of the loop and of the watched run, and works on."""

    def body(loop: Loop) -> None:
        for number, batch in enumerate(loop.loader()):
            if role.guilty and number == AT:
                role.stops()
                return
            loop.step(batch)

    role.join()
    with role.watch() as watch:
        body(Loop(role, watch))
    if role.guilty:
        time.sleep(60)
    dist.destroy_process_group()


def leaving_for_good(role: Role) -> None:
    """Rank 1 returns, and its process ends: the others lose it."""

    def body(loop: Loop) -> None:
        for number, batch in enumerate(loop.loader()):
            if role.guilty and number == AT:
                role.stops()
                return
            loop.step(batch)

    _train(role, body)


def leaving_together(role: Role) -> None:
    """All ranks break out of each epoch after the same batch."""

    def body(loop: Loop) -> None:
        for _ in range(3):
            for number, batch in enumerate(loop.loader()):
                loop.step(batch)
                if number == AT:
                    break
            dist.barrier()

    _train(role, body)


# ---- loaders that are started anew ----


def _endless(loop: Loop, batches: int) -> Iterator[torch.Tensor]:
    loader = loop.loader(batches)
    iterator = iter(loader)
    while True:
        try:
            batch = next(iterator)
        except StopIteration:
            iterator = iter(loader)
            batch = next(iterator)
        yield batch


def started_anew(role: Role) -> None:
    """Loaders of 20 and 27 batches, each started anew at its end, over as many steps on all ranks."""

    def body(loop: Loop) -> None:
        endless = _endless(loop, 20 + 7 * role.rank)
        for _ in range(120):
            loop.step(next(endless))

    _train(role, body)
