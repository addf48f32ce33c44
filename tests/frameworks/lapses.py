"""Further plants of ``planted.py``: lapses that users of the frameworks report, each with its source.

Of those without a method: ``unsharded`` https://github.com/Lightning-AI/pytorch-lightning/issues/15734,
``other_optimizer`` https://github.com/Tencent/PatrickStar/issues/253,
``grad_norm_alone`` https://github.com/AgileRL/AgileRL/pull/586.
"""

import asyncio
import concurrent.futures
import cProfile
import ctypes
import datetime
import fcntl
import mmap
import multiprocessing
import os
import queue
import re
import signal
import threading
import time
import urllib.request

import torch
import torch.distributed as dist
from mishaps import started
from torch.utils.data import Sampler

STRIKE_ONCE = (
    "join_before_get", "store_key", "backtracking", "undead", "join_feeder", "ray_queue", "converges_never",
    "reward_queue", "illegal_instruction", "truncated", "optimizer_slow",
)  # fmt: skip
"""Plants that strike once, after the step ``at``."""
STRIKE_ON = ("samples_text", "cache_contended")
"""Plants that strike after each step from ``at`` on."""
EVERY_STEP = (
    "group_order", "metric_empty", "wrong_neighbor", "by_clock", "traced", "dcp_async", "heartbeat", "profile_window",
    "counts_in_actor", "rollouts", "usr1_saves",
)  # fmt: skip
"""What every rank does after each step."""
IN_LOSS = ("inplace", "anomaly", "log_zero")
"""What changes the loss of one step."""
STALLS = """
import http.server, sys, time
class Shards(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "1000000")
        self.end_headers()
        self.wfile.write(b"x" * 1000)
        self.wfile.flush()
        time.sleep(1000)
    def log_message(self, *_):
        pass
server = http.server.HTTPServer(("127.0.0.1", 0), Shards)
print(server.server_port, flush=True)
server.serve_forever()
"""
"""A store of data shards that sends the beginning of one, and no more."""
CONTENDER = """
import fcntl, os, sys, time
print(flush=True)
while os.path.exists(f"/proc/{sys.argv[1]}"):
    with open(sys.argv[2], "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        time.sleep(0.1)
    time.sleep(0.005)
"""
"""Another job that often takes the lock of a cache; it ends with the process that it disturbs."""
LONG = 1000.0


class Lapses:
    """Plants between steps: each is a method that gets the model, as of :class:`planted.Plant`."""

    # What does not come back.

    def join_before_get(self, model):
        """Wait for the end of a process before its result is taken (https://github.com/python/cpython/issues/73983)."""
        context = multiprocessing.get_context("fork")
        results = context.Queue()
        child = context.Process(target=results.put, args=(b"x" * (1 << 20),), daemon=True)
        child.start()
        child.join()
        results.get()

    def store_key(self, model):
        """Wait for a key that no rank sets in the store (https://github.com/pytorch/pytorch/issues/67972)."""
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        store.wait(["evaluated"], datetime.timedelta(seconds=LONG))

    def backtracking(self, model):
        """Match a text with an expression that backtracks (https://github.com/NVIDIA-NeMo/Guardrails/pull/2271)."""
        re.fullmatch(r"(\w+\s?)+:", "a" * 60)

    def undead(self, model):
        """Fail while a thread keeps the process alive (https://github.com/mlc-ai/pith-train/pull/31)."""
        threading.Thread(target=time.sleep, args=(LONG,)).start()
        raise RuntimeError("the shard has another number of rows than its index")

    def join_feeder(self, model):
        """Wait for a thread that reads ahead into a full queue (https://github.com/google/grain/pull/1373)."""
        ahead = queue.Queue(2)

        def reads():
            for number in range(100):
                ahead.put(number)

        reader = threading.Thread(target=reads, daemon=True)
        reader.start()
        ahead.get()
        reader.join()

    def ray_queue(self, model):
        """Wait for what nobody puts into a queue of Ray (https://github.com/agentscope-ai/Trinity-RFT/issues/182)."""
        from ray.util.queue import Queue

        Queue(actor_options={"num_cpus": 0}).get()

    def converges_never(self, model):
        """Normalize a matrix with a NaN until it converges (https://github.com/mmgalushka/hungarian-loss/issues/5)."""
        plan = torch.rand(64, 64)
        plan[0, 0] = float("nan")
        while not (plan.sum(0) - 1).abs().max() < 1e-4:
            plan = plan / plan.sum(1, keepdim=True)
            plan = plan / plan.sum(0)

    def reward_queue(self, model):
        """Wait for rewards whose only worker has failed (https://github.com/LLM360/Reasoning360/pull/109)."""

        async def scores(answers):
            answer = await answers.get()
            raise KeyError(f"no score of {answer}")

        async def rewards():
            answers = asyncio.Queue()
            for answer in range(4):
                answers.put_nowait(answer)
            worker = asyncio.create_task(scores(answers))
            await answers.join()
            await worker

        asyncio.run(rewards())

    def begins_to_read(self):
        """Use a pool of threads before the workers are forked (https://github.com/m2lines/Samudra/pull/660)."""
        self.decoders = concurrent.futures.ThreadPoolExecutor(1)
        self.decoders.submit(os.getpid).result()

    def reads(self, in_worker):
        """Read row ``at`` of a worker with these threads, or from a store that stalls.

        Of the store: https://github.com/apache/texera/issues/5718, https://github.com/huggingface/datasets/issues/3049.
        """
        if self.name == "forked_pool" and in_worker:
            self.note()
            self.decoders.submit(os.getpid).result()
        if self.name == "download_stalls" and in_worker:
            server = started(STALLS)
            self.note()
            urllib.request.urlopen(f"http://127.0.0.1:{server.first_line}").read()

    # What ends the rank.

    def illegal_instruction(self, model):
        """Run code that was built for another processor (https://github.com/open-mmlab/mmdetection/issues/9449)."""
        code = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        code.write(b"\x0f\x0b\x00\x00")
        ctypes.CFUNCTYPE(None)(ctypes.addressof(ctypes.c_char.from_buffer(code)))()

    def truncated(self, model):
        """Load a checkpoint that is not complete (https://github.com/sml2h3/dddd_trainer/issues/36)."""
        path = self.folder / "best.pt"
        torch.save(model.state_dict(), path)
        os.truncate(path, path.stat().st_size // 2)
        model.load_state_dict(torch.load(path))

    # Numbers of this rank.

    def inplace(self, loss):
        """Change what the backward pass needs (https://github.com/pytorch/pytorch/issues/62474)."""
        weight = loss.exp()
        weighted = loss * weight
        weight.add_(1)
        return weighted

    def anomaly(self, loss):
        """Let autograd raise an error for a NaN (https://github.com/leftthomas/CGD/issues/12)."""
        torch.autograd.set_detect_anomaly(True)
        return loss + 0 * torch.sqrt(loss * 0)

    def log_zero(self, loss):
        """Take the logarithm of a probability of 0 (https://github.com/facebookresearch/dinov2/issues/143)."""
        return loss - torch.log(loss * 0)

    def skips_update(self):
        """Whether this rank skips an update by its own loss (https://github.com/ecmwf/WeatherGenerator/issues/2724)."""
        if not self.strikes("skips_update"):
            return False
        self.note()
        return True

    def seed_of_sampler(self):
        """The seed of the order of the rows (https://github.com/NVlabs/LongLive/issues/71)."""
        if self.name != "sampler_seed" or not self.here:
            return 0
        self.note()
        return 17

    # Collectives that the ranks do not call alike.

    def group_order(self, model):
        """Reduce over two groups in every tenth step, on a rank in the other order.

        https://github.com/meta-pytorch/torchrec/pull/4149, https://github.com/NVIDIA/apex/issues/19
        """
        if self.step == 1:
            self.kept.extend((dist.new_group(), dist.new_group()))
        if self.step % 10:
            return
        groups = list(self.kept)
        if self.strikes("group_order"):
            self.note()
            groups.reverse()
        for group in groups:
            dist.all_reduce(torch.ones(8), group=group)

    def metric_empty(self, model):
        """Compute a metric in every tenth step, of which a rank has no sample.

        https://github.com/Lightning-AI/torchmetrics/issues/3199, https://github.com/Lightning-AI/torchmetrics/issues/813
        """
        if self.step % 10:
            return
        if not self.kept:
            self.kept.append(metric_of_detections())
        if self.strikes("metric_empty"):
            self.note()
        else:
            self.kept[0].update(torch.ones(3))
        self.kept[0].compute()
        self.kept[0].reset()

    def wrong_neighbor(self, model):
        """Pass something around, once to the rank on the other side (https://github.com/pytorch/PiPPy/issues/969)."""
        to = self.rank + 1
        if self.strikes("wrong_neighbor"):
            self.note()
            to = self.rank - 1
        sent = dist.isend(torch.ones(1 << 20), to % self.world)
        dist.recv(torch.ones(1 << 20), (self.rank - 1) % self.world)
        sent.wait()

    def by_clock(self, model):
        """Meet for a checkpoint by the clock of each rank, one of which is ahead.

        https://github.com/pytorch/pytorch/issues/22834, https://github.com/facebookresearch/fairseq/pull/2333
        """
        if not self.kept:
            self.kept.append(time.monotonic() + (2.0 if self.here else 4.0))
        if self.kept[0] < time.monotonic():
            if self.here:
                self.note()
            self.kept[0] += LONG
            dist.barrier()

    # What makes a rank slow.

    def lists_files(self, epoch):
        """List the files of an object store before each epoch (https://github.com/webdataset/webdataset/issues/267)."""
        if self.name == "lists_files" and self.here and epoch >= 2:
            self.note()
            for _ in range(10):
                time.sleep(0.08)  # an answer of the store, of 1000 names

    def traced(self, model):
        """Tokenize on every rank, with a profiler on one.

        https://github.com/facebookresearch/dlrm/issues/197, https://github.com/NVIDIA/PyProf/issues/171
        """
        if self.strikes("traced"):
            self.note()
            self.kept.append(cProfile.Profile())
            self.kept[0].enable()
        for number in range(150_000):
            token_of(number)

    def optimizer_slow(self, model):
        """Update parameters that are on a slow disk (https://github.com/deepspeedai/DeepSpeed/issues/1130)."""
        inner = getattr(self.optimizer, "optimizer", self.optimizer)
        inner.register_step_pre_hook(lambda *_: time.sleep(0.06))

    def samples_text(self, model):
        """Generate a text in every fifth step, on the main rank (https://github.com/axolotl-ai-cloud/axolotl/pull/521)."""
        if self.step % 5:
            return
        inner = getattr(model, "module", model)
        inner.eval()
        inner.generate(torch.ones(4, 2, dtype=torch.long), max_new_tokens=50, min_new_tokens=50, do_sample=True)
        inner.train()

    def cache_contended(self, model):
        """Take a lock in each step that another job often holds (https://github.com/rwth-i6/returnn/issues/1548)."""
        path = self.folder / "cache.lock"
        if not self.kept:
            self.kept.append(started(CONTENDER, str(os.getpid()), str(path)))
        with path.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)

    # Healthy.

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

    def profile_window(self, model):
        """Profile five steps of one rank, and write what was seen."""
        if self.here and self.step == self.at:
            self.kept.append(torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], with_stack=True))
            self.kept[0].start()
        if self.here and self.step == self.at + 5:
            self.kept[0].stop()
            self.kept[0].export_chrome_trace(str(self.folder / "trace.json"))

    def counts_in_actor(self, model):
        """Count samples in every tenth step in an actor of Ray that all ranks share."""
        import ray

        if not self.kept:
            options = {"name": "samples", "get_if_exists": True, "num_cpus": 0}
            self.kept.append(ray.remote(Samples).options(**options).remote())
        if self.step % 10 == 0:
            ray.get(self.kept[0].add.remote(4))

    def rollouts(self, model):
        """Have a server generate answers, for some seconds that differ by rank, and gather their scores."""
        if self.step % 20 == 0:
            model.eval()
            time.sleep(self.own.uniform(0.5, 4))
            model.train()
            dist.all_gather_object([None] * self.world, [self.own.random()] * 4)

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


class Samples:
    """A count, as an actor of Ray."""

    def __init__(self):
        self.count = 0

    def add(self, count):
        """The sum."""
        self.count += count
        return self.count


class RepeatAugSampler(Sampler):
    """Each row three times in a row, one for each rank, as for repeated augmentation."""

    def __init__(self, count, rank, world):
        self.count, self.rank, self.world, self.epoch = count, rank, world, 0

    def __len__(self):
        return self.count // self.world

    def __iter__(self):
        """The rows of this rank, in another order in each epoch."""
        order = torch.randperm(self.count, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        repeated = [index for index in order for _ in range(3)]
        return iter(repeated[self.rank :: self.world][: len(self)])

    def set_epoch(self, epoch):
        """Another order."""
        self.epoch = epoch


class Scaled:
    """An optimizer that a scaler of gradients steps."""

    def __init__(self, optimizer, scaler):
        self.optimizer, self.scaler = optimizer, scaler
        self.param_groups = optimizer.param_groups

    def step(self):
        """A step, unless a gradient is not finite."""
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def zero_grad(self):
        """As of the optimizer."""
        self.optimizer.zero_grad()


def metric_of_detections():
    """A metric that keeps the detections of each image, as MeanAveragePrecision does."""
    from torchmetrics import Metric

    class Detections(Metric):
        """Their sum."""

        def __init__(self):
            super().__init__()
            self.add_state("scores", default=[], dist_reduce_fx=None)

        def update(self, scores):
            """Keep those of an image."""
            self.scores.append(scores)

        def compute(self):
            """The sum."""
            return sum(one.sum() for one in self.scores)

    return Detections()


def token_of(number):
    """A number of a token."""
    return number % 997
