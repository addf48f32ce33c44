"""What is planted in the trainings of ``training.py``: faults of single ranks, and healthy work that looks unusual.

A play is data: ``plant`` names a method of :class:`Plant`, ``ranks`` are those it is planted on, ``at`` is the step,
and ``world`` the number of ranks. A training calls the methods at the places of their names; each does nothing in the
ranks and steps that the play does not name.
"""

import contextlib
import math
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))


import moments
from child_processes import ChildProcesses
from crashes import Crashes
from diverging_ranks import DivergingRanks
from healthy_plays import HealthyPlays
from loops_and_locks import LoopsAndLocks
from mismatched_collectives import MismatchedCollectives
from moments import LONG
from outside_loop import OutsideLoop
from services_and_files import ServicesAndFiles
from stragglers import Stragglers

WIDTH, BATCH = 8, 4
IN_TENTH_STEPS = ("skip", "other_collective", "shape", "metric", "dtype", "wrong_source")
"""Plants in a collective of the user in every tenth step."""
ON_FIRST_RANK = ("prepares_barrier", "prepares_data")
"""What the first rank does in ``prepare_data`` of Lightning."""
LOADERS = ("filters_rows", "deals_files", "ramps_batch", "mixes_sources", "packs_texts")
"""Plays with a loader of their own."""


class Plant(
    MismatchedCollectives,
    LoopsAndLocks,
    ChildProcesses,
    ServicesAndFiles,
    Crashes,
    DivergingRanks,
    Stragglers,
    HealthyPlays,
    OutsideLoop,
):
    """The play of one rank."""

    def __init__(self, folder, play):
        self.folder, self.play = Path(folder), play
        self.name, self.at = play["plant"], play.get("at", 20)
        self.pace, self.steps, self.epochs = play.get("pace", 0.04), play.get("steps", 60), play.get("epochs", 2)
        self.world = play.get("world", 2)
        self.rank = int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")))
        self.step = self.passes = self.rows = self.updates = 0
        self.kept = []
        self.own = random.Random(self.rank)

    @property
    def here(self):
        """Whether the play is planted on this rank."""
        return self.rank in self.play.get("ranks", [1])

    def strikes(self, *names):
        """Whether one of these plants strikes at this step."""
        return self.name in names and self.here and self.step == self.at

    def note(self):
        """Note the moment of the fault, once."""
        with contextlib.suppress(FileExistsError), (self.folder / "planted").open("x") as file:
            file.write(repr(time.time()))

    # In the dataset.

    def row(self, index):
        """Read row ``index``; ``at`` counts batches."""
        self.rows += 1
        in_worker = torch.utils.data.get_worker_info() is not None
        if self.here and self.rows == self.at * BATCH:
            self.reads(in_worker)
            if self.name == "row_sleep" or (self.name == "loader_timeout" and in_worker):
                self.note()
                time.sleep(LONG)
            if self.name == "worker_dead" and in_worker:
                self.note()
                os.kill(os.getpid(), signal.SIGKILL)
            if self.name == "worker_frozen" and in_worker:
                self.note()
                os.kill(os.getpid(), signal.SIGSTOP)
            if self.name == "rejection":
                self.note()
                while self.own.random() < 2:
                    pass
            if self.name == "worker_lock" and in_worker:
                self.note()
                self.lock_of_log.acquire()  # a thread held it when this worker was forked
        row = self.prepared(torch.full((WIDTH,), math.sin(self.each_row(index))))
        if self.name in moments.IN_ROW:
            return getattr(self, self.name)(row)
        return row

    def each_row(self, index):
        """What is done for every row; the number of the row that is read."""
        if self.here and self.name == "row_slow" and self.rows > self.at * BATCH:
            self.note()
            time.sleep(0.02)
        if self.here and self.name == "zipped" and self.rows > self.at * BATCH:
            self.note()
            self.zipped()
        if self.name in ("unsharded", "workers_unsplit"):
            self.note()
        if self.name == "no_workers":
            self.reads_slowly()
        self.opens(index)
        self.fills_cache(index)
        return index + self.own.gauss(0, 0.1) if self.name == "repeated_augmentation" else index

    @property
    def workers(self):
        """Data workers of each rank."""
        if self.name == "no_workers":
            return 0 if self.here else 2
        return self.play.get("workers", 1 if self.name.startswith("worker") else 0)

    @property
    def patience(self):
        """Seconds that the loader waits for its workers; 0: without limit."""
        return 5 if self.name == "loader_timeout" else 0

    @property
    def reads_as(self):
        """The rank whose part of the rows this rank reads."""
        if self.name == "sampler_rank" and self.here:
            self.note()
            return 0
        return self.rank

    def collate(self, rows):
        """Make a batch; ``at`` counts rows of the worker as in :meth:`row`."""
        if self.name == "collate_key" and self.here and self.rows == self.at * BATCH:
            self.note()
            return {"text": rows}["label"]
        self.tokenizes()
        return torch.stack(rows)

    @property
    def batch(self):
        """Rows of a batch on this rank."""
        return 2 * BATCH if self.name == "batch_size" and self.here else BATCH

    @property
    def seed(self):
        """The seed of the model."""
        return 8 if self.name == "by_hand" and self.here else 7

    def batches(self):
        """How many batches this rank has in an epoch."""
        self.tracks()
        self.connects()
        if self.name == "worker_lock" and self.here:
            self.lock_of_log = threading.Lock()
            self.lock_of_log.acquire()
        if self.name == "forked_pool" and self.here:
            self.begins_to_read()
        more = {
            "more": 1,
            "fewer": -1,
            "stream": -10,
            "join": 7,
            "joined_by_minimum": 5,
            "cycles_shorter": -15,
            "goes_on_empty": -7,
            "restarts_iterator": -40,
        }.get(self.name, 0)
        if more and abs(more) == 1:
            self.note()
        return self.steps + (more if self.here else 0)

    # In the model.

    def forward(self):
        """Work of the model in each forward pass in training."""
        self.passes += 1
        seconds = self.pace
        if self.name == "uneven_work":
            seconds *= self.own.uniform(0.5, 1.5)
        if self.name == "turns" and self.passes // 10 % self.world == self.rank:
            seconds *= 2
        if self.name in ("accumulates", "bf16", "by_hand", "batch_size", "no_sampler", "other_optimizer") and self.here:
            self.note()
        if self.name == "slow_first" and self.passes == 1:
            seconds = 10.0 + 2.0 * self.rank
        time.sleep(seconds)
        if self.name in moments.IN_MODEL:
            getattr(self, self.name)()
        if self.strikes("forward_sleep"):
            self.note()
            time.sleep(LONG)
        if self.strikes("exception", "caught", "restart_loop"):
            self.note()
            raise ValueError(f"a sample of rank {self.rank} has no label")

    def evaluated(self):
        """Work of the model in each forward pass in evaluation."""
        if self.name == "evaluate_everywhere":
            time.sleep(0.05)
        if self.name in ("validation_endless", "validation_uneven"):
            self.evaluates_batch()

    def leaves_out(self):
        """Whether the second layer is left out in this pass."""
        if self.name == "unused_everywhere":
            self.note()
            return True
        if self.strikes("unused"):
            self.note()
            return True
        return self.drops() or (self.name == "unused_found" and self.here and self.passes % 3 == 0)

    def recomputes(self):
        """Whether this rank computes activations again in the backward pass."""
        if self.name != "recompute" or not self.here:
            return False
        self.note()
        return True

    def loss(self, loss):
        """The loss of a step."""
        if self.strikes("nan"):
            self.note()
            return loss * float("nan")
        if self.strikes("grad_nan"):
            self.note()
            return loss + 0 * torch.sqrt(loss * 0)  # the loss is finite, its derivative is not
        if self.strikes(*moments.IN_LOSS):
            self.note()
            return getattr(self, self.name)(loss)
        return self.gathers_features(self.carries(self.unrolls(loss)))

    # In the loop.

    def accumulates(self, number):
        """Whether gradients are only accumulated in this batch."""
        if self.name in ("accumulation", "sync_forgotten", "sync_in_third"):
            return number % 3 != 2
        return self.accumulated(number)

    def forgets(self):
        """Whether this rank reduces gradients where it should only accumulate them."""
        if self.name != "sync_forgotten" or not self.here:
            return False
        self.note()
        return True

    def clips(self, model):
        """Clip gradients on this rank only."""
        self.changes_gradients(model)
        if self.name == "clip" and self.here and self.step >= self.at:
            self.note()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        if self.strikes("grad_norm_alone"):
            self.note()
            norm = torch.nn.utils.get_total_norm([one.grad for one in model.parameters()])
            print(f"norm of the gradients: {norm.full_tensor()}")

    def leaves(self):
        """Whether this rank leaves the loop now."""
        if self.strikes("break"):
            self.note()
            return True
        if self.name == "early_stop" and self.step == self.at:
            stop = torch.tensor([1.0 if self.rank == 0 else 0.0])
            dist.all_reduce(stop)
            return bool(stop)
        if self.name == "trigger":
            if self.here and self.step == self.at:
                self.accelerator.set_trigger()
            return self.accelerator.check_trigger()
        return self.out_of_time()

    def stepped(self, model):
        """Do what a user does after a step."""
        self.step += 1
        if self.name == "worker_lock" and self.here and self.lock_of_log.locked():
            self.lock_of_log.release()
        if self.name == "loads_other" and self.step == 5:
            self.kept = [one.detach().clone() for one in model.parameters()]
        if self.name in moments.EVERY_STEP:
            getattr(self, self.name)(model)
        if self.name in IN_TENTH_STEPS and self.step % 10 == 0:
            self.metric()
        if self.name in moments.ONCE and self.strikes(self.name):
            self.note()
            getattr(self, self.name)(model)
        if self.name in moments.FROM_THEN_ON and self.here and self.step >= self.at:
            self.note()
            getattr(self, self.name)(model)
        if self.name == "logs":
            print("x" * 200_000, flush=True)
        if self.name == "pause_everywhere" and self.step == self.at:
            time.sleep(12)

    def logs(self, module):
        """Log a metric of all ranks through Lightning, on this rank only."""
        if self.strikes("log_alone"):
            self.note()
            module.log("gap", torch.ones(()), sync_dist=True)

    def metric(self):
        """A collective of the user in every tenth step."""
        value = torch.ones(4)
        if self.name == "wrong_source":
            source = self.rank if self.strikes("wrong_source") else 0
            if source:
                self.note()
            dist.broadcast_object_list([self.step], src=source)
            return
        if self.here and self.step == self.at:
            self.note()
            if self.name == "skip":
                return
            if self.name == "other_collective":
                dist.broadcast(value, src=self.rank)
                return
            if self.name == "shape":
                value = torch.ones(7)
            if self.name == "dtype":
                value = value.double()
        dist.all_reduce(value)

    def ended(self, model):
        """Do what a user does after an epoch."""
        if self.name in ("skip_ahead", "stream") and self.here:
            self.note()
        self.evaluates_part(model)
        if self.name == "heartbeat":
            self.kept[0].join()
        if self.name == "evaluate_everywhere":
            self.evaluates(model, 12)
        if self.name == "evaluate_first":
            if self.rank == 0:
                self.evaluates(model, 12)
            dist.barrier()
        if self.name == "checkpoint_first":
            if self.rank == 0:
                self.saves(model, 10)
            dist.barrier()
        if self.name == "interrupt" and self.rank == 0:
            os.killpg(int((self.folder / "launcher").read_text()), signal.SIGINT)  # as a terminal does
        if self.name == "interrupt":
            time.sleep(LONG)

    # Work.

    def evaluates(self, model, seconds):
        """Evaluate for some seconds, without a collective."""
        inner = getattr(model, "module", model)
        model.eval()
        with torch.no_grad():
            for _ in range(int(seconds / 0.05)):
                if self.name == "evaluate_everywhere":
                    model(torch.ones(BATCH, WIDTH))
                    continue
                if not hasattr(inner, "set_requires_gradient_sync"):  # of fully_shard: it gathers with the others
                    inner(torch.ones(BATCH, WIDTH))
                time.sleep(0.05)
        model.train()

    def saves(self, model, seconds):
        """Save a checkpoint to a slow disk."""
        part = seconds / 10
        with SlowFile((self.folder / f"checkpoint-{self.rank}").open("wb"), part) as file:
            for number in range(10):
                torch.save({f"part-{number}": torch.zeros(64)}, file)


class SlowFile:
    """A file on a slow disk: the first write of each part of a checkpoint takes some seconds."""

    def __init__(self, file, seconds):
        self.file, self.seconds, self.waited = file, seconds, False

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()

    def write(self, content):
        """Write it; one wait a part, because torch writes a part in several pieces."""
        if not self.waited:
            time.sleep(self.seconds)
        self.waited = True
        return self.file.write(content)

    def flush(self):
        """The part is complete."""
        self.waited = False
        self.file.flush()
