"""A training program in which the last rank, or rank 0, does what its first argument says.

``scenes.py SCENE FOLDER`` is one rank. ``scenes.py serve [MODULE...]`` imports torch and the modules once, and forks a
rank for each line that it reads: an import takes longer than most scenes.

A scene that makes progress does what it does until there is a file ``enough`` in its folder, trains for some more
steps, and ends with digests of what it computed; see repeatable_training.py.
"""

import ctypes
import importlib
import itertools
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
from repeatable_training import Record
from repeatable_training import train as train_with_random_numbers
from torch.utils.data import DataLoader, Dataset

STEPS_BEFORE = 5


def next_play():
    """Fork a rank for each line: its scene, folder and environment. Only the ranks return."""
    # DistributedDataParallel, FSDP and optimizers import torch._dynamo when they are first used.
    for name in ("torch._dynamo", *sys.argv[2:]):
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            return become_rank(*json.loads(line))
        print(pid, flush=True)
    os._exit(0)


def become_rank(scene, folder, environ):
    """Be as if this process had been started for the scene alone."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if "OWN_HOST" in environ:
        enter_namespaces(environ["OWN_HOST"])
    os.setsid()
    log = os.open(f"{folder}/log", os.O_WRONLY | os.O_APPEND)
    for number, file in enumerate((os.open(os.devnull, os.O_RDONLY), log, log)):
        os.dup2(file, number)
    sys.argv[1:] = [scene, folder]
    os.environ.clear()
    show_environ(environ)
    os.environ.update(environ)
    if "RUN_AS" in environ:
        become_user(int(environ["RUN_AS"]), may_be_traced="NOT_DUMPABLE" not in environ)
    return scene, Path(folder)


def become_user(user, may_be_traced):
    """Be a process of another user. The kernel forbids to trace it until it executes a program, or says otherwise."""
    os.setgid(user)
    os.setgroups([])
    os.setuid(user)
    pr_set_dumpable = 4
    ctypes.CDLL(None).prctl(pr_set_dumpable, int(may_be_traced), 0, 0, 0)


def enter_namespaces(host):
    """Be process 1 of PID, UTS and mount namespaces of its own; what it was before waits for it."""
    libc = ctypes.CDLL(None, use_errno=True)
    new_pid, new_uts, new_mount, private, recursive = 0x20000000, 0x4000000, 0x20000, 1 << 18, 1 << 14
    assert libc.unshare(new_pid | new_uts | new_mount) == 0, os.strerror(ctypes.get_errno())
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
        os._exit(0)
    assert libc.mount(None, b"/", None, private | recursive, None) == 0, os.strerror(ctypes.get_errno())
    assert libc.mount(b"proc", b"/proc", b"proc", 0, None) == 0, os.strerror(ctypes.get_errno())
    socket.sethostname(host)


def show_environ(environ):
    """Overwrite the memory that ``/proc/PID/environ`` shows, which has the variables of the program's start."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[47]), int(fields[48])
    block = "".join(f"{name}={value}\0" for name, value in environ.items()).encode()
    assert len(block) <= end - start, "the server needs a longer PADDING"
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, block, len(block))


SCENE, FOLDER = next_play() if sys.argv[1] == "serve" else (sys.argv[1], Path(sys.argv[2]))
assert "doctor" not in sys.modules


def join_group():
    for name, *others in (
        ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"),
        ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"),
    ):
        os.environ.setdefault(name, next((os.environ[other] for other in others if other in os.environ), "0"))
    if SCENE in BEFORE_GROUP:
        arrived(os.environ["RANK"])
        if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
            BEFORE_GROUP[SCENE]()
    if not dist.is_initialized():  # Ray Train has done so
        dist.init_process_group("gloo")


def goes_on():
    """Whether this rank continues what the scene is about."""
    return not (FOLDER / "enough").exists()


def all_go_on(size=8):
    """The same for all ranks, as rank 0 decides in a collective."""
    decision = torch.full((size,), float(dist.get_rank() == 0 and goes_on()))
    dist.all_reduce(decision)
    return bool(decision[0])


def arrived(rank=None):
    (FOLDER / f"rank-{dist.get_rank() if rank is None else rank}").touch()


def is_killed_at_start():
    time.sleep(0.2)  # whoever started it looks at it first
    os.kill(os.getpid(), signal.SIGKILL)


def joins_late():
    time.sleep(3600)


def loads_first():
    while goes_on():
        sum(range(100_000))


BEFORE_GROUP = {"killed-at-start": is_killed_at_start, "joins-late": joins_late, "loads-first": loads_first}


def is_last():
    return dist.get_rank() == dist.get_world_size() - 1


class Rows(Dataset):
    def __len__(self):
        return 1_000_000

    def __getitem__(self, index):
        if index == 20 and is_last():
            load_row()
        return torch.full((3,), index % 10 / 10)


def load_row():
    while SCENE == "row-never-comes":
        time.sleep(3600)
    while SCENE == "row-is-long" and goes_on():
        sum(range(100_000))


def train_unevenly():
    model = sharded() if SCENE.startswith("fsdp") else torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
    loader = DataLoader(Rows(), sampler=range(20 if is_last() else 30))
    for step, batch in enumerate(loader):
        if step == 18:
            arrived()
        model(batch).sum().backward()
    dist.barrier()


def train_evenly():
    torch.manual_seed(0)
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    record = Record(FOLDER)
    for epoch in itertools.count():
        for batch in DataLoader(Rows(), sampler=range(30)):
            is_last = record.add(update(model, optimizer, batch))
        dist.barrier()
        if epoch == 0:
            arrived()
        dist.all_reduce(is_last)
        if is_last.any():
            record.write(model, optimizer)
            return


def update(model, optimizer, batch):
    """One step; returns its loss."""
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def train():
    torch.manual_seed(dist.get_rank())
    model = sharded() if SCENE.startswith("fsdp") else torch.nn.Linear(3, 3)
    if SCENE.startswith("ddp"):
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    loads = SCENE.startswith("row")
    batches = DataLoader(Rows(), batch_size=2, num_workers=2) if loads else [torch.randn(2, 3) for _ in range(20)]
    record = Record(FOLDER)
    while True:
        for batch in batches:
            if record.steps == STEPS_BEFORE - 1:
                arrived()
                act()
            is_last = record.add(update(model, optimizer, batch))
            dist.all_reduce(is_last)
            if is_last.any():
                record.write(model, optimizer)
                return


def train_repeatably():
    train_with_random_numbers(FOLDER, arrived)


def sharded():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Linear(8, 3))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (*model, model):
        fully_shard(part, mesh=mesh)
    return model


def train_with_accelerate():
    from accelerate import Accelerator

    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(3, 3)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.01, momentum=0.9))
    record = Record(FOLDER)
    while True:
        if record.steps == STEPS_BEFORE - 1:
            arrived()
            act()
        loss = model(torch.randn(2, 3)).square().mean()
        accelerator.gather(loss.detach())
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        is_last = record.add(loss)
        dist.all_reduce(is_last)
        if is_last.any():
            record.write(model, optimizer)
            return


def train_with_lightning():
    from lightning.pytorch import LightningModule, Trainer

    class Model(LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layer = torch.nn.Linear(3, 3)

        def on_fit_start(self):  # there is a process group now
            self.record = Record(FOLDER)

        def training_step(self, batch, number):
            if number == STEPS_BEFORE:
                arrived()
                act()
            loss = self.layer(batch).square().mean()
            is_last = self.record.add(loss)
            dist.all_reduce(is_last)
            self.trainer.should_stop = bool(is_last.any())
            return loss

        def train_dataloader(self):
            return DataLoader([torch.ones(3)] * 1_000_000, batch_size=2)

        def on_train_end(self):
            self.record.write(self.layer, self.optimizers().optimizer)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.01)

    names = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    options = dict.fromkeys(names, False)
    Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, default_root_dir=FOLDER, **options).fit(Model())


def act():
    action = ACTIONS.get(SCENE)
    if action is not None:
        action()


def sleeps():
    if is_last():
        time.sleep(3600)


def gathers():
    if dist.get_rank() == dist.get_world_size() - 1:
        dist.all_gather([torch.ones(1) for _ in range(dist.get_world_size())], torch.ones(1))


def waits_for_a_lock():
    if is_last():
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()


def holds_the_interpreter():
    if is_last():
        ctypes.PyDLL(None).sleep(3600)


def is_stopped():
    if is_last():
        os.kill(os.getpid(), signal.SIGSTOP)


def leaves():
    if is_last():
        threading.Thread(target=time.sleep, args=(3600,)).start()
        sys.exit()


def stops_at_a_breakpoint():
    """Its standard input has no line and does not end."""
    if is_last():
        reader, _ = os.pipe()
        sys.stdin = os.fdopen(reader)
        breakpoint()
        dist.barrier()


def passes_breakpoints():
    if is_last():
        lines = subprocess.Popen(["yes", "continue"], stdout=subprocess.PIPE, text=True)
        sys.stdin = lines.stdout
    with Path(os.devnull).open("w") as sys.stdout:
        while all_go_on():
            if is_last():
                breakpoint()


def differs():
    """Which one a rank calls depends on what it has read, not on its number."""
    values = [float(number) for number in range(3 if is_last() else 2)]
    if len(values) > 2:
        dist.broadcast(torch.ones(8), 0)
    else:
        dist.all_reduce(torch.ones(8))


def crosses():
    one, two = dist.new_group([0, 1]), dist.new_group([0, 1])
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1), group=one)
    elif dist.get_rank() == 1:
        dist.all_reduce(torch.ones(1), group=two)


def is_killed():
    """Over Gloo the others lose a connection if they exchange data with it; they wait for it in the store."""
    if is_last():
        os.kill(os.getpid(), signal.SIGKILL)
    dist.new_group()


def tokenize(text):
    return [ord(letter) % 97 for letter in text]


def tokenizes():
    while dist.get_rank() == 0 and goes_on():
        list(map(tokenize, ["some text"] * 100))
    dist.barrier()


def tokenize_slowly(number):
    while goes_on():
        tokenize(str(number))


def tokenizes_in_pool():
    if dist.get_rank() == 0:
        with multiprocessing.Pool(2) as pool:
            pool.map(tokenize_slowly, range(8))
    dist.barrier()


def tokenizes_in_threads():
    if dist.get_rank() == 0:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(tokenize_slowly, range(8)))
    dist.barrier()


def packs():
    if dist.get_rank() == 0:
        with subprocess.Popen(["gzip", "-c", "/dev/zero"], stdout=subprocess.DEVNULL) as packer:
            threading.Thread(target=kill_in_the_end, args=(packer,)).start()
            packer.communicate()
    dist.barrier()


def kill_in_the_end(process):
    while goes_on():
        time.sleep(0.1)
    process.kill()


def downloads():
    """From a server that sends a little ten times a second."""
    if dist.get_rank() == 0:
        server = socket.create_server(("127.0.0.1", 0))
        if not os.fork():
            serve_slowly(server)
        with urllib.request.urlopen(f"http://127.0.0.1:{server.getsockname()[1]}/weights") as response:
            response.read()
    dist.barrier()


def serve_slowly(server):
    connection, _ = server.accept()
    connection.recv(1 << 16)  # closing a socket with unread data resets the connection
    connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n")
    while goes_on():
        connection.sendall(b"x" * 1000)
        time.sleep(0.1)
    os._exit(0)


def exchanges_much():
    while all_go_on(1 << 24):
        pass


def receives():
    """Rank 0 waits for rank 1, and this one for the last."""
    if is_last():
        time.sleep(3600)
    dist.recv(torch.ones(1), dist.get_rank() + 1)
    dist.send(torch.ones(1), dist.get_rank() - 1)


def tokenize_or_die(number):
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return tokenize(str(number))


def tokenize_in_pool():
    """The pool replaces a child that died, and waits for its result."""
    with multiprocessing.Pool(2) as pool:
        return pool.map(tokenize_or_die, range(8))


def pool_loses_a_child():
    if dist.get_rank() == 0:
        tokenize_in_pool()
    dist.barrier()


LOCK = threading.Lock()


def count_with_lock(number):
    with LOCK:
        return number


def pool_deadlocks():
    """As if another thread had held the lock while the pool was forked."""
    if dist.get_rank() == 0:
        with LOCK:
            pool = multiprocessing.Pool(2)
        pool.map(count_with_lock, range(8))
    dist.barrier()


def validates():
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
    while dist.get_rank() == 0 and goes_on():
        with torch.no_grad():
            model(torch.ones(64, 256))
    dist.barrier()


def computes():
    matrix = torch.rand(1000, 1000)
    while is_last() and goes_on():
        matrix = (matrix @ matrix).clamp(0, 1)


def has_slow_steps():
    matrix = torch.rand(500, 500)
    while all_go_on():
        until = time.monotonic() + 2.5
        while time.monotonic() < until:
            matrix = (matrix @ matrix).clamp(0, 1)


def saves():
    while dist.get_rank() == 0 and goes_on():
        torch.save([torch.ones(1 << 20) for _ in range(8)], FOLDER / "checkpoint.pt")
    dist.barrier()


TRAININGS = {
    "ddp-uneven": train_unevenly,
    "fsdp-uneven": train_unevenly,
    "fsdp-even": train_evenly,
    "repeats": train_repeatably,
}
ACTIONS = {
    "sleeps": sleeps,
    "ddp-sleeps": sleeps,
    "fsdp-sleeps": sleeps,
    "accelerate-sleeps": sleeps,
    "lightning-sleeps": sleeps,
    "gathers": gathers,
    "waits-for-a-lock": waits_for_a_lock,
    "holds-the-interpreter": holds_the_interpreter,
    "is-stopped": is_stopped,
    "leaves": leaves,
    "stops-at-a-breakpoint": stops_at_a_breakpoint,
    "passes-breakpoints": passes_breakpoints,
    "differs": differs,
    "crosses": crosses,
    "killed": is_killed,
    "pool-loses-a-child": pool_loses_a_child,
    "pool-deadlocks": pool_deadlocks,
    "tokenizes": tokenizes,
    "tokenizes-in-pool": tokenizes_in_pool,
    "tokenizes-in-threads": tokenizes_in_threads,
    "packs": packs,
    "downloads": downloads,
    "exchanges-much": exchanges_much,
    "receives": receives,
    "validates": validates,
    "computes": computes,
    "slow-steps": has_slow_steps,
    "saves": saves,
}

if __name__ == "__main__":
    if SCENE.startswith("lightning"):
        train_with_lightning()
    elif SCENE.startswith("accelerate"):
        train_with_accelerate()
    else:
        join_group()
        TRAININGS.get(SCENE, train)()
