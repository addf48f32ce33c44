"""Further plants of ``planted.py``: slips in the use of files, terminals, threads, metrics and hooks."""

import contextlib
import mmap
import multiprocessing
import os
import resource
import sqlite3
import subprocess
import sys
import termios
import threading
import time
import urllib.request

import torch
import torch.distributed as dist
from mishaps import HOLDER, SERVER

STRIKE_ONCE = (
    "bus_error", "histograms", "baton", "xoff", "import_lock", "cpu_time", "finally_barrier", "fork_lock",
    "queue_room", "stack_overflow", "freezes", "sqlite_frees",
)  # fmt: skip
"""Plants that strike once, after the step ``at``."""
STRIKE_ON = ("slow_tracking",)
"""Plants that strike after each step from ``at`` on."""
EVERY_STEP = ("set_order", "classes", "polls", "report_everywhere", "in_turn", "state_lost")
"""What every rank does after each step."""
IN_MODEL = ("long_rows", "ragged")
"""Work of the model in each forward pass in training."""
CYCLE = """
import threading
reader = threading.Thread(target=lambda: __import__("labels").NAMES)
reader.start()
reader.join()
NAMES = ["cat", "dog"]
"""
"""A module whose import waits for a thread that imports it."""


class Slips:
    """Plants between steps: each is a method that gets the model, as of :class:`planted.Plant`."""

    # Collectives that the ranks do not call alike.

    def set_order(self, model):
        """Reduce metrics in the order of a set in every tenth step, which from some step on differs on a rank."""
        if self.step % 10:
            return
        metrics = [torch.ones(1), torch.ones(7)]
        if self.here and self.step >= self.at:
            self.note()
            metrics.reverse()
        for one in metrics:
            dist.all_reduce(one)

    def classes(self, model):
        """Reduce one count for each class that this rank has seen, in every tenth step."""
        if self.step % 10:
            return
        seen = 3
        if self.strikes("classes"):
            self.note()
            seen = 4
        for _ in range(seen):
            dist.all_reduce(torch.ones(()))

    def finally_barrier(self, model):
        """Fail, and meet the others in a barrier before the error is raised."""
        try:
            raise ValueError("a sample has no label")
        finally:
            dist.barrier()

    def freezes(self, model):
        """Freeze half of the parameters after the model was wrapped."""
        parameters = list(model.parameters())
        for one in parameters[: len(parameters) // 2]:
            one.requires_grad_(False)

    # What does not come back.

    def baton(self, model):
        """Wait for the lock file of a build that was killed."""
        from torch.utils.file_baton import FileBaton

        (self.folder / "lock").touch()
        FileBaton(str(self.folder / "lock")).wait()

    def xoff(self, model):
        """Print to a terminal whose output was stopped, as by Ctrl-S."""
        self.kept.extend(os.openpty())
        termios.tcflow(self.kept[1], termios.TCOOFF)
        os.dup2(self.kept[1], 1)
        print("loss 0.5", flush=True)

    def import_lock(self, model):
        """Import a module that waits for a thread, which imports it too."""
        (self.folder / "labels.py").write_text(CYCLE)
        sys.path.insert(0, str(self.folder))
        __import__("labels")

    def fork_lock(self, model):
        """Wait for a child that was forked while a thread held a lock, which it takes."""
        lock, taken = threading.Lock(), threading.Event()

        def logs():
            with lock:
                taken.set()
                time.sleep(1)

        threading.Thread(target=logs, daemon=True).start()
        taken.wait()
        child = os.fork()
        if not child:
            lock.acquire()
            os._exit(0)
        os.waitpid(child, 0)

    def queue_room(self, model):
        """Pass samples to a process that writes them, and has been killed."""
        samples = multiprocessing.Queue(2)
        writer = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,), daemon=True)
        writer.start()
        writer.kill()
        for number in range(10):
            samples.put(number)

    # What ends the rank.

    def bus_error(self, model):
        """Read a mapped file that another process has truncated."""
        with (self.folder / "rows.bin").open("wb+") as file:
            file.truncate(1 << 20)
            rows = mmap.mmap(file.fileno(), 1 << 20)
            file.truncate(0)
            rows[1 << 19]

    def cpu_time(self, model):
        """Use more processor time than a limit allows."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        limit = int(used.ru_utime + used.ru_stime) + 2
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))
        while True:
            sum(range(1000))

    def stack_overflow(self, model):
        """Describe an object that is nested too deeply, without Python's own limit."""
        sys.setrecursionlimit(10**8)
        nested = []
        for _ in range(10**6):
            nested = [nested]
        repr(nested)

    # What makes ranks differ.

    def state_lost(self, model):
        """Train with momentum, whose state a rank loses, as where it resumes without it."""
        inner = getattr(self.optimizer, "optimizer", self.optimizer)
        if self.step == 1:
            for group in inner.param_groups:
                group["momentum"] = 0.9
        if self.strikes("state_lost"):
            self.note()
            inner.state.clear()

    # What makes a rank slow.

    def histograms(self, model):
        """Describe each gradient in the backward pass, as where gradients are logged."""
        for one in model.parameters():
            one.register_hook(lambda gradient: compute(0.012))

    def slow_tracking(self, model):
        """Send the loss to a tracking server that takes 60 ms to answer."""
        if not self.kept:
            server = subprocess.Popen([sys.executable, "-S", "-c", SERVER, "0", "0.06"], stdout=subprocess.PIPE)
            self.kept.extend((server, server.stdout.readline().decode().strip()))
        urllib.request.urlopen(f"http://127.0.0.1:{self.kept[1]}", b"loss=0.5", timeout=5).close()

    def long_rows(self):
        """Compute more in the model, as for longer rows, from some step on."""
        if self.here and self.step >= self.at:
            self.note()
            compute(0.06)

    # Healthy.

    def sqlite_frees(self, model):
        """Write to a database that another process keeps locked for 4 seconds."""
        path = str(self.folder / "runs.db")
        with subprocess.Popen([sys.executable, "-S", "-c", HOLDER, path, "4"], stdout=subprocess.PIPE) as owner:
            owner.stdout.readline()
            with contextlib.closing(sqlite3.connect(path, 1000)) as base:
                base.execute("CREATE TABLE losses (value REAL)")

    def polls(self, model):
        """Look ten times a second on all ranks for a file that a thread of one rank writes after 9 seconds."""
        if self.step != self.at:
            return
        if self.here:
            threading.Timer(9, (self.folder / "ready").touch).start()
        while not (self.folder / "ready").exists():
            time.sleep(0.1)

    def ragged(self):
        """Compute in the model for rows of any length."""
        compute(self.own.uniform(0, 0.03))

    def report_everywhere(self, model):
        """Report to Ray Train on all workers in every tenth step."""
        if self.step % 10 == 0:
            import ray.train

            ray.train.report({"loss": 0.5})

    def in_turn(self, model):
        """Have each rank in turn send its number of samples to the others."""
        if self.step % 5 == 0:
            for source in range(self.world):
                dist.broadcast_object_list([self.step], src=source)


def compute(seconds):
    """Compute with tensors for some seconds of this thread."""
    until, matrix = time.thread_time() + seconds, torch.ones(64, 64)
    while time.thread_time() < until:
        matrix = matrix @ matrix / 64
