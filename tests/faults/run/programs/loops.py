"""Loops of the user's own over DDP, in which ranks leave early, start loaders anew, or train by other settings."""

from __future__ import annotations

import ctypes
import fcntl
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from tests.faults.run.programs.parts import AT, BATCH, BEAT, WIDTH, Rows
from tests.faults.run.role import Role

BATCHES = 20
LONG_RUN = 300
"""Batches of a run that takes a sample of what is compared several times."""


class Loop:
    """A model under DDP and its optimizer. ``watch``: the doctor's."""

    def __init__(self, role: Role, watch: Any) -> None:
        torch.manual_seed(1)
        self.role, self.watch = role, watch
        self.wrap(torch.nn.Linear(WIDTH, 2))

    def wrap(self, module: torch.nn.Module) -> None:
        """Train this module."""
        self.model = DistributedDataParallel(module)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.watch.model(self.model)

    def loader(self, batches: int = BATCHES) -> Any:
        """Batches of rows that this rank alone has."""
        return self.watch.loader(DataLoader(Rows(BATCH * batches, self.role.rank * 10_000), BATCH))

    def step(self, batch: torch.Tensor, beat: float = BEAT) -> None:
        """Forward, backward and optimizer."""
        self.role.begins()
        time.sleep(beat)
        loss = self.model(batch).square().mean()
        self.watch.mark("backward")
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


# ---- ranks that wait for something of this host ----


def _held_in(wait: Any) -> Any:
    def program(role: Role) -> None:
        def body(loop: Loop) -> None:
            for number, batch in enumerate(loop.loader()):
                if role.guilty and number == AT:
                    role.stops()
                    wait(role)
                loop.step(batch)

        _train(role, body)

    return program


HOLDER = "import fcntl, sys, time; f = open(sys.argv[1], 'w'); fcntl.flock(f, 2); print(1, flush=True); time.sleep(99)"


def flock_of_another(role: Role) -> None:
    """The culprit waits for a lock on a file that a child process holds."""

    def wait(role: Role) -> None:
        path = role.folder / "cache.lock"
        command = [sys.executable, "-c", HOLDER, str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as holder, path.open("w") as file:
            assert holder.stdout is not None
            holder.stdout.readline()
            fcntl.flock(file, fcntl.LOCK_EX)

    _held_in(wait)(role)


def silent_socket(role: Role) -> None:
    """The culprit receives from a server of this host that never sends."""

    def wait(role: Role) -> None:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname()) as client,
        ):
            client.recv(1)

    _held_in(wait)(role)


def empty_queue(role: Role) -> None:
    """The culprit waits for an item of a queue that nobody fills."""
    _held_in(lambda role: queue.Queue().get())(role)


def full_pipe(role: Role) -> None:
    """The culprit writes to a pipe that a child process never reads."""

    def wait(role: Role) -> None:
        with subprocess.Popen(["sleep", "99"], stdin=subprocess.PIPE) as reader:
            assert reader.stdin is not None
            reader.stdin.write(bytes(1 << 20))

    _held_in(wait)(role)


# ---- ranks that train by other settings ----


class Dropping(torch.nn.Module):
    """A layer behind dropout, and one that :attr:`skips` leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.extra = torch.nn.Linear(WIDTH, 2), torch.nn.Linear(WIDTH, 2)
        self.dropout = torch.nn.Dropout(0.1)
        self.skips = False

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        found = self.layer(self.dropout(batch))
        return found if self.skips else found + self.extra(batch)


def _many_steps(loop: Loop, each: Any = None, batches: int = LONG_RUN) -> None:
    for number, batch in enumerate(loop.loader(batches)):
        if each is not None:
            each(number)
        loop.step(batch, 0.005)


def other_rate(role: Role) -> None:
    """Rank 1 trains with half the learning rate."""

    def body(loop: Loop) -> None:
        if role.guilty:
            loop.optimizer.param_groups[0]["lr"] /= 2
        _many_steps(loop)

    _train(role, body)


def rate_by_metric(role: Role) -> None:
    """A scheduler lowers the learning rate by each rank's own metric, which is flat on rank 1 alone."""

    def body(loop: Loop) -> None:
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(loop.optimizer, patience=3)

        def each(number: int) -> None:
            if number % 10 == 0:
                plateau.step(1.0 if role.guilty else 1.0 / (number + 1))

        _many_steps(loop, each)

    _train(role, body)


def clipping(role: Role) -> None:
    """Rank 1 clips its gradients."""

    def body(loop: Loop) -> None:
        if role.guilty:
            loop.optimizer.register_step_pre_hook(
                lambda *_: torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 0.01) and None
            )
        _many_steps(loop)

    _train(role, body)


def clipping_everywhere(role: Role) -> None:
    """All ranks clip their gradients, and lower their rate by a schedule."""

    def body(loop: Loop) -> None:
        schedule = torch.optim.lr_scheduler.StepLR(loop.optimizer, 10)
        loop.optimizer.register_step_pre_hook(
            lambda *_: torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 0.01) and None
        )
        _many_steps(loop, lambda _: schedule.step())

    _train(role, body)


def other_precision(role: Role) -> None:
    """Rank 1 alone computes in bfloat16."""

    def body(loop: Loop) -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=role.guilty):
            _many_steps(loop)

    _train(role, body)


def eval_mode(role: Role) -> None:
    """Rank 1 evaluates, and trains on without dropout."""

    def body(loop: Loop) -> None:
        def each(number: int) -> None:
            if number == AT:
                loop.model.eval()
                if not role.guilty:
                    loop.model.train()

        loop.wrap(Dropping())
        _many_steps(loop, each)

    _train(role, body)


def own_seeds(role: Role) -> None:
    """Rank 1 makes its weights by a seed of its own, and gradients are averaged by hand."""
    role.join()
    with role.watch() as watch:
        torch.manual_seed(1 + role.guilty)
        model = torch.nn.Linear(WIDTH, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        watch.model(model)
        rows = Rows(BATCH * LONG_RUN * role.world)
        sampler: DistributedSampler[Any] = DistributedSampler(rows)
        for batch in watch.loader(DataLoader(rows, BATCH, sampler=sampler)):
            role.begins()
            time.sleep(0.005)
            loss = model(batch).square().mean()
            loss.backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad)
                parameter.grad /= role.world
            optimizer.step()
            optimizer.zero_grad()
            watch.step(loss=loss)
    dist.destroy_process_group()


def unused_parameter(role: Role) -> None:
    """Rank 1 leaves a layer out of its loss in one batch; there is a barrier after each step."""

    def body(loop: Loop) -> None:
        model = Dropping()
        loop.wrap(model)
        for number, batch in enumerate(loop.loader()):
            model.skips = role.guilty and number == AT
            if number == AT and role.planted:
                role.stops()
            loop.step(batch)
            dist.barrier()

    _train(role, body)


def unfrozen(role: Role) -> None:
    """A layer is frozen when the model is wrapped, and trained later."""

    def body(loop: Loop) -> None:
        model = Dropping()
        if role.planted:
            model.extra.requires_grad_(False)
        loop.wrap(model)

        def each(number: int) -> None:
            if number == AT:
                model.extra.requires_grad_(True)

        _many_steps(loop, each)

    _train(role, body)


# ---- ranks that are slow at times ----


def _steps_for(loop: Loop, seconds: float, each: Any = None) -> None:
    """Steps of 20 ms over ``seconds``, as many on all ranks."""
    for number, batch in enumerate(loop.loader(int(seconds / 0.02))):
        loop.watch.mark("forward")
        if each is not None:
            each(number)
        loop.step(batch, 0.018)


def rare_saves(role: Role) -> None:
    """The culprit writes for 150 ms in every fourth step."""

    def body(loop: Loop) -> None:
        def each(number: int) -> None:
            if number % 4 == 0 and role.guilty:
                time.sleep(0.15)

        _steps_for(loop, 16, each)

    _train(role, body)


def lock_taken(role: Role) -> None:
    """A thread of the culprit keeps the interpreter's lock for two of eight seconds."""

    def keep() -> None:
        while True:
            time.sleep(6)
            ctypes.PyDLL(None).sleep(2)

    def body(loop: Loop) -> None:
        if role.guilty:
            threading.Thread(target=keep, daemon=True).start()
        _steps_for(loop, 30)

    _train(role, body)


def quota(role: Role) -> None:
    """The culprit is in a control group that grants a tenth of a CPU."""
    group = Path(f"/sys/fs/cgroup/cpu/rankdoctor-{os.getpid()}")

    def body(loop: Loop) -> None:
        def each(_: int) -> None:
            end = time.thread_time() + 0.01
            while time.thread_time() < end:
                torch.ones(16).sum()

        _steps_for(loop, 8, each)

    if role.guilty:
        group.mkdir()
        (group / "cpu.cfs_quota_us").write_text("10000")
        (group / "cgroup.procs").write_text(str(os.getpid()))
    _train(role, body)
    if role.guilty:
        (group.parent / "cgroup.procs").write_text(str(os.getpid()))


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
