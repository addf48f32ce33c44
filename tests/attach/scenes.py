"""A training program in which the last rank, or rank 0, does what its first argument says."""

import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

SCENE, FOLDER = sys.argv[1], Path(sys.argv[2])
for name, *others in (
    ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"),
    ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"),
):
    os.environ.setdefault(name, next((os.environ[other] for other in others if other in os.environ), "0"))
dist.init_process_group("gloo")
RANK, WORLD = dist.get_rank(), dist.get_world_size()
IS_LAST = RANK == WORLD - 1
STEPS_BEFORE = 5


def arrived():
    (FOLDER / f"rank-{RANK}").touch()


class Rows(Dataset):
    def __len__(self):
        return 10_000

    def __getitem__(self, index):
        if index == 20 and IS_LAST:
            load_row()
        return torch.ones(3)


def load_row():
    while SCENE == "row-never-comes":
        time.sleep(3600)
    while SCENE == "row-is-long":
        sum(range(100_000))


def train_unevenly():
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
    for step in range(20 if IS_LAST else 30):
        if step == 18:
            arrived()
        model(torch.ones(2, 3)).sum().backward()
    dist.barrier()


def train():
    model = torch.nn.Linear(3, 3)
    if SCENE.startswith("ddp"):
        model = torch.nn.parallel.DistributedDataParallel(model)
    batches = DataLoader(Rows(), batch_size=2, num_workers=2) if SCENE.startswith("row") else [torch.ones(2, 3)] * 20
    step = 0
    while True:
        for batch in batches:
            step += 1
            if step == STEPS_BEFORE:
                arrived()
                act()
            model(batch).sum().backward()
            dist.all_reduce(torch.ones(8))


def act():
    action = ACTIONS.get(SCENE)
    if action is not None:
        action()


def sleeps():
    if IS_LAST:
        time.sleep(3600)


def gathers():
    if dist.get_rank() == WORLD - 1:
        dist.all_gather([torch.ones(1) for _ in range(WORLD)], torch.ones(1))


def waits_for_a_lock():
    if IS_LAST:
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()


def holds_the_interpreter():
    if IS_LAST:
        ctypes.PyDLL(None).sleep(3600)


def is_stopped():
    if IS_LAST:
        os.kill(os.getpid(), signal.SIGSTOP)


def leaves():
    if IS_LAST:
        threading.Thread(target=time.sleep, args=(3600,)).start()
        sys.exit()


def crosses():
    one, two = dist.new_group([0, 1]), dist.new_group([0, 1])
    if RANK == 0:
        dist.all_reduce(torch.ones(1), group=one)
    elif RANK == 1:
        dist.all_reduce(torch.ones(1), group=two)


def computes():
    matrix = torch.rand(1000, 1000)
    while IS_LAST:
        matrix = (matrix @ matrix).clamp(0, 1)


def saves():
    while RANK == 0:
        torch.save([torch.rand(1 << 20) for _ in range(8)], FOLDER / "checkpoint.pt")
    dist.barrier()


ACTIONS = {
    "sleeps": sleeps,
    "ddp-sleeps": sleeps,
    "gathers": gathers,
    "waits-for-a-lock": waits_for_a_lock,
    "holds-the-interpreter": holds_the_interpreter,
    "is-stopped": is_stopped,
    "leaves": leaves,
    "crosses": crosses,
    "computes": computes,
    "saves": saves,
}

if __name__ == "__main__":
    train_unevenly() if SCENE == "ddp-uneven" else train()
