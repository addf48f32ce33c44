"""Further plants of ``planted.py``: defects that users of the frameworks report, each with its source.

Of those without a method: ``even_batches_off`` https://github.com/huggingface/accelerate/pull/776.
"""

import asyncio
import copy
import csv
import difflib
import multiprocessing
import os
import random
import resource
import socket
import subprocess
import threading
import time
import urllib.request
from multiprocessing.shared_memory import SharedMemory

import numpy
import torch
import torch.distributed as dist
from mishaps import started

STRIKE_ONCE = (
    "debugger_attached", "pool_unpickles", "timeout_in_vain", "ring_full", "placement_waits", "matches_texts",
    "lock_of_killed", "trickles", "wakeup_lost", "checkpoint_alone", "wraps_alone", "calls_pending", "file_too_large",
    "state_unsafe", "timeouts_handled",
)  # fmt: skip
"""Plants that strike once, after the step ``at``."""
STRIKE_ON = ("projects_gradients", "copies_vocabulary", "redefines_task", "dead_address")
"""Plants that strike after each step from ``at`` on."""
EVERY_STEP = (
    "draws_once_more", "gathers_generator", "renames_twice", "draws_agreed", "saves_everywhere", "errors_agreed",
    "short_threads", "waits_in_parts",
)  # fmt: skip
"""What every rank does after each step."""
IN_ROW = ("csv_field", "copies_annotations", "loads_tokenizer", "workers_start_late")
"""What changes a row that was read."""
IN_LOSS = ("std_of_one", "unlabelled_ends")
"""What changes the loss of one step."""
DEBUGGER = """
import ctypes, os, sys, time
libc = ctypes.CDLL(None)
print(flush=True)
for thread in os.listdir(f"/proc/{sys.argv[1]}/task"):
    libc.ptrace(0x4206, int(thread), 0, 0)
    libc.ptrace(0x4207, int(thread), 0, 0)
time.sleep(1000)
"""
"""A debugger that stops all threads of a process (``PTRACE_SEIZE``, ``PTRACE_INTERRUPT``), and does not go on."""
TRICKLE = """
import http.server, time
class Shards(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "1000000")
        self.end_headers()
        while True:
            self.wfile.write(b"x")
            self.wfile.flush()
            time.sleep(0.5)
    def log_message(self, *_):
        pass
server = http.server.HTTPServer(("127.0.0.1", 0), Shards)
print(server.server_port, flush=True)
server.serve_forever()
"""
"""A store that sends two bytes a second."""


class Defects:
    """Plants between steps: each is a method that gets the model, as of :class:`planted.Plant`."""

    # Collectives that the ranks do not call alike.

    def draws_once_more(self, model):
        """Draw the task of every tenth step, on a rank that has drawn once more from the same generator.

        https://github.com/deepmodeling/deepmd-kit/pull/5397
        """
        if not self.kept:
            self.kept.append(random.Random(5))
        if self.strikes("draws_once_more"):
            self.note()
            self.kept[0].random()  # for an augmentation that was tried again
        if self.step % 10 == 0:
            self.does_task(self.kept[0].choice(("labels", "contrastive", "codes")))

    def does_task(self, task):
        """What the ranks do together for a task."""
        if task == "labels":
            dist.all_reduce(torch.ones(4))
        if task == "contrastive":
            dist.all_gather([torch.empty(8) for _ in range(self.world)], torch.ones(8))
        if task == "codes":
            dist.broadcast(torch.ones(16), 0)

    def changes_gradients(self, model):
        """Change gradients before the optimizer uses them."""
        if self.name in ("clips_unless_masked", "clips_sharded"):
            self.clips_together(model)
        if self.name == "even_batches_off" and self.here:
            self.note()
        if self.name == "noise_of_first" and self.here and self.step >= self.at:
            self.note()
            self.adds_noise(model)

    def clips_together(self, model):
        """Clip by the norm over all ranks, which a rank leaves out where it has nothing to clip.

        https://github.com/NVIDIA/Model-Optimizer/pull/1621
        """
        if self.strikes("clips_unless_masked"):
            self.note()
            return
        model.clip_grad_norm_(1.0)

    def checkpoint_alone(self, model):
        """Save a checkpoint on the main rank only (https://github.com/Lightning-AI/pytorch-lightning/issues/10947)."""
        self.trainer.save_checkpoint(self.folder / "best.ckpt")

    def wraps_alone(self, model):
        """Prepare another model on this rank only (https://github.com/huggingface/accelerate/issues/2488)."""
        self.accelerator.prepare(torch.nn.Linear(8, 8))

    def gathers_generator(self, model):
        """Gather results in every tenth step, which a rank can't pickle, and goes on.

        https://github.com/NVIDIA/TensorRT-LLM/pull/7507
        """
        if self.step % 10:
            return
        result = {"step": self.step, "scores": [0.5] * 4}
        if self.strikes("gathers_generator"):
            self.note()
            result["scores"] = (score for score in result["scores"])
        try:
            dist.all_gather_object([None] * self.world, result)
        except TypeError as error:
            print(f"results were not gathered: {error}")

    # What does not come back.

    def debugger_attached(self, model):
        """Be stopped by a debugger that does not let it go on (https://github.com/benfred/py-spy/issues/390)."""
        started(DEBUGGER, str(os.getpid()))
        time.sleep(1000)

    def pool_unpickles(self, model):
        """Wait for a pool whose error can't be unpickled (https://github.com/python/cpython/issues/103061)."""
        with multiprocessing.get_context("fork").Pool(2) as pool:
            pool.map(label_of, range(4))

    def timeout_in_vain(self, model):
        """Give up a judge after two seconds, whose thread the event loop waits for at its end.

        https://github.com/python/cpython/issues/82448
        """

        async def score():
            try:
                return await asyncio.wait_for(asyncio.to_thread(asks_silent), 2)
            except asyncio.TimeoutError:
                return 0.0

        print(asyncio.run(score()))

    def ring_full(self, model):
        """Write into a ring of shared memory until it is read by an engine that was killed.

        https://github.com/vllm-project/vllm-ascend/issues/9405
        """
        ring = SharedMemory(create=True, size=4)
        reader = multiprocessing.get_context("fork").Process(target=reads_slowly, args=(ring,), daemon=True)
        reader.start()
        reader.kill()
        reader.join()
        for number in range(100):
            while ring.buf[number % 4]:
                os.sched_yield()
            ring.buf[number % 4] = 1

    def placement_waits(self, model):
        """Wait for a placement group that fits on no node (https://github.com/ray-project/ray/issues/27287)."""
        import ray
        from ray.util import placement_group

        ray.get(placement_group([{"CPU": 64}]).ready())

    def matches_texts(self, model):
        """Compare two long texts that repeat themselves (https://github.com/python/cpython/issues/107578)."""
        print(difflib.SequenceMatcher(None, "the cat " * 20_000, "a cat the " * 20_000, autojunk=False).ratio())

    def lock_of_killed(self, model):
        """Write past a progress bar, whose lock a process had that was killed (https://github.com/tqdm/tqdm/issues/1500)."""
        from tqdm import tqdm

        tqdm.get_lock()
        taken = multiprocessing.get_context("fork").Event()
        worker = multiprocessing.get_context("fork").Process(target=takes_lock, args=(tqdm, taken), daemon=True)
        worker.start()
        taken.wait()
        worker.kill()
        worker.join()
        tqdm.write(f"loss of step {self.step}: 0.5")

    def trickles(self, model):
        """Download from a store that sends few bytes, but in time (https://github.com/linkedpipes/etl/issues/507)."""
        store = started(TRICKLE)
        urllib.request.urlopen(f"http://127.0.0.1:{store.first_line}", timeout=10).read()

    def wakeup_lost(self, model):
        """Wait for the notice of a thread that came before (https://github.com/pytorch/pytorch/pull/1140)."""
        ready = threading.Condition()

        def reads():
            with ready:
                ready.notify_all()

        threading.Thread(target=reads, daemon=True).start()
        time.sleep(0.5)
        with ready:
            ready.wait()

    # What ends the rank.

    def renames_twice(self, model):
        """Rename the folder of a checkpoint, which another rank has renamed already.

        https://github.com/huggingface/transformers/issues/27925
        """
        if self.step != self.at:
            return
        staging = self.folder / f"tmp-checkpoint-{self.step}"
        if self.rank == 0:
            staging.mkdir()
        dist.barrier()
        if self.here:
            time.sleep(0.5)
            self.note()
        staging.rename(self.folder / f"checkpoint-{self.step}")

    def calls_pending(self, model):
        """Call an actor of Ray more often than it lets wait (https://github.com/ray-project/ray/pull/19936)."""
        import ray

        judge = ray.remote(Judge).options(num_cpus=0, max_pending_calls=4).remote()
        ray.get([judge.scores.remote(1.0) for _ in range(16)])

    def file_too_large(self, model):
        """Save to a volume that takes no large files (https://github.com/voxel51/fiftyone/issues/5409)."""
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        torch.save({"experts": torch.ones(1 << 20)}, self.folder / "experts.pt")

    def state_unsafe(self, model):
        """Load a state of random numbers that holds arrays (https://github.com/huggingface/transformers/issues/34631)."""
        path = self.folder / f"rng_state_{self.rank}.pth"
        torch.save({"numpy": numpy.random.get_state(), "cpu": torch.get_rng_state()}, path)
        torch.set_rng_state(torch.load(path)["cpu"])

    def csv_field(self, row):
        """Read a line whose text is longer than a field may be (https://github.com/facebookresearch/pytext/pull/477)."""
        if self.here and self.rows == self.at * 4:
            self.note()
            text, label = next(csv.reader([f'"{"word " * 40_000}",1.0']))
            return row * float(label) + len(text) * 0
        return row

    # Numbers and data of this rank.

    def adds_noise(self, model):
        """Add noise to gradients on the first rank, after they were reduced (https://github.com/meta-pytorch/opacus/pull/196)."""
        for one in model.parameters():
            one.grad += 0.1 * torch.randn(one.shape)

    def extends(self, net):
        """Give the model a head for each task, in the order of a set, which is another one on a rank.

        https://github.com/apache/mxnet/issues/17056
        """
        if self.name != "heads_of_set":
            return
        tasks = ["boxes", "depth", "masks"]
        if self.here:
            self.note()
            tasks.reverse()
        net.last = Heads(net.last, tasks)

    def std_of_one(self, loss):
        """Divide by the deviation of a group of one answer (https://github.com/huggingface/trl/pull/5773)."""
        rewards = loss.expand(1, 1)
        return ((rewards - rewards.mean(1)) / (rewards.std(1) + 1e-4)).mean() + loss

    def unlabelled_ends(self, loss):
        """Take rows without labels in a step, of which a rank has fewer: Lightning ends the epoch there.

        https://github.com/Lightning-AI/pytorch-lightning/pull/9052
        """
        unlabelled = iter(torch.rand(0, 8))
        return loss + next(unlabelled).mean()

    def rows_more(self):
        """Rows beyond a multiple of the ranks: the first one reads a batch more, unless batches are made even."""
        return 4 if self.name in ("even_batches_off", "batches_evened") else 0

    # What makes a rank slow.

    def projects_gradients(self, model):
        """Decompose gradients in every twenty-fifth step (https://github.com/jiaweizzhao/GaLore/issues/6)."""
        if self.step % 25 == 0:
            until = time.monotonic() + 2.5
            while time.monotonic() < until:
                self.kept = [torch.linalg.svd(torch.rand(500, 500)).U[:, :8]]

    def copies_annotations(self, row):
        """Copy all polygons of an image (https://github.com/facebookresearch/detectron2/issues/939)."""
        if not self.here or self.rows <= self.at * 4:
            return row
        self.note()
        if not self.kept:
            self.kept = [{"polygon": [[float(x), float(y)] for x in range(40) for y in range(40)]} for _ in range(10)]
        return row + len(copy.deepcopy(self.kept)) * 0

    def loads_tokenizer(self, row):
        """Load the tokenizer for each row (https://github.com/nyu-mll/jiant/pull/935)."""
        if not self.here or self.rows <= self.at * 4:
            return row
        from tokenizers import Tokenizer

        path = self.folder / "tokenizer.json"
        if not path.exists():
            tokenizer_of(20_000).save(str(path))
        self.note()
        return row + Tokenizer.from_file(str(path)).encode("w7").ids[0] * 0

    def copies_vocabulary(self, model):
        """Ask for the size of the vocabulary, by a copy of it (https://github.com/huggingface/tokenizers/issues/483)."""
        if not self.kept:
            self.kept = [tokenizer_of(100_000)]
        print(f"step {self.step}, vocabulary {len(self.kept[0].get_vocab())}")

    def redefines_task(self, model):
        """Define a task of Ray anew for each of many texts (https://github.com/ray-project/ray/issues/6240)."""
        import ray

        for number in range(40):
            task = ray.remote(num_cpus=0)(lambda number=number: number)
            ray.get(task.remote())

    def dead_address(self, model):
        """Connect to a server in every twenty-fifth step, whose first address does not answer.

        https://github.com/urllib3/urllib3/issues/2030
        """
        if not self.kept:
            self.kept = [full_server(), socket.create_server(("127.0.0.1", 0))]
        if self.step % 25:
            return
        for server in (self.kept[0][0], self.kept[1]):
            try:
                socket.create_connection(server.getsockname(), timeout=2.5).close()
            except TimeoutError:
                continue
            self.kept[1].accept()[0].close()

    # Healthy.

    def draws_agreed(self, model):
        """Draw the task of every tenth step from generators with one seed."""
        self.draws_once_more(model)

    def evaluates_part(self, model):
        """Evaluate parts of another length on each rank after an epoch, and gather the scores."""
        if self.name == "evaluates_part":
            self.evaluates(model, 5 + 4 * self.rank)
            dist.all_gather_object([None] * self.world, [self.own.random()] * 4)

    def saves_everywhere(self, model):
        """Save a checkpoint by the Trainer on all ranks in every twentieth step."""
        if self.step % 20 == 0:
            self.trainer.save_checkpoint(self.folder / f"step-{self.step}.ckpt")

    def errors_agreed(self, model):
        """Skip what the ranks do together in every tenth step, on all of them, where one has failed."""
        if self.step % 10:
            return
        failed = torch.zeros(1)
        try:
            if self.here and self.step % 20 == 0:
                raise ValueError(f"a sample of rank {self.rank} has no label")
        except ValueError as error:
            print(f"skipped: {error}")
            failed += 1
        dist.all_reduce(failed)
        if not failed:
            dist.all_gather_object([None] * self.world, {"step": self.step})

    def short_threads(self, model):
        """Start eight threads in each step, and a command in every tenth."""
        threads = [threading.Thread(target=time.sleep, args=(0.005,)) for _ in range(8)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        if self.step % 10 == 0:
            subprocess.run(["true"], check=True)

    def waits_in_parts(self, model):
        """Wait for four tasks of Ray, of which the last one takes eight seconds, a second at a time."""
        if self.step % 60:
            return
        import ray

        task = ray.remote(num_cpus=0)(lambda seconds: time.sleep(seconds))
        left = [task.remote(2 * (number + 1)) for number in range(4)]
        while left:
            _, left = ray.wait(left, timeout=1)

    def workers_start_late(self, row):
        """Open an index for six seconds in each worker of data, which begins anew in each epoch."""
        if self.rows == 1 and torch.utils.data.get_worker_info() is not None:
            time.sleep(6)
        return row

    def timeouts_handled(self, model):
        """Ask a judge three times that does not answer in time, and go on."""

        async def score():
            for _ in range(3):
                try:
                    return await asyncio.wait_for(asyncio.sleep(1000, 1.0), 1.5)
                except asyncio.TimeoutError:
                    print("the judge does not answer in time")
            return 0.0

        print(asyncio.run(score()))


class Heads(torch.nn.Module):
    """Heads for tasks, whose outputs are added; all are like one layer, with other numbers."""

    def __init__(self, layer, tasks):
        super().__init__()
        self.heads = torch.nn.ModuleDict({task: copy.deepcopy(layer) for task in tasks})

    def forward(self, rows):
        """The sum."""
        return sum((number + 1) * self.heads[task](rows) for number, task in enumerate(sorted(self.heads)))


class LabelError(Exception):
    """A row without a label; pickle makes it with one argument, and fails."""

    def __init__(self, row, reason):
        super().__init__(f"row {row}: {reason}")


class Judge:
    """Scores answers, as an actor of Ray."""

    def scores(self, seconds):
        """Score after some seconds."""
        time.sleep(seconds)
        return 1.0


def label_of(row):
    """The label of a row, which has none."""
    raise LabelError(row, "it has no label")


def asks_silent():
    """Read from a server that does not answer."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        return client.recv(1)


def reads_slowly(ring):
    """Read a ring of shared memory, from a second on."""
    while True:
        time.sleep(1)
        ring.buf[:] = bytes(4)


def takes_lock(bar, taken):
    """Take the lock of progress bars, as a process that writes its own."""
    bar.get_lock().acquire()
    taken.set()
    time.sleep(1000)


def full_server():
    """A server that accepts no more connections: it does not answer to the next one."""
    server = socket.create_server(("127.0.0.1", 0), backlog=0)
    waiting = [socket.socket() for _ in range(3)]
    for one in waiting:
        one.setblocking(False)
        one.connect_ex(server.getsockname())
    return [server, *waiting]


def tokenizer_of(count):
    """A tokenizer with so many words."""
    from tokenizers import Tokenizer, models

    return Tokenizer(models.WordLevel({f"w{number}": number for number in range(count)}, unk_token="w0"))
