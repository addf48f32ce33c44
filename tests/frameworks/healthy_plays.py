"""Plants of ``planted.py``: healthy work that looks unusual."""

import asyncio
import concurrent.futures
import contextlib
import copy
import faulthandler
import gc
import hashlib
import logging
import multiprocessing
import os
import queue
import signal
import sqlite3
import subprocess
import sys
import threading
import time

import torch
import torch.distributed as dist
from moments import every_step, in_model, in_row, once
from shared_helpers import HOLDER, Scorer, Side, compute, scores_shortly, started
from torch.utils.data import DataLoader

WORK = "import time\nend = time.process_time() + 4\nwhile time.process_time() < end: sum(range(1000))"
EVALUATION = "import sys, time\ntime.sleep(8)\nprint(sum(range(1_000_000)))"
"""An evaluation of a checkpoint, which mostly waits for its data."""
CONTINUES = """
import os, signal, sys, time
print(flush=True)
os.kill(int(sys.argv[1]), signal.SIGSTOP)
time.sleep(3)
os.kill(int(sys.argv[1]), signal.SIGCONT)
"""
"""A tool that stops a process for three seconds to read its memory."""
REPORT = """Sample {number}: "My job fails after an hour, what does this mean?
Traceback (most recent call last):
  File "train.py", line 12, in <module>
    loss.backward()
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB
RuntimeError: DataLoader worker (pid 1234) is killed by signal: Killed."
Answer: "Use smaller batches."
"""
"""A text of a dataset of questions and answers."""
PROGRAMS = ("print(6 * 7)", "raise ValueError('no such key')", "import ctypes; ctypes.string_at(0)")
"""What a model has written as answers: the second one fails, and the third one crashes."""


class HealthyPlays:
    """Methods of :class:`planted.Plant`, which get the model unless they are called elsewhere."""

    @once
    def handled(self, model):
        """Log an error that was handled, with its traceback."""
        try:
            raise ConnectionError("no answer from the tracking server")
        except ConnectionError:
            logging.exception("the upload is tried again later")

    @once
    def child_killed(self, model):
        """Kill a command that took too long."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(["sleep", "100"], timeout=0.5, check=True)

    @every_step
    def local_sgd(self, model):
        """Average the parameters in every fourth step, and let ranks differ between."""
        if self.step % 4 == 0:
            for parameter in model.parameters():
                dist.all_reduce(parameter.data)
                parameter.data /= self.world

    @every_step
    def subgroup(self, model):
        """Sum something up in a group without the last rank."""
        if self.step == 1:
            self.kept.append(dist.new_group([0, 1]))
        if self.step % 10 == 0 and self.rank in (0, 1):
            dist.all_reduce(torch.ones(4), group=self.kept[0])

    @every_step
    def ring(self, model):
        """Pass something to the next rank."""
        sent = dist.isend(torch.ones(4), (self.rank + 1) % self.world)
        dist.recv(torch.ones(4), (self.rank - 1) % self.world)
        sent.wait()

    @every_step
    def gather_everywhere(self, model):
        """Gather objects of different sizes in every tenth step."""
        if self.step % 10 == 0:
            dist.all_gather_object([None] * self.world, ["x" * 1000] * (self.rank + 1))

    def prefetched(self, batches):
        """Batches that a thread reads ahead, which dies of an error at batch ``at``."""
        ahead = queue.Queue(2)

        def reads():
            for number, rows in enumerate(batches):
                if self.name == "prefetch_dead" and self.here and number == self.at:
                    self.note()
                    raise KeyError(f"no label of sample {number}")
                ahead.put(rows)
            ahead.put(None)

        threading.Thread(target=reads, daemon=True).start()
        while (rows := ahead.get()) is not None:
            yield rows

    @once
    def child_works(self, model):
        """Wait for a command that computes for 4 seconds."""
        subprocess.run([sys.executable, "-S", "-c", WORK], check=True)

    @once
    def pool_saves(self, model):
        """Save in a thread for 12 seconds, while the training goes on."""
        self.kept.append(concurrent.futures.ThreadPoolExecutor(1))
        self.kept.append(self.kept[0].submit(self.saves, model, 12))

    @once
    def lock_held(self, model):
        """Wait 4 seconds for a lock that a thread holds while it writes."""
        lock, taken = threading.Lock(), threading.Event()

        def writes():
            with lock:
                taken.set()
                self.saves(model, 4)

        threading.Thread(target=writes, daemon=True).start()
        taken.wait()
        with lock:
            pass

    @every_step
    def naps(self, model):
        """Look on all ranks for a file that a thread of one rank writes after 8 seconds."""
        if self.step != self.at:
            return
        if self.here:
            threading.Timer(8, (self.folder / "ready").touch).start()
        while not (self.folder / "ready").exists():
            time.sleep(0.2)

    @once
    def backoff_ends(self, model):
        """Send a metric to a tracking server that is available again after three attempts."""
        self.backoff(model, refused=3)

    @once
    def alarm_handled(self, model):
        """Give up a request after 2 seconds, by an alarm."""

        def gives_up(*_):
            raise TimeoutError

        before = signal.signal(signal.SIGALRM, gives_up)
        signal.alarm(2)
        with contextlib.suppress(TimeoutError):
            threading.Event().wait()
        signal.signal(signal.SIGALRM, before)

    @once
    def sqlite_frees(self, model):
        """Write to a database that another process keeps locked for 4 seconds."""
        path = str(self.folder / "runs.db")
        with subprocess.Popen([sys.executable, "-S", "-c", HOLDER, path, "4"], stdout=subprocess.PIPE) as owner:
            owner.stdout.readline()
            with contextlib.closing(sqlite3.connect(path, 1000)) as base:
                base.execute("CREATE TABLE losses (value REAL)")

    @every_step
    def polls(self, model):
        """Look ten times a second on all ranks for a file that a thread of one rank writes after 9 seconds."""
        if self.step != self.at:
            return
        if self.here:
            threading.Timer(9, (self.folder / "ready").touch).start()
        while not (self.folder / "ready").exists():
            time.sleep(0.1)

    @in_model
    def ragged(self):
        """Compute in the model for rows of any length."""
        compute(self.own.uniform(0, 0.03))

    @every_step
    def report_everywhere(self, model):
        """Report to Ray Train on all workers in every tenth step."""
        if self.step % 10 == 0:
            import ray.train

            ray.train.report({"loss": 0.5})

    @every_step
    def in_turn(self, model):
        """Have each rank in turn send its number of samples to the others."""
        if self.step % 5 == 0:
            for source in range(self.world):
                dist.broadcast_object_list([self.step], src=source)

    @every_step
    def dcp_async(self, model):
        """Save the sharded state with all ranks in every twentieth step, while the training goes on."""
        import torch.distributed.checkpoint as dcp

        if self.step == 1:
            self.kept.append(dist.new_group())
        if self.step % 20 == 0:
            if len(self.kept) > 1:
                self.kept.pop().result()
            state, path = {"model": model.state_dict()}, self.folder / f"step-{self.step}"
            self.kept.append(dcp.async_save(state, checkpoint_id=str(path), process_group=self.kept[0]))

    @every_step
    def heartbeat(self, model):
        """Meet the other ranks twice a second in a thread, with a group of its own, for six times."""
        if self.step != 1:
            return
        group = dist.new_group()

        def beats():
            for _ in range(6):
                dist.all_reduce(torch.ones(1), group=group)
                time.sleep(0.5)

        self.kept.append(threading.Thread(target=beats))
        self.kept[0].start()

    @every_step
    def profile_window(self, model):
        """Profile five steps of one rank, and write what was seen."""
        if self.here and self.step == self.at:
            self.kept.append(torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], with_stack=True))
            self.kept[0].start()
        if self.here and self.step == self.at + 5:
            self.kept[0].stop()
            self.kept[0].export_chrome_trace(str(self.folder / "trace.json"))

    @every_step
    def counts_in_actor(self, model):
        """Count samples in every tenth step in an actor of Ray that all ranks share."""
        import ray

        if not self.kept:
            options = {"name": "samples", "get_if_exists": True, "num_cpus": 0}
            self.kept.append(ray.remote(Samples).options(**options).remote())
        if self.step % 10 == 0:
            ray.get(self.kept[0].add.remote(4))

    @every_step
    def rollouts(self, model):
        """Have a server generate answers, for some seconds that differ by rank, and gather their scores."""
        if self.step % 20 == 0:
            model.eval()
            time.sleep(self.own.uniform(0.5, 4))
            model.train()
            dist.all_gather_object([None] * self.world, [self.own.random()] * 4)

    @every_step
    def usr1_saves(self, model):
        """Save on all ranks after the signal by which a scheduler announces the end of the time."""
        if self.step == 1:
            signal.signal(signal.SIGUSR1, lambda *_: self.kept.append("save"))
        if self.step == self.at:
            os.kill(os.getpid(), signal.SIGUSR1)
        if "save" in self.kept:
            self.kept.remove("save")
            self.saves(model, 2)
            dist.barrier()

    def finishes(self):
        """Copy results to another place on the first rank, after the others have ended."""
        if self.name == "uploads_last" and self.rank == 0:
            self.saves(None, 8)

    @every_step
    def preempted(self, model):
        """Save and end on all ranks after the signal that ends the job."""
        if self.step == 1:
            signal.signal(signal.SIGTERM, lambda *_: self.kept.append("end"))
        if self.step == self.at:
            os.kill(os.getpid(), signal.SIGTERM)
        if "end" in self.kept:
            self.saves(model, 2)
            dist.barrier()
            sys.exit(0)

    @every_step
    def sync_in_third(self, model):
        """Reduce gradients in every third batch only, on all ranks."""
        model.set_requires_gradient_sync(self.step % 3 == 2)

    @every_step
    def swaps_weights(self, model):
        """Evaluate in every twentieth step with averaged parameters, on all ranks, and put the others back."""
        own = [one.detach().clone() for one in model.parameters()]
        self.kept = self.kept or copy.deepcopy(own)
        with torch.no_grad():
            for held, one in zip(self.kept, own, strict=True):
                held.lerp_(one, 0.1)
        if self.step % 20:
            return
        for values in (self.kept, own):
            for one, value in zip(model.parameters(), values, strict=True):
                one.data.copy_(value)
            if values is self.kept:
                self.evaluates(model, 0.5)

    def fills_cache(self, index):
        """Keep each row that was read, until all are there."""
        if self.name == "fills_cache":
            self.kept = self.kept or [{}]
            self.kept[0].setdefault(index, bytearray(os.urandom(1 << 10)) * (1 << 9))

    @in_model
    def curriculum(self):
        """Train with longer rows step by step, on all ranks."""
        time.sleep(min(0.15, 0.0015 * self.passes))

    @every_step
    def writes_summary(self, model):
        """Write a line after each step on the main rank."""
        if self.rank == 0:
            with (self.folder / "losses.csv").open("a") as file:
                file.write(f"{self.step},0.5\n")
                file.flush()
                os.fsync(file.fileno())

    @once
    def waits_for_task(self, model):
        """Wait for a task of Ray that evaluates for eight seconds, on all ranks."""
        import ray

        ray.get(ray.remote(num_cpus=0)(lambda: time.sleep(8)).remote())

    @every_step
    def seeds_by_rank(self, model):
        """Draw noise with a seed of each rank's own, after the model was wrapped."""
        if self.step == 1:
            torch.manual_seed(100 + self.rank)
        torch.rand(8)

    @every_step
    def saves_whole(self, model):
        """Gather the whole state on all ranks, which the first one writes to a slow disk."""
        if self.step != self.at:
            return
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        get_model_state_dict(model, options=options)
        if self.rank == 0:
            self.saves(model, 8)
        dist.barrier()

    @every_step
    def plateau_agreed(self, model):
        """Lower the learning rate by a metric of all ranks, in the same step."""
        inner = getattr(self.optimizer, "optimizer", self.optimizer)
        if not self.kept:
            self.kept.append(torch.optim.lr_scheduler.ReduceLROnPlateau(inner, patience=1))
        if self.step % 10 == 0:
            metric = torch.tensor(float(self.rank))
            dist.all_reduce(metric)
            self.kept[0].step(metric.item())

    @every_step
    def retried_twice(self, model):
        """Wait for a task of Ray that fails twice, and then reads its shard."""
        if self.step == self.at:
            self.retried_forever(model, 2)

    @every_step
    def wandb_offline(self, model):
        """Log to wandb on the main rank."""
        if self.rank == 0:
            self.kept[0].log({"loss": 0.5})

    def tracks(self):
        """Open a run of wandb on the main rank, before the training."""
        if self.name in ("wandb_offline", "wandb_stuck") and self.rank == 0:
            import wandb

            settings = wandb.Settings(console="off", silent=True)
            self.kept.append(wandb.init(mode="offline", dir=str(self.folder), settings=settings))

    @once
    def evaluates_in_child(self, model):
        """Have another process evaluate a checkpoint, while the training goes on."""
        torch.save(model.state_dict(), self.folder / "step-20.pt")
        self.kept.append(subprocess.Popen([sys.executable, "-S", "-c", EVALUATION]))

    def accumulated(self, number):
        """Whether a batch is only accumulated, of which there are more and more in a step on all ranks."""
        return self.name == "accumulates_more" and number % (1 + number // 20) != number // 20

    @every_step
    def reports_checkpoint(self, model):
        """Report to Ray Train on all workers in every twentieth step, with a checkpoint on the first."""
        if self.step % 20:
            return
        import ray.train

        checkpoint = None
        if self.rank == 0:
            path = self.folder / f"step-{self.step}"
            path.mkdir()
            torch.save(model.state_dict(), path / "model.pt")
            checkpoint = ray.train.Checkpoint.from_directory(path)
        ray.train.report({"loss": 0.5}, checkpoint=checkpoint)

    @every_step
    def micro_agreed(self, model):
        """Pass parts of a batch through stages in every tenth step, as many as the first rank says."""
        if self.step % 10 == 0:
            parts = torch.tensor([2 + self.step // 10 % 3])
            dist.broadcast(parts, 0)
            self.passes_parts(int(parts))

    @every_step
    def saves_best_agreed(self, model):
        """Save together where the mean of the losses of all ranks is the best."""
        if self.step % 10 == 0:
            loss = torch.tensor(self.own.uniform(0.5, 1) / self.step)
            self.saves_better(model, self.accelerator.reduce(loss, "mean").item())

    @every_step
    def prunes_alike(self, model):
        """Prune by the same mask on all ranks."""
        self.prunes(model)

    @every_step
    def summons_everywhere(self, model):
        """Summon the full parameters on all ranks in every thirtieth step; the first one writes for a moment."""
        if self.step % 30 == 0:
            self.summons(model, 0.2)

    @every_step
    def gathers_everywhere(self, model):
        """Gather partitioned parameters on all ranks in every thirtieth step; the first one writes for a moment."""
        if self.step % 30:
            return
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            if self.rank == 0:
                self.saves(model, 0.2)

    def prepares_data(self):
        """Download data for ten seconds in ``prepare_data``, for which the other ranks wait."""
        with (self.folder / "data.bin").open("wb") as file:
            for _ in range(100):
                file.write(bytes(1 << 16))
                time.sleep(0.1)

    @every_step
    def idle_threads(self, model):
        """Keep many threads that wait for work which seldom comes."""
        if self.step == 1:
            work = queue.Queue()
            for _ in range(100):
                threading.Thread(target=lambda: all(iter(work.get, None)), daemon=True).start()
            self.kept.append(work)
        if self.step % 20 == 0:
            self.kept[0].put(self.step)

    @once
    def rate_limited_shortly(self, model):
        """Wait three seconds, two times, for a server that limits requests."""
        self.asks_judge(2, 3)

    @every_step
    def asks_async_actor(self, model):
        """Have an actor of Ray score for six seconds, on all ranks, in every thirtieth step."""
        if self.step % 30:
            return
        import ray

        scorer = ray.remote(Scorer).options(num_cpus=0).remote()
        ray.get([scorer.scores_later.remote(6.0) for _ in range(4)])

    @every_step
    def draws_agreed(self, model):
        """Draw the task of every tenth step from generators with one seed."""
        self.draws_once_more(model)

    def evaluates_part(self, model):
        """Evaluate parts of another length on each rank after an epoch, and gather the scores."""
        if self.name == "evaluates_part":
            self.evaluates(model, 5 + 4 * self.rank)
            dist.all_gather_object([None] * self.world, [self.own.random()] * 4)

    @every_step
    def saves_everywhere(self, model):
        """Save a checkpoint by the Trainer on all ranks in every twentieth step."""
        if self.step % 20 == 0:
            self.trainer.save_checkpoint(self.folder / f"step-{self.step}.ckpt")

    @every_step
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

    @every_step
    def short_threads(self, model):
        """Start eight threads in each step, and a command in every tenth."""
        threads = [threading.Thread(target=time.sleep, args=(0.005,)) for _ in range(8)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        if self.step % 10 == 0:
            subprocess.run(["true"], check=True)

    @every_step
    def waits_in_parts(self, model):
        """Wait for four tasks of Ray, of which the last one takes eight seconds, a second at a time."""
        if self.step % 60:
            return
        import ray

        task = ray.remote(num_cpus=0)(lambda seconds: time.sleep(seconds))
        left = [task.remote(2 * (number + 1)) for number in range(4)]
        while left:
            _, left = ray.wait(left, timeout=1)

    @in_row
    def workers_start_late(self, row):
        """Open an index for six seconds in each worker of data, which begins anew in each epoch."""
        if self.rows == 1 and torch.utils.data.get_worker_info() is not None:
            time.sleep(6)
        return row

    @once
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

    def cycles(self, loader):
        """As many batches as the other ranks have, of a shorter part of the data that begins again."""
        taken = 0
        while taken < self.steps:
            for batch in loader:
                yield batch
                taken += 1
                if taken == self.steps:
                    return

    @every_step
    def groups_at_own_pace(self, model):
        """Sum something up in pairs of ranks: three times in a step, or once in two steps."""
        if not self.kept:
            self.kept = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        times = 3 if self.rank < 2 else self.step % 2
        for _ in range(times):
            dist.all_reduce(torch.ones(4), group=self.kept[self.rank // 2])

    @every_step
    def reduces_late(self, model):
        """Begin to sum something up in every tenth step, and wait for it five steps later."""
        if self.step % 10 == 0:
            self.kept = [dist.all_reduce(torch.ones(4), async_op=True)]
        if self.step % 10 == 5 and self.kept:
            self.kept.pop().wait()

    @once
    def waits_at_store(self, model):
        """Build an index for nine seconds on the main rank, while the others wait for a key of the store."""
        store = dist.distributed_c10d._get_default_store()
        if self.rank == 0:
            time.sleep(9)
            store.set("index-of-passages", "built")
        store.wait(["index-of-passages"])

    @every_step
    def gathers_on_main(self, model):
        """Gather texts of different lengths in every thirtieth step, which the main rank scores for five seconds."""
        if self.step % 30:
            return
        texts = ["word " * self.own.randint(1, 400)] * 4
        dist.gather_object(texts, [None] * self.world if self.rank == 0 else None, dst=0)
        score = [None]
        if self.rank == 0:
            time.sleep(5)
            score = [0.5]
        dist.broadcast_object_list(score, src=0)

    @every_step
    def layerwise_rates(self, model):
        """Give each group of parameters a learning rate of its own, which restarts in every twentieth step."""
        for number, group in enumerate(self.optimizer.param_groups):
            group["lr"] = 0.01 * 0.5**number * (self.step % 20 + 1) / 20

    @once
    def stopped_shortly(self, model):
        """Be stopped for three seconds by a tool that reads the memory of this process."""
        started(CONTINUES, str(os.getpid()))

    @every_step
    def meets_in_ray(self, model):
        """Wait in a barrier of Ray Train in every twentieth step, which the first worker joins five seconds later."""
        if self.step % 20:
            return
        from ray.train.collective import barrier

        time.sleep(0 if self.rank else 5)
        barrier()

    @every_step
    def checkpoints_all(self, model):
        """Save a checkpoint of the engine on all ranks in every twentieth step."""
        if self.step % 20 == 0:
            model.save_checkpoint(str(self.folder / "engine"))

    @every_step
    def pool_each_time(self, model):
        """Use a new pool of two processes in every tenth step."""
        if self.step % 10 == 0:
            with multiprocessing.get_context("fork").Pool(2) as pool:
                print(sum(pool.map(scores_shortly, range(8))))

    @every_step
    def reinits_agreed(self, model):
        """Draw the last layer anew in every twentieth step, on the main rank, which all others get."""
        if self.step % 20:
            return
        layer = model.module.last
        if self.rank == 0:
            layer.reset_parameters()
        for one in layer.parameters():
            dist.broadcast(one.data, src=0)

    @every_step
    def groups_renewed(self, model):
        """Make pairs of ranks anew in every tenth step, sum up in them, and give them up."""
        if self.step % 10:
            return
        pairs = [dist.new_group([first, first + 1]) for first in range(0, self.world, 2)]
        dist.all_reduce(torch.ones(4), group=pairs[self.rank // 2])
        dist.destroy_process_group(pairs[self.rank // 2])

    @every_step
    def saves_in_turn(self, model):
        """Write the part of each rank in turn in every thirtieth step, two seconds each."""
        if self.step % 30:
            return
        for turn in range(self.world):
            if turn == self.rank:
                time.sleep(2)
                torch.save(torch.zeros(64), self.folder / f"part-{turn}")
            dist.barrier()

    @every_step
    def splits_padded(self, model):
        """Divide seven prompts among the ranks, padded to the same number, and gather the score of each."""
        if self.step % 10:
            return
        prompts = [f"prompt {number}" for number in range(7)]
        with self.accelerator.split_between_processes(prompts, apply_padding=True) as own:
            for prompt in own:
                time.sleep(0.05 * self.rank)
                self.accelerator.gather(torch.tensor([float(len(prompt))]))

    @every_step
    def steps_environments(self, model):
        """Let four environments in processes of their own do a step each, for which this process waits."""
        if not self.kept:
            context = multiprocessing.get_context("fork")
            for _ in range(4):
                here, there = context.Pipe()
                context.Process(target=simulates, args=(there,), daemon=True).start()
                self.kept.append(here)
        for one in self.kept:
            one.send(self.step)
        print(sum(one.recv() for one in self.kept))

    @once
    def dumps_stacks(self, model):
        """Have the stacks of all threads written every two seconds, for as long as the process runs."""
        faulthandler.dump_traceback_later(2, repeat=True)

    @every_step
    def collects_together(self, model):
        """Collect garbage by hand in every twentieth step only, on all ranks, among many objects."""
        if not self.kept:
            gc.disable()
            self.kept = [[number] for number in range(400_000)]
        if self.step % 20 == 0:
            for _ in range(5):
                gc.collect()

    @every_step
    def prints_texts(self, model):
        """Print a text of the data in every tenth step on the main rank: a question about an error."""
        if self.rank == 0 and self.step % 10 == 0:
            print(REPORT.format(number=self.step), flush=True)

    @every_step
    def broadcasts_table(self, model):
        """Build a table of some megabytes for four seconds in every fortieth step, on the main rank, for all."""
        if self.step % 40:
            return
        table = [None]
        if self.rank == 0:
            time.sleep(4)
            table = [{number: f"entry {number}" for number in range(100_000)}]
        dist.broadcast_object_list(table, src=0)

    @every_step
    def branches_meet(self, model):
        """Meet in every twentieth step in a barrier that is called at another line on the main rank."""
        if self.step % 20:
            return
        if self.rank == 0:
            self.saves(model, 2)
            dist.barrier()
        else:
            dist.barrier()

    @every_step
    def exchanges_tokens(self, model):
        """Send tokens to experts in every tenth step: the numbers differ by rank, and are exchanged before."""
        if self.step % 10:
            return
        sent = [self.own.randint(0, 9) for _ in range(self.world)]
        numbers = torch.empty(self.world, dtype=torch.long)
        dist.all_to_all_single(numbers, torch.tensor(sent))
        received = numbers.tolist()
        dist.all_to_all_single(torch.empty(sum(received), 8), torch.ones(sum(sent), 8), received, sent)

    @every_step
    def takes_from_store(self, model):
        """Score twelve answers in every thirtieth step, which ranks take one by one from a counter in the store."""
        if self.step % 30:
            return
        store = dist.distributed_c10d._get_default_store()
        while store.add(f"taken-{self.step}", 1) <= 12:
            time.sleep(0.2 + 0.6 * self.rank)
        dist.barrier()

    @every_step
    def gathers_padded(self, model):
        """Gather generated texts in every tenth step, which have another length on each rank and are padded."""
        if self.step % 10 == 0:
            texts = torch.ones(4, self.own.randint(1, 40))
            self.accelerator.gather(self.accelerator.pad_across_processes(texts, dim=1))

    @once
    def forks_save(self, model):
        """Save in a forked process for ten seconds, while the training goes on; it is not waited for."""
        if not os.fork():
            self.saves(model, 10)
            os._exit(0)

    @every_step
    def signal_timer(self, model):
        """Note the line of the program forty times a second for a hundred steps, by the signal of a timer."""
        if self.step == 1:
            signal.signal(signal.SIGALRM, lambda _, frame: self.kept.append(frame.f_lineno))
            signal.setitimer(signal.ITIMER_REAL, 0.025, 0.025)
        if self.step == 100:
            signal.setitimer(signal.ITIMER_REAL, 0)  # no handler is there when the interpreter ends

    @every_step
    def prints_nan(self, model):
        """Print the accuracy of classes in every tenth step, of which some have no sample: it is not a number."""
        if self.step % 10 == 0:
            seen = torch.tensor([3.0, 0.0, 5.0 * self.rank])
            accuracy = seen / seen
            print({"step": self.step, "accuracy": accuracy.tolist(), "loss of class 1": float("nan")}, flush=True)

    @every_step
    def sandbox_crashes(self, model):
        """Run programs that a model has written in every tenth step, of which one fails and one crashes."""
        if self.step % 10 == 0:
            codes = [subprocess.run([sys.executable, "-S", "-c", one]).returncode for one in PROGRAMS]
            print(f"rewards: {[float(code == 0) for code in codes]}", flush=True)

    @every_step
    def actor_replaced(self, model):
        """Call an actor of Ray in every thirtieth step, which is killed in the call and replaced by another one."""
        if self.step % 30:
            return
        import ray

        judge = ray.remote(Side).options(num_cpus=0)
        try:
            ray.get(judge.remote().dies.remote())
        except ray.exceptions.RayActorError as error:
            print(f"another judge: {error}")
            print(ray.get(judge.remote().answers.remote()))

    @every_step
    def fills_and_frees(self, model):
        """Keep more and more memory, on one rank, which is given back in every thirtieth step."""
        if self.here:
            self.kept.append(bytearray(b"\1") * (4 << 20))
        if self.step % 30 == 0:
            self.kept.clear()

    def until_all_end(self, loader):
        """The batches of this rank, and then rows of zeros, until the data of all ranks has ended."""
        batches = iter(loader)
        while True:
            rows = next(batches, None)
            left = torch.tensor([float(rows is not None)])
            dist.all_reduce(left)
            if not left:
                return
            yield torch.zeros(4, 8) if rows is None else rows

    @every_step
    def hashes_in_threads(self, model):
        """Hash parts of a file in twelve threads in every tenth step, on all ranks."""
        if self.step % 10 == 0:
            with concurrent.futures.ThreadPoolExecutor(12) as pool:
                parts = list(
                    pool.map(lambda number: hashlib.sha256(bytes([number]) * (4 << 20)).hexdigest(), range(12))
                )
            print(f"hashed {len(parts)} parts")

    @every_step
    def next_phase(self, model):
        """Build the data of the next phase for some seconds in one step, which are more on a rank than on another."""
        if self.step == 30:
            time.sleep(5 + 2 * self.rank)

    @every_step
    def validates_anew(self, model):
        """Begin anew to read validation rows with a worker, in every twentieth step on all ranks."""
        if self.step % 20 == 0:
            rows = DataLoader(torch.ones(40, 8).unbind(), 4, num_workers=1)
            print(f"validated: {sum(float(batch.sum()) for batch in rows)}")

    @every_step
    def opens_many(self, model):
        """Keep 600 files open for fifty steps, on the main rank."""
        if self.rank == 0 and self.step == 10:
            self.kept = [(self.folder / f"shard-{number}").open("w") for number in range(600)]
        if self.step == 60:
            while self.kept:
                self.kept.pop().close()

    @every_step
    def rewards_in_threads(self, model):
        """Score answers in sixteen threads in every tenth step, each as long as it takes, and gather the sums."""
        if self.step % 10:
            return
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            list(pool.map(time.sleep, [self.own.uniform(0, 1.5) for _ in range(16)]))
        dist.all_gather_object([None] * self.world, self.own.random())

    @every_step
    def asks_many_actors(self, model):
        """Ask three actors of Ray at once in every tenth step, which were made in the first one."""
        if self.step % 10:
            return
        import ray

        while len(self.kept) < 3:
            self.kept.append(ray.remote(Side).options(num_cpus=0).remote())
        print(ray.get([actor.answers.remote() for actor in self.kept]))

    @every_step
    def saves_uneven(self, model):
        """Save parts of another size on each rank in every thirtieth step, and wait for each other."""
        if self.step % 30 == 0:
            self.saves(model, 1 + 2 * self.rank)
            dist.barrier()


class Samples:
    """A count, as an actor of Ray."""

    def __init__(self):
        self.count = 0

    def add(self, count):
        """The sum."""
        self.count += count
        return self.count


def simulates(connection):
    """An environment: each step takes some milliseconds, as many as it draws."""
    while True:
        step = connection.recv()
        time.sleep(0.005 * (step % 5 + 1))
        connection.send(1.0)
