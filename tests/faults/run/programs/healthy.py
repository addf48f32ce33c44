"""Trainings in which nothing is wrong, of the kinds that a watcher may take for ill."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import pytorch_lightning
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel, ManualOptimBoringModel
from lightning.pytorch.utilities import CombinedLoader
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from tests.faults.run.programs.parts import BATCH, BEAT, Net, Rows, rows, shard, stream
from tests.faults.run.role import Role

BATCHES = 10


class Slow(Net):
    """Long at one thing: ``first`` seconds in the first step, ``validating`` in a step of validation, ``saving`` in a
    checkpoint. All ranks alike, but for the checkpoint, which rank 0 writes."""

    def __init__(self, role: Role, *, first: float = 0, validating: float = 0, saving: float = 0) -> None:
        super().__init__(role, pause=BEAT)
        self.first, self.validating, self.saving = first, validating, saving

    def training_step(self, batch: torch.Tensor, index: int) -> Any:
        if self.trainer.global_step == 0:
            time.sleep(self.first)
        return super().training_step(batch, index)

    def validation_step(self, batch: torch.Tensor, index: int, dataloader_idx: int = 0) -> Any:
        time.sleep(self.validating)
        return super().validation_step(batch, index, dataloader_idx)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.global_rank == 0:
            time.sleep(self.saving)


class Logs(Net):
    """Logs with sync on all ranks, each step and each epoch."""

    def training_step(self, batch: torch.Tensor, index: int) -> Any:
        loss = super().training_step(batch, index)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: torch.Tensor, index: int, dataloader_idx: int = 0) -> Any:
        self.log("worse", float(self.current_epoch), sync_dist=True)
        return super().validation_step(batch, index, dataloader_idx)


class Normed(Net):
    """With a batch norm, whose statistics are each rank's own between two steps."""

    def __init__(self, role: Role) -> None:
        super().__init__(role)
        self.norm = torch.nn.BatchNorm1d(8)

    def training_step(self, batch: torch.Tensor, index: int) -> Any:
        return self.layer(self.norm(batch)).square().mean()


class Manual(Net):
    """Optimises by hand, every second batch."""

    automatic_optimization = False

    def training_step(self, batch: torch.Tensor, index: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(super().training_step(batch, index))
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()


class Sums(Net):
    """Takes what a CombinedLoader gives."""

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> Any:
        return sum(self.layer(part).square().mean() for part in batch.values() if part is not None)


class Other(pytorch_lightning.LightningModule):
    """A module of the other Lightning."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 2)

    def training_step(self, batch: torch.Tensor, index: int) -> Any:
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def _fit(module: LightningModule, role: Role, batches: int = BATCHES, **options: Any) -> None:
    role.fit(module, rows(batches, role), rows(BATCHES // 2, role), **options)


class Prepares(Net):
    """Rank 0 alone prepares for long, in the set-up without CPU time and in the first step with it."""

    def on_fit_start(self) -> None:
        if self.global_rank == 0:
            time.sleep(14)
        dist.barrier()

    def training_step(self, batch: torch.Tensor, index: int) -> Any:
        if index == 0 and self.current_epoch == 0 and self.global_rank == 0:
            end = time.monotonic() + 14
            while time.monotonic() < end:
                sum(range(1000))
        return super().training_step(batch, index)


def preparing(role: Role) -> None:
    """The others wait for rank 0 in a barrier, and in their first all-reduce."""
    role.fit(Prepares(role, pause=BEAT), rows(BATCHES, role))


def plain(role: Role) -> None:
    """DDP, a map-style data set, validation."""
    _fit(Net(role, pause=BEAT), role)


def small_steps(role: Role) -> None:
    """A thousand steps of a few hundred microseconds."""
    _fit(Net(role), role, 500)


def limited(role: Role) -> None:
    """More batches on rank 1, of which the Trainer takes as many as on the others."""
    loader = shard(BATCHES + 3 * (role.rank == 1), role)
    role.fit(Net(role, pause=BEAT), loader, limit_train_batches=BATCHES, use_distributed_sampler=False)


def limited_by_steps(role: Role) -> None:
    """More batches on rank 1; all end together by steps, within the first epoch."""
    loader = shard(BATCHES + 3 * (role.rank == 1), role)
    role.fit(Net(role, pause=BEAT), loader, max_steps=BATCHES, max_epochs=-1, use_distributed_sampler=False)


def uneven_validation(role: Role) -> None:
    """More batches of validation on rank 1, and no collective in them."""
    options: dict[str, Any] = {"use_distributed_sampler": False}
    role.fit(Net(role), shard(BATCHES, role), shard(BATCHES + 2 * (role.rank == 1), role), **options)


def long_first_step(role: Role) -> None:
    """Five seconds of compilation on every rank."""
    _fit(Slow(role, first=5), role)


def slow_validation(role: Role) -> None:
    """Each step of validation takes hundred times one of training."""
    _fit(Slow(role, validating=1.5), role, max_epochs=1)


def slow_checkpoint(role: Role) -> None:
    """Rank 0 writes for ten seconds; the others wait at a barrier."""
    keep = ModelCheckpoint(dirpath=role.folder / "kept", every_n_train_steps=BATCHES)
    _fit(Slow(role, saving=10), role, max_epochs=1, callbacks=[keep], enable_checkpointing=True)


def accumulating(role: Role) -> None:
    """An optimiser step every fourth batch."""
    _fit(Net(role, pause=BEAT), role, accumulate_grad_batches=4)


def stopping_early(role: Role) -> None:
    """Validation gets worse, and all stop."""
    _fit(Logs(role), role, max_epochs=20, callbacks=[EarlyStopping("worse", patience=1, mode="min")])


def streaming(role: Role) -> None:
    """Streams of equal length, which nobody knows."""
    role.fit(Net(role, pause=BEAT), stream(BATCHES, role))


def norm(role: Role) -> None:
    """Buffers that DDP broadcasts before each forward pass."""
    _fit(Normed(role), role, 60)


def manual(role: Role) -> None:
    """Optimisation by hand, of an own module and of Lightning's demonstration."""
    _fit(Manual(role), role)


def demo(role: Role) -> None:
    """Lightning's demonstration module, as it is."""
    role.trainer(max_epochs=1, limit_train_batches=BATCHES).fit(BoringModel())


def manual_demo(role: Role) -> None:
    """Lightning's demonstration of manual optimization."""
    role.trainer(max_epochs=1, limit_train_batches=BATCHES).fit(ManualOptimBoringModel())


def resuming(role: Role) -> None:
    """One epoch, and another one from its checkpoint."""
    path = role.folder / "last.ckpt"
    trainer = role.fit(Net(role), rows(BATCHES, role, shuffle=True), max_epochs=1)
    trainer.save_checkpoint(path)
    role.trainer(max_epochs=2).fit(Net(role), rows(BATCHES, role, shuffle=True), ckpt_path=path)


def two_validations(role: Role) -> None:
    """Two loaders of validation of different lengths."""
    role.fit(Logs(role), rows(BATCHES, role), [rows(BATCHES, role), rows(3, role, first=5000)])


def combined(role: Role) -> None:
    """Two loaders at once, the shorter one started anew."""
    loaders = {"one": rows(BATCHES, role), "other": rows(4, role, first=5000)}
    role.fit(Sums(role), CombinedLoader(loaders, "max_size_cycle"))


def validating_within(role: Role) -> None:
    """Validation twice an epoch."""
    _fit(Logs(role, pause=BEAT), role, val_check_interval=0.5)


def logging(role: Role) -> None:
    """Metrics with sync on every rank."""
    _fit(Logs(role), role)


def predicting(role: Role) -> None:
    """Prediction, whose sampler gives one rank a batch less than the others."""
    role.trainer().predict(
        Net(role), DataLoader(Rows(BATCH * BATCHES * role.world + 1), BATCH), return_predictions=False
    )


def testing(role: Role) -> None:
    """Test alone."""
    role.trainer().test(Net(role), rows(BATCHES, role))


def persistent_workers(role: Role) -> None:
    """Workers that stay between epochs, and shuffling."""
    role.fit(Net(role), rows(BATCHES, role, shuffle=True, num_workers=1, persistent_workers=True), max_epochs=3)


def other_lightning(role: Role) -> None:
    """The Trainer and the module of pytorch_lightning."""
    trainer = role.trainer(of="pytorch_lightning")
    trainer.fit(Other(), rows(BATCHES, role))


def joined(role: Role) -> None:
    """A plain loop over uneven data, under torch's Join."""
    _loop(role, BATCHES + 3 * (role.rank == 1), joining=True)


def no_sync(role: Role) -> None:
    """A plain loop that accumulates under no_sync."""
    _loop(role, BATCHES * 4, every=4)


def _loop(role: Role, batches: int, *, joining: bool = False, every: int = 1) -> None:
    role.join()
    model = DistributedDataParallel(torch.nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = shard(batches, role)
    with role.watch() as watch, Join([model]) if joining else contextlib.nullcontext():
        watch.model(model)
        for index, batch in enumerate(watch.loader(loader)):
            syncs = index % every == every - 1
            with contextlib.nullcontext() if syncs else model.no_sync():
                loss = model(batch).square().mean()
                loss.backward()
            if syncs:
                optimizer.step()
                optimizer.zero_grad()
                watch.step(loss)
    dist.destroy_process_group()


def loop_with_epochs(role: Role) -> None:
    """A plain loop of three epochs with a sampler that is told of each."""
    role.join()
    data = Rows(BATCH * BATCHES * role.world)
    sampler: Any = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, BATCH, sampler=sampler)
    with role.watch() as watch:
        for epoch in range(3):
            sampler.set_epoch(epoch)
            for batch in watch.loader(loader):
                dist.all_reduce(batch.sum())
    dist.destroy_process_group()
