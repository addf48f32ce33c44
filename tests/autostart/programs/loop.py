"""A training loop that nobody edited, on the ranks that a launcher started; leaves a trace of all it might be disturbed
in. ``python loop.py FOLDER [KIND]``."""

import hashlib
import itertools
import json
import os
import random
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import numpy
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

ROWS, BATCH = 96, 4


class Rows(torch.utils.data.Dataset):
    """Rows that depend on all sources of random numbers."""

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        return torch.rand(8) + random.random() + float(numpy.random.random()) + index


def net():
    """Small, with dropout."""
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))


def sleep():
    """Wait for what never comes."""
    time.sleep(1000)


def deadlock():
    """Take a lock twice."""
    lock = threading.Lock()
    with lock, lock:
        pass


def prepare():
    """Work for twelve seconds."""
    until = time.monotonic() + 12
    while time.monotonic() < until:
        sum(range(10_000))


def refuse():
    """Raise, as for a setting that is not valid."""
    raise ValueError("no such optimizer")


BEFORE_THE_FIRST_BATCH = {"refuses": refuse, "sleeps": sleep, "deadlocks": deadlock, "prepares": prepare}


def late(folder, kind):
    """Rank 1 stops, or both load for long, before the model is wrapped; the others wait in its constructor, or in the
    first forward pass of shards."""
    if dist.get_rank() == 1 or kind == "late_everywhere":
        (folder / "stopped").write_text(repr(time.time()))
        LATE[kind]()
    if kind == "late_alone":
        prepare()
    if kind in ("late_for_barrier", "late_killed", "late_tells", "late_in_file"):
        dist.barrier()
    if kind == "late_helps":
        helper = helped() if dist.get_rank() == 0 else None
        dist.barrier()
        if helper is not None:
            helper.join()
    if kind == "late_shards":
        yield from fsdp2(folder, kind)
        return
    is_wider = kind == "late_wider" and dist.get_rank() == 1
    model = DistributedDataParallel(torch.nn.Sequential(*net(), torch.nn.Linear(1, 1)) if is_wider else net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(20):
        loss = model(torch.rand(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        yield model, loss


def load():
    """Wait for a server that all ranks load from, without CPU time."""
    time.sleep(20)


def be_killed():
    """As by the kernel."""
    os.kill(os.getpid(), signal.SIGKILL)


def tell():
    """Broadcast from rank 1, which the others know nothing of."""
    dist.broadcast_object_list([None], src=1)


def help_others():
    """Wait for a thread of rank 0, which sleeps for twelve seconds before."""
    dist.barrier(dist.new_group())


def helped():
    """Meet rank 1 in a thread."""
    group = dist.new_group()
    helper = threading.Thread(target=lambda: time.sleep(12) or dist.barrier(group))
    helper.start()
    return helper


def evaluate(folder):
    """Gather scores in two groups, one after the other, for six seconds each, and never train."""
    for number in range(2):
        if number:
            dist.destroy_process_group()
            dist.init_process_group("gloo", **in_file(folder))
        for _ in range(60):
            scores = [None] * dist.get_world_size()
            dist.all_gather_object(scores, random.random())
            time.sleep(0.1)
    prepare_alone()


def in_file(folder):
    """Have the ranks meet in a file, and not at the store of torchrun."""
    rank, world = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    return {"init_method": f"file://{folder}/store", "rank": rank, "world_size": world}


def prepare_alone():
    """Work on rank 0 for longer than a hang takes to be reported."""
    if dist.get_rank() == 0:
        prepare()
    dist.barrier()


LATE = {
    "late_tells": tell,
    "late_helps": help_others,
    "late_for_barrier": deadlock,
    "late_in_file": deadlock,
    "late_killed": be_killed,
    "late_refuses": refuse,
    "late_alone": refuse,
    "late_deadlock": deadlock,
    "late_shards": deadlock,
    "late_sleep": sleep,
    "late_work": prepare,
    "late_everywhere": load,
    "late_wider": lambda: None,
}


def plain(folder, kind):
    """DistributedDataParallel, an evaluation and a checkpoint in each epoch; rank 1 hangs, exits or raises."""
    sampler = DistributedSampler(Rows())
    model = DistributedDataParallel(net())
    loader = DataLoader(Rows(), BATCH, sampler=sampler, num_workers=1 if kind == "workers" else 0)
    if kind in BEFORE_THE_FIRST_BATCH and dist.get_rank() == 1:
        (folder / "stopped").write_text(repr(time.time()))
        BEFORE_THE_FIRST_BATCH[kind]()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        model.train()
        for number, batch in enumerate(loader):
            if kind == "hang" and epoch and number == 3 and dist.get_rank() == 1:
                time.sleep(1000)
            if kind == "stops" and epoch and number == 3 and dist.get_rank() == 1:
                sys.exit(1)
            if kind == "crash" and epoch and number == 3 and dist.get_rank() == 1:
                raise ValueError("of rank 1")
            loss = model(batch).square().mean() + random.random()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield model, loss
        model.eval()
        with torch.no_grad():
            for batch in DataLoader(Rows(), 16):
                model(batch)
        if dist.get_rank() == 0:
            torch.save(model.state_dict(), folder / "checkpoint.pt")


def counted(folder, kind):
    """The same as ``plain``, on a clock that counts, as tests have it; who reads it is written down."""
    counter = itertools.count()

    def read(*_):
        readers = [sys._getframe(depth).f_globals.get("__name__", "") for depth in (1, 2)]
        if any(name.startswith("doctor") for name in readers):
            (folder / "read").write_text(repr(readers))
        return next(counter)

    for name in (
        "monotonic",
        "perf_counter",
        "time",
        "sleep",
        "process_time",
        "thread_time",
        "monotonic_ns",
        "time_ns",
    ):
        setattr(time, name, read)
    yield from plain(folder, kind)


def fsdp2(folder, kind):
    """fully_shard over gloo, without a loader."""
    from torch.distributed.fsdp import fully_shard

    model = net()
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=dist.init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(30):
        loss = model(torch.rand(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield model, loss


def accelerated(folder, kind):
    """A loop that Accelerate prepared, with accumulation."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Rows(), BATCH, shuffle=True))
    for _ in range(2):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(batch).square().mean() + random.random()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            yield model, loss


def edited(folder, kind):
    """The same as ``plain``, watched by the program itself."""
    import doctor

    module = net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)  # imports torch._dynamo, for seconds on a busy machine
    model = DistributedDataParallel(module)
    loader = DataLoader(Rows(), BATCH, sampler=DistributedSampler(Rows()))
    with doctor.watch(dirpath=folder / "own") as watch:
        watch.model(model)
        for batch in watch.loader(loader):
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            watch.step(loss=loss)
            yield model, loss
    for batch in loader:
        model(batch).mean().backward()
        optimizer.step()


def uneven(folder, kind):
    """Rank 1 has five batches more; the loop ends after the smallest number of all ranks, by a flag, or not, or begins
    its loader again."""
    model = DistributedDataParallel(net())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = DataLoader(torch.utils.data.Subset(Rows(), range(40 + 20 * dist.get_rank())), BATCH)
    fewest = torch.tensor(len(loader))
    dist.all_reduce(fewest, dist.ReduceOp.MIN)
    most = int(fewest) if kind == "uneven_counted" else 1000
    for _ in range(2):
        for number, batch in enumerate(repeated(loader) if kind == "uneven_repeated" else loader):
            if number >= most or (kind == "uneven_flagged" and is_over(number, fewest)):
                break
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.05)
            yield model, loss
        dist.barrier()


def repeated(loader):
    """Twenty batches, of a loader that begins again where it ends."""
    taken = 0
    while True:
        for batch in loader:
            yield batch
            taken += 1
            if taken == 20:
                return


def is_over(number, fewest):
    """Whether all ranks have taken as many batches."""
    return number >= fewest.item()


UNEVEN = dict.fromkeys(("uneven", "uneven_counted", "uneven_flagged", "uneven_repeated"), uneven)
KINDS = {**UNEVEN, **dict.fromkeys(LATE, late), "fsdp2": fsdp2, "accelerated": accelerated, "edited": edited}
KINDS["counted"] = counted


def states():
    """The state of every source of random numbers."""
    numbers = (random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().numpy().tobytes())
    return hashlib.sha256(repr(numbers).encode()).hexdigest()


def train(folder, kind):
    """Train, and write down all steps."""
    torch.set_num_threads(1)
    if kind == "late_for_group" and os.environ["RANK"] == "1":
        (folder / "stopped").write_text(repr(time.time()))
        deadlock()
    if kind == "late_other_port" and os.environ["RANK"] == "1":
        (folder / "stopped").write_text(repr(time.time()))
        server = socket.create_server(("127.0.0.1", 0))  # it accepts, and never answers
        os.environ["MASTER_PORT"] = str(server.getsockname()[1])
    dist.init_process_group("gloo", **(in_file(folder) if kind == "late_in_file" else {}))
    rank = dist.get_rank()
    for seed in (random.seed, numpy.random.seed, torch.manual_seed):
        seed(7 + rank)
    if kind == "evaluates":
        evaluate(folder)
        dist.destroy_process_group()
        return
    trace, made = [], None
    for model, loss in KINDS.get(kind, plain)(folder, kind):
        made = model
        trace.append((loss.item().hex(), states()))
    parameters = [getattr(one, "_local_tensor", one).detach().numpy().tobytes() for one in made.parameters()]
    trace.append(hashlib.sha256(b"".join(parameters)).hexdigest())
    (folder / f"trace-{rank}.json").write_text(json.dumps(trace))
    dist.barrier()
    dist.destroy_process_group()


def spawned(rank, folder, kind):
    """One rank of those that this program starts itself."""
    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}"}
    train(folder, kind)


if __name__ == "__main__":
    folder, kind = Path(sys.argv[1]), (sys.argv[2:] or ["plain"])[0]
    if kind in ("spawn", "fork", "crash"):
        os.environ |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": sys.argv[3]}
        torch.multiprocessing.start_processes(
            spawned, (folder, kind), nprocs=2, start_method="fork" if kind == "fork" else "spawn"
        )
    else:
        train(folder, kind)
