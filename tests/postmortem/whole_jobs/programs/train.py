"""Trains a small network with DistributedDataParallel over Gloo; fails in the way that the variable FAULT names."""

import argparse
import ctypes
import datetime
import faulthandler
import logging
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

CHECKPOINTS = Path("checkpoints")
log = logging.getLogger("train")


def is_faulty(*names):
    """Whether this rank has one of these faults."""
    ranks = os.environ.get("FAULTY_RANKS", "0").split(",")
    return os.environ.get("FAULT") in names and os.environ["RANK"] in ranks


class Samples(Dataset):
    """Rows of random features with a label each."""

    def __init__(self, count, width):
        self.count = count
        self.width = width

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        row = {"features": torch.full((self.width,), index / self.count), "label": torch.tensor([index % 2.0])}
        if index > self.count // 2:
            if is_faulty("exception"):
                del row["label"]
            if is_faulty("hang"):
                time.sleep(600)
            if is_faulty("worker_killed"):
                os.kill(os.getpid(), signal.SIGKILL)
        return row["features"], row["label"]


class Network(torch.nn.Module):
    """Two layers, and a head that the loss may not depend on."""

    def __init__(self, width):
        super().__init__()
        hidden = 32 if is_faulty("model") else 16
        self.body = torch.nn.Sequential(torch.nn.Linear(width, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, 1))
        self.auxiliary = torch.nn.Linear(width, 1) if os.environ.get("FAULT") == "unused" else None

    def forward(self, features):
        return self.body(features)


def crash_in_native_code():
    ctypes.string_at(0)


def leak_host_memory():
    kept = []
    while True:
        kept.append(bytearray(os.urandom(1)) * (16 << 20))
        time.sleep(0.01)


def gather_metrics(loss):
    size = 3 if is_faulty("shape") else 2
    metrics = torch.full((size,), loss)
    dist.all_reduce(metrics)
    return metrics / dist.get_world_size()


def validate():
    accuracy = torch.zeros(1)
    dist.all_reduce(accuracy)
    return accuracy.item()


def save_checkpoint(network, step):
    state = {"model": network.module.state_dict(), "step": step, "world_size": dist.get_world_size()}
    if os.environ.get("FAULT") in ("disk", "read_only"):
        state["optimizer"] = torch.zeros(1 << 20)
    torch.save(state, CHECKPOINTS / f"step_{step}.pt")
    log.info("saved checkpoint step_%d.pt", step)


def load_checkpoint(network, path):
    state = torch.load(path, map_location="cpu")
    if state["world_size"] != dist.get_world_size():
        raise RuntimeError(
            f"checkpoint {path} was saved with world_size={state['world_size']}, "
            f"but this job has world_size={dist.get_world_size()}: cannot load its optimizer shards"
        )
    network.module.load_state_dict(state["model"])
    log.info("resumed from %s at step %d", path, state["step"])


def misbehave():
    if is_faulty("killed"):
        os.kill(os.getpid(), signal.SIGKILL)
    if is_faulty("segfault"):
        crash_in_native_code()
    if is_faulty("memory"):
        leak_host_memory()
    if is_faulty("exit"):
        log.error("configuration for epoch 1 not found, giving up")
        sys.exit(1)
    if is_faulty("first_attempt") and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
        raise ConnectionResetError(104, "Connection reset by peer: object store closed the stream")
    if is_faulty("one_rank"):
        log.info("accuracy %.3f", validate())


def select_device():
    if os.environ.get("FAULT") != "cuda":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def build_loader(options):
    world = dist.get_world_size()
    data = Samples(options.steps * 4 * world, options.width)
    sampler = DistributedSampler(data, shuffle=False)
    if is_faulty("lengths"):
        sampler = torch.utils.data.SequentialSampler(Samples(options.steps * 2, options.width))
    loader = DataLoader(data, batch_size=4, sampler=sampler, num_workers=options.workers)
    log.info("training on %d ranks: %d batches per epoch on this rank", world, len(loader))
    return loader


def compute_loss(network, features, labels, step):
    if is_faulty("nan") and step == 6:
        features = features / 0 * 0
    loss = torch.nn.functional.mse_loss(network(features), labels)
    if not torch.isfinite(loss):
        raise FloatingPointError(f"loss is {loss.item()} at step {step}")
    return loss


def train(options):
    network = DistributedDataParallel(Network(options.width).to(select_device()))
    if options.resume:
        load_checkpoint(network, options.resume)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    loader = build_loader(options)
    for step, (features, labels) in enumerate(loader, 1):
        loss = compute_loss(network, features, labels, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if options.metrics:
            gather_metrics(loss.item())
        if step > options.steps // 2:
            misbehave()
        if dist.get_rank() == 0 or options.verbose:
            log.info("step %d/%d loss %.4f", step, len(loader), loss.item())
        if options.save and step % 5 == 0 and dist.get_rank() == 0:
            save_checkpoint(network, step)
        time.sleep(options.pause)
    log.info("epoch 0 done after %d batches", len(loader))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=20)
    parser.add_argument("--pause", type=float, default=0.05)
    parser.add_argument("--resume")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--metrics", action="store_true")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    faulthandler.enable()
    torch.set_num_threads(1)
    form = f"%(asctime)s [rank {os.environ['RANK']}] %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=logging.INFO, format=form)
    if is_faulty("first_start") and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        time.sleep(3)  # after the others have begun to wait for this rank
        raise ConnectionResetError(104, "Connection reset by peer: object store closed the stream")
    if is_faulty("late"):
        log.info("copying the dataset to local storage")
        time.sleep(3 * options.timeout)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=options.timeout))
    log.info("initialized: rank %d of %d on %s", dist.get_rank(), dist.get_world_size(), os.uname().nodename)
    train(options)
    dist.destroy_process_group()
    log.info("training finished")


if __name__ == "__main__":
    main()
