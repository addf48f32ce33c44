"""Ranks that stop, die, call other collectives than the rest, or compute otherwise."""

from __future__ import annotations

import ctypes
import os
import pdb
import signal
import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_only
from torch.utils.data import DataLoader

from tests.faults.run.programs.parts import AT, BATCH, BEAT, LONG, Net, Rows, rows
from tests.faults.run.role import Role

BATCHES = 10


class Struck(Net):
    """A module that something happens to in the step :data:`AT` of the first epoch, on the culprits."""

    def training_step(self, batch: torch.Tensor, index: int) -> Any:
        if index == AT and self.role.planted and self.current_epoch == 0:
            self.meanwhile()
        return super().training_step(batch, index)

    def meanwhile(self) -> None:
        """What happens to every rank, guilty or not."""
        if self.guilty:
            self.role.stops()
            self.strike()

    def strike(self) -> None:
        """What happens."""
        raise NotImplementedError


def _fit(module: type[Net], role: Role, **options: Any) -> None:
    role.fit(module(role, pause=BEAT), rows(BATCHES, role), **options)


# ---- collectives on some ranks only ----


class Gathers(Struck):
    """An all_gather behind a condition on the rank."""

    def strike(self) -> None:
        self.all_gather(torch.ones(1))


class LogsAlone(Struck):
    """A metric that rank 0 alone logs, with sync."""

    def strike(self) -> None:
        self.log("extra", 1.0, sync_dist=True)


class WaitsAlone(Struck):
    """A barrier that rank 0 alone enters."""

    def strike(self) -> None:
        dist.barrier()


class SavesAlone(Struck):
    """A checkpoint that rank 0 alone saves: the Trainer ends it with a barrier."""

    def strike(self) -> None:
        self.trainer.save_checkpoint(self.role.folder / "extra.ckpt")


class ReducesInRankZeroOnly(Net):
    """A mean over ranks in a method that is for rank 0 alone, at the end of an epoch."""

    def __init__(self, role: Role, epoch: int) -> None:
        super().__init__(role, pause=BEAT)
        self.epoch = epoch

    def on_train_epoch_end(self) -> None:
        if self.role.planted and self.current_epoch == self.epoch:
            self.role.stops()
            self.report()

    @rank_zero_only
    def report(self) -> None:
        """Sum something up."""
        total = torch.ones(1)
        dist.all_reduce(total)


class Skips(Net):
    """Optimises by hand; rank 1 finds nothing in a batch to learn from, and leaves the backward pass out."""

    automatic_optimization = False

    def training_step(self, batch: torch.Tensor, index: int) -> None:
        loss = super().training_step(batch, index)
        if index == AT and self.guilty:
            self.role.stops()
            return
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


def skipping(role: Role) -> None:
    _fit(Skips, role)


def gather_alone(role: Role) -> None:
    _fit(Gathers, role)


def log_alone(role: Role) -> None:
    _fit(LogsAlone, role)


def barrier_alone(role: Role) -> None:
    _fit(WaitsAlone, role)


def checkpoint_alone(role: Role) -> None:
    _fit(SavesAlone, role)


def rank_zero_only_reduce(role: Role) -> None:
    """In the first epoch: nobody knows yet how long its end may take."""
    role.fit(ReducesInRankZeroOnly(role, 0), rows(BATCHES, role))


def rank_zero_only_reduce_later(role: Role) -> None:
    """In the second one."""
    role.fit(ReducesInRankZeroOnly(role, 1), rows(BATCHES, role), max_epochs=3)


# ---- collectives that differ ----


class Differs(Struck):
    """Every rank calls a collective of its own in one step; culprits :meth:`strike` another one."""

    def meanwhile(self) -> None:
        self.role.stops()
        if self.guilty:
            self.strike()
        else:
            self.usual()

    def usual(self) -> None:
        """What most ranks call."""
        dist.all_reduce(torch.ones(10))


class Shapes(Differs):
    """All-reduce of another shape: Gloo aborts the rank that receives too much."""

    def strike(self) -> None:
        dist.all_reduce(torch.ones(6))


class Types(Differs):
    """All-reduce of another type."""

    def strike(self) -> None:
        dist.all_reduce(torch.ones(10, dtype=torch.float64))


class SilentTypes(Differs):
    """All-reduce of integers among floats of the same size: Gloo adds up nonsense."""

    def strike(self) -> None:
        dist.all_reduce(torch.ones(10, dtype=torch.int32))


class Operations(Differs):
    """A broadcast among all-reduces."""

    def strike(self) -> None:
        dist.broadcast(torch.ones(10), src=0)


class Order(Differs):
    """An all-reduce and an all-gather, the other way round on rank 2."""

    def usual(self) -> None:
        self.reduce()
        self.gather()

    def strike(self) -> None:
        self.gather()
        self.reduce()

    def reduce(self) -> None:
        """Sum something up."""
        dist.all_reduce(torch.ones(10))

    def gather(self) -> None:
        """Have what all have."""
        dist.all_gather([torch.zeros(10) for _ in range(self.role.world)], torch.ones(10))


def shapes(role: Role) -> None:
    _fit(Shapes, role)


def types(role: Role) -> None:
    _fit(Types, role)


def silent_types(role: Role) -> None:
    _fit(SilentTypes, role)


def operations(role: Role) -> None:
    _fit(Operations, role)


def order(role: Role) -> None:
    _fit(Order, role)


def shapes_in_a_loop(role: Role) -> None:
    """All-reduces in a plain loop under TORCH_DISTRIBUTED_DEBUG=DETAIL, of another shape on rank 2."""
    _loop(role, lambda index: dist.all_reduce(torch.ones(6 if index == AT and role.guilty else 10)))


def types_in_a_loop(role: Role) -> None:
    """The same of another type."""

    def step(index: int) -> None:
        kind = torch.float64 if index == AT and role.guilty else torch.float32
        dist.all_reduce(torch.ones(10, dtype=kind))

    _loop(role, step)


def _loop(role: Role, step: Any) -> None:
    role.join()
    with role.watch() as watch:
        for index, _ in enumerate(watch.loader(DataLoader(Rows(BATCH * BATCHES, role.rank * 10_000), BATCH))):
            if index == AT and role.planted:
                role.stops()
            step(index)
            time.sleep(BEAT)
    dist.destroy_process_group()


class Crossed(Struck):
    """Two groups of the same ranks, used in another order on rank 1."""

    def on_fit_start(self) -> None:
        self.groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]

    def strike(self) -> None:
        order = self.groups if self.global_rank == 0 else reversed(self.groups)
        for group in order:
            dist.all_reduce(torch.ones(4), group=group)


class Sends(Struck):
    """Rank 0 sends what rank 1 never receives."""

    def strike(self) -> None:
        dist.send(torch.ones(4), dst=1)


class Receives(Struck):
    """Rank 1 receives what rank 0 never sends."""

    def strike(self) -> None:
        dist.recv(torch.ones(4), src=0)


def groups_crossed(role: Role) -> None:
    _fit(Crossed, role)


def send_alone(role: Role) -> None:
    _fit(Sends, role)


def receive_alone(role: Role) -> None:
    _fit(Receives, role)


class Evaluates(Net):
    """Validates more often on rank 1, with a metric over all ranks."""

    def validation_step(self, batch: torch.Tensor, index: int, dataloader_idx: int = 0) -> Any:
        loss = super().validation_step(batch, index)
        self.log("loss", loss, sync_dist=True)
        return loss


def accumulating(role: Role) -> None:
    """Over two batches on rank 0, four on the culprit."""
    role.fit(Net(role, pause=BEAT), rows(40, role), accumulate_grad_batches=4 if role.guilty else 2)


def evaluating(role: Role) -> None:
    """Every five batches, on the culprit every seven."""
    role.fit(Evaluates(role, pause=BEAT), rows(40, role), rows(2, role), val_check_interval=7 if role.guilty else 5)


# ---- ranks that stop ----


class Sleeps(Struck):
    """Asleep in the training step."""

    def strike(self) -> None:
        time.sleep(LONG)


class Stopped(Struck):
    """Stopped by SIGSTOP, as a debugger or a scheduler does."""

    def strike(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)


class HoldsGil(Struck):
    """In a call into C that keeps Python's lock."""

    def strike(self) -> None:
        ctypes.PyDLL(None).sleep(int(LONG))


def sleeping(role: Role) -> None:
    _fit(Sleeps, role)


def stopped(role: Role) -> None:
    _fit(Stopped, role)


def holding_gil(role: Role) -> None:
    _fit(HoldsGil, role)


# ---- before the pace of the run is known ----


class FirstStep(Net):
    """The same in the very first step of training."""

    def training_step(self, batch: torch.Tensor, index: int) -> Any:
        if index == 0 and self.current_epoch == 0 and self.guilty:
            self.role.begins()
            self.role.stops()
            self.strike()
        return super().training_step(batch, index)

    def strike(self) -> None:
        """A lock that a thread of this rank keeps for ever."""
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()


class DebugsAtFirst(FirstStep):
    """A breakpoint."""

    def strike(self) -> None:
        read, self.write = os.pipe()
        pdb.Pdb(stdin=os.fdopen(read), stdout=sys.stderr, nosigint=True).set_trace()


class StopsAtFirst(FirstStep):
    """Stopped by SIGSTOP."""

    def strike(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)


class StopsInSetup(Net):
    """Stopped while the ranks set up, before a barrier."""

    def on_fit_start(self) -> None:
        if self.guilty:
            time.sleep(3)  # until its watchdog has joined the others
            self.role.begins()
            self.role.stops()
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.barrier()


def locked_at_first(role: Role) -> None:
    _fit(FirstStep, role)


def debugged_at_first(role: Role) -> None:
    _fit(DebugsAtFirst, role)


def stopped_at_first(role: Role) -> None:
    _fit(StopsAtFirst, role)


def stopped_in_setup(role: Role) -> None:
    _fit(StopsInSetup, role)


# ---- ranks that end ----


class Killed(Struck):
    """Killed, as by the kernel where memory runs out."""

    def strike(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Raises(Struck):
    """An exception of the user's code."""

    def strike(self) -> None:
        raise ValueError("a label of 11 in a task of 10 classes")


class Exits(Struck):
    """sys.exit in the middle of the run, with a code that says all is well."""

    def strike(self) -> None:
        sys.exit(0)


def killed(role: Role) -> None:
    _fit(Killed, role)


def raising(role: Role) -> None:
    _fit(Raises, role)


def exiting(role: Role) -> None:
    _fit(Exits, role)


def raising_worker(role: Role) -> None:
    """A row that can't be read, in a data worker of rank 1."""

    def meanwhile(number: int) -> None:
        if role.guilty and number == AT * BATCH:
            role.stops()
            raise OSError("truncated image")

    _fit_from_worker(role, meanwhile)


def killed_worker(role: Role) -> None:
    """A data worker of rank 1 is killed."""

    def meanwhile(number: int) -> None:
        if role.guilty and number == AT * BATCH:
            role.stops()
            os.kill(os.getpid(), signal.SIGKILL)

    _fit_from_worker(role, meanwhile)


def _fit_from_worker(role: Role, meanwhile: Any) -> None:
    data = Rows(BATCH * BATCHES, role.rank * 10_000, meanwhile)
    role.fit(Net(role, pause=BEAT), DataLoader(data, BATCH, num_workers=1), use_distributed_sampler=False)


# ---- ranks that compute otherwise ----


class TurnsNan(Net):
    """The loss of rank 1 is no number in one step; DDP hands it to all."""

    def training_step(self, batch: torch.Tensor, index: int) -> Any:
        loss = super().training_step(batch, index)
        if index == AT and self.guilty:
            self.role.stops()
            return loss * float("nan")
        return loss


class Drifts(Struck):
    """A parameter of rank 1 is changed behind DDP's back."""

    def strike(self) -> None:
        with torch.no_grad():
            self.layer.weight.add_(0.25)


class Computes(Net):
    """Rank 1 computes more than the others in each step."""

    def training_step(self, batch: torch.Tensor, index: int) -> Any:
        if self.guilty:
            end = time.monotonic() + 0.03
            while time.monotonic() < end:
                torch.ones(16).sum()
        return super().training_step(batch, index)


class Wider(Net):
    """A layer more on rank 2."""

    def configure_model(self) -> None:
        if self.guilty:
            self.more = torch.nn.Linear(2, 2)


def turning_nan(role: Role) -> None:
    _fit(TurnsNan, role)


def drifting(role: Role) -> None:
    """Long enough for several checksums by default."""
    role.fit(Drifts(role), rows(130, role), max_epochs=1)


def computing(role: Role) -> None:
    role.fit(Computes(role, pause=0.005), rows(120, role), max_epochs=1)


def wider(role: Role) -> None:
    _fit(Wider, role)


# ---- ranks that are busy elsewhere ----


class SavesSlowly(Net):
    """Rank 0 is long at writing its part of a checkpoint."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == AT:
            self.trainer.save_checkpoint(self.role.folder / "one.ckpt")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.guilty:
            self.role.stops()
            time.sleep(LONG)


class Prepares(Net):
    """Rank 0 tokenises while the others wait at a barrier."""

    def on_train_epoch_start(self) -> None:
        if self.guilty:
            self.role.stops()
            self.tokenize()
        dist.barrier()

    def tokenize(self) -> None:
        """What takes so long."""
        end = time.monotonic() + LONG
        while time.monotonic() < end:
            sum(range(1000))


def slow_checkpoint(role: Role) -> None:
    _fit(SavesSlowly, role)


def slow_preparation(role: Role) -> None:
    _fit(Prepares, role)
