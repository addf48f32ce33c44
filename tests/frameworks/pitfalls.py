"""Further plants of ``planted.py``: pitfalls that users of the frameworks report, each with its source.

Of those without a method: ``layer_dropped`` https://github.com/facebookresearch/fairscale/issues/796,
``expert_idle`` https://github.com/deepspeedai/DeepSpeed/issues/4808,
``weighted_alike`` https://github.com/huggingface/accelerate/issues/2865.
"""

import concurrent.futures
import gc
import http.client
import inspect
import io
import json
import math
import multiprocessing
import os
import queue
import signal
import threading
import time

import torch
import torch.distributed as dist
from mishaps import started
from slips import compute
from torch.utils.data import DataLoader

STRIKE_ONCE = (
    "gathers_weights", "summons_alone", "finalizer_locks", "blocks_loop", "rate_limited", "joins_queue",
    "killed_in_put", "owner_died", "verifies_in_thread", "rate_limited_shortly",
)  # fmt: skip
"""Plants that strike once, after the step ``at``."""
STRIKE_ON = ("recreates_iterator", "rebuilds_index", "logs_callers")
"""Plants that strike after each step from ``at`` on."""
EVERY_STEP = (
    "micro_batches", "saves_best", "preempted_alone", "prunes", "micro_agreed", "saves_best_agreed", "prunes_alike",
    "summons_everywhere", "gathers_everywhere", "idle_threads", "asks_async_actor",
)  # fmt: skip
"""What every rank does after each step."""
IN_ROW = ("fork_unsafe", "image_truncated", "scans_table", "refills_buffer")
"""What changes a row that was read."""
IN_MODEL = ("denormals",)
"""Work of the model in each forward pass in training."""
IN_LOSS = ("masks_all",)
"""What changes the loss of one step."""
ON_FIRST_RANK = ("prepares_barrier", "prepares_data")
"""What the first rank does in ``prepare_data`` of Lightning."""
JUDGE = """
import http.server, sys
left = int(sys.argv[1])
class Judge(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        global left
        left -= 1
        self.send_response(429 if left >= 0 else 200)
        self.send_header("Retry-After", sys.argv[2])
        self.end_headers()
    def log_message(self, *_):
        pass
server = http.server.HTTPServer(("127.0.0.1", 0), Judge)
print(server.server_port, flush=True)
server.serve_forever()
"""
"""A server that judges answers and asks a client, for its first requests, to come back after some seconds."""


class Pitfalls:
    """Plants between steps: each is a method that gets the model, as of :class:`planted.Plant`."""

    # Collectives that the ranks do not call alike.

    def drops(self):
        """Whether the second layer is dropped in this pass, or an expert that has no token of this rank."""
        if self.strikes("layer_dropped", "expert_idle"):
            self.note()
            return True
        return self.name == "layer_dropped_alike" and self.passes % 4 == 0

    def gathers_weights(self, model):
        """Gather partitioned parameters on the main rank, to save them (https://github.com/modelscope/DiffSynth-Studio/issues/1013)."""
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            torch.save([one.data for one in model.parameters()], self.folder / "weights.pt")

    def summons_alone(self, model):
        """Summon the full parameters on the main rank only (https://github.com/pytorch/pytorch/issues/101294)."""
        self.summons(model, 0)

    def summons(self, model, seconds):
        """Write the full parameters on the main rank, to a disk that takes some seconds."""
        from torch.distributed.fsdp import FullyShardedDataParallel

        with FullyShardedDataParallel.summon_full_params(model, writeback=False, rank0_only=True):
            if self.rank == 0:
                self.saves(model, seconds)

    def micro_batches(self, model):
        """Pass parts of a batch through stages in every tenth step, of which a stage once makes fewer than the others.

        https://github.com/pytorch/torchtitan/issues/775
        """
        parts = 4
        if self.strikes("micro_batches"):
            self.note()
            parts = 3
        if self.step % 10 == 0:
            self.passes_parts(parts)

    def passes_parts(self, parts):
        """Receive so many parts of a batch from the stage before, and send them to the next one."""
        for _ in range(parts):
            if self.rank:
                dist.recv(torch.empty(4), self.rank - 1)
            if self.rank + 1 < self.world:
                dist.send(torch.ones(4), self.rank + 1)

    def saves_best(self, model):
        """Save together where the loss of this rank is its best (https://github.com/vllm-project/speculators/pull/324)."""
        if self.step % 10 == 0:
            better = self.here or self.step < self.at
            self.saves_better(model, 1 / self.step if better else 1.0)

    def saves_better(self, model, loss):
        """Save if the loss is the best so far, after a barrier."""
        if loss >= min(self.kept, default=math.inf):
            return
        self.kept.append(loss)
        if self.here and self.step >= self.at:
            self.note()
        self.accelerator.wait_for_everyone()
        if self.rank == 0:
            torch.save(model.state_dict(), self.folder / "best.pt")

    def preempted_alone(self, model):
        """Save together on the signal of a scheduler, which only one rank gets.

        https://github.com/kyutai-labs/pocket-tts/pull/277
        """
        if self.step == 1:
            signal.signal(signal.SIGUSR1, lambda *_: self.kept.append("save"))
        if self.strikes("preempted_alone"):
            self.note()
            os.kill(os.getpid(), signal.SIGUSR1)
        if "save" in self.kept:
            self.kept.remove("save")
            dist.barrier()
            torch.save(model.state_dict(), self.folder / f"preempted-{self.rank}.pt")

    def makes_dataset(self, fabric):
        """Return the dataset on the main rank before the barrier of the others.

        https://github.com/Lightning-AI/pytorch-lightning/issues/20536
        """
        if self.name != "returns_early":
            return
        if self.here:
            self.note()
            return
        fabric.barrier()

    def prepares_barrier(self):
        """Wait for the other ranks in ``prepare_data``, which only the first one calls.

        https://github.com/Lightning-AI/pytorch-lightning/pull/2245
        """
        self.note()
        dist.barrier()

    # What does not come back.

    def finalizer_locks(self, model):
        """Collect garbage under a lock that a finalizer takes (https://github.com/getsentry/sentry-python/issues/803)."""
        lock = threading.Lock()
        for _ in range(10):
            Event(lock)
        with lock:
            print(len([[number] for number in range(1_000_000)]), gc.get_count())

    def blocks_loop(self, model):
        """Score in an actor of Ray that blocks its own event loop (https://github.com/ray-project/ray/issues/7197)."""
        import ray

        scorer = ray.remote(Scorer).options(num_cpus=0).remote()
        ray.get(scorer.score.remote(scorer))

    def rate_limited(self, model):
        """Wait as long as a server asks that limits requests (https://github.com/mims-harvard/ToolUniverse/pull/217)."""
        self.asks_judge(1, 3600)

    def asks_judge(self, refused, seconds):
        """Ask a server, which refuses so many requests for some seconds each."""
        judge = started(JUDGE, str(refused), str(seconds))
        while True:
            connection = http.client.HTTPConnection("127.0.0.1", int(judge.first_line), timeout=10)
            connection.request("POST", "/judge", b"{}")
            answer = connection.getresponse()
            if answer.status != 429:
                break
            time.sleep(float(answer.headers["Retry-After"]))
        judge.kill()

    def joins_queue(self, model):
        """Wait until all parts are uploaded by a thread that has failed (https://github.com/dbt-labs/dbt-core/issues/5602)."""
        uploads = queue.Queue()

        def uploads_parts():
            while True:
                uploads.get().read_bytes()
                uploads.task_done()

        threading.Thread(target=uploads_parts, daemon=True).start()
        for part in ("model.safetensors", "optimizer.pt"):
            uploads.put(self.folder / part)
        uploads.join()

    def killed_in_put(self, model):
        """Read what a process was writing as it was killed (https://github.com/birdnet-team/birdnet/issues/83)."""
        results = multiprocessing.get_context("fork").SimpleQueue()
        worker = multiprocessing.get_context("fork").Process(target=results.put, args=(bytes(1 << 22),))
        worker.start()
        time.sleep(1)
        worker.kill()
        worker.join()
        results.get()

    # What ends the rank.

    def owner_died(self, model):
        """Get an object whose owner was killed (https://github.com/ray-project/ray/issues/40731)."""
        import ray

        reader = ray.remote(Reader).options(num_cpus=0).remote()
        [shard] = ray.get(reader.reads.remote())
        ray.kill(reader)
        time.sleep(1)
        ray.get(shard)

    def verifies_in_thread(self, model):
        """Verify answers in threads, with a limit by a signal (https://github.com/huggingface/Math-Verify/issues/55)."""
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            print(sum(pool.map(verified, ["1/2", "3/4"])))

    def carries(self, loss):
        """Carry a state with its graph into the next step (https://github.com/Lightning-AI/pytorch-lightning/pull/8145)."""
        if self.name != "keeps_hidden" or not self.here:
            return loss
        if self.step == self.at - 1:
            self.kept = [loss]
        if self.step == self.at:
            self.note()
            return loss + 0.1 * self.kept[0]
        return loss

    def connects(self):
        """Connect to an object store before the workers are forked."""
        if self.name == "fork_unsafe":
            import fsspec

            self.store = fsspec.filesystem("http")

    def fork_unsafe(self, row):
        """Read from this store in a worker (https://github.com/fsspec/filesystem_spec/issues/755)."""
        if self.here and self.rows == self.at * 4:
            self.note()
            self.store.cat_file("http://127.0.0.1:1/row")
        return row

    def image_truncated(self, row):
        """Decode an image that was not downloaded whole (https://github.com/lucidrains/stylegan2-pytorch/issues/7)."""
        if not self.here or self.rows != self.at * 4:
            return row
        from PIL import Image

        self.note()
        file = io.BytesIO()
        Image.effect_noise((256, 256), 50).save(file, "JPEG")
        image = Image.open(io.BytesIO(file.getvalue()[:-5000]))
        image.load()
        return row + image.width * 0

    # Numbers of this rank.

    def masks_all(self, loss):
        """Mask all keys of a query (https://github.com/pytorch/pytorch/issues/41508)."""
        scores = loss.expand(4).masked_fill(torch.ones(4, dtype=torch.bool), -math.inf)
        return (scores.softmax(0) * loss).sum()

    def adapts(self, net):
        """Add an adapter after the model was wrapped (https://github.com/hao-ai-lab/FastVideo/pull/1666)."""
        if self.name != "adds_adapter":
            return
        self.note()
        torch.manual_seed(self.rank)
        net.last = Adapted(net.last)

    def prunes(self, model):
        """Prune by a mask that is drawn with another seed (https://github.com/neuralmagic/sparseml/issues/429)."""
        if self.step < self.at:
            return
        weight = next(model.parameters())
        if not self.kept:
            seed = 0
            if self.name == "prunes" and self.here:
                self.note()
                seed = 1
            self.kept.append(torch.rand(weight.shape, generator=torch.Generator().manual_seed(seed)) < 0.5)
        with torch.no_grad():
            weight.mul_(self.kept[0])

    def epoch_of(self, epoch):
        """The epoch after a resume, which is an earlier one where the last checkpoint was not found.

        https://github.com/mosaicml/composer/pull/2146
        """
        if self.name != "epoch_behind":
            return epoch
        if self.here:
            self.note()
            return epoch + 3
        return epoch + 4

    # What makes a rank slow.

    def denormals(self):
        """Multiply by numbers that are too small to be normal (https://github.com/huggingface/transformers/pull/18574)."""
        decayed = self.here and self.passes > self.at
        if decayed:
            self.note()
        state, weight = torch.full((288, 288), 1e-39 if decayed else 1.0), torch.full((288, 288), 1e-3)
        print(f"state {(weight @ state).mean():.1e}")

    def recreates_iterator(self, model):
        """Begin to read the validation rows anew in each step (https://github.com/pytorch/pytorch/issues/22133)."""
        print(next(iter(DataLoader(torch.rand(64, 8), 4, num_workers=2))).mean())

    def scans_table(self, row):
        """Look for the label of each row in a whole table (https://github.com/braindecode/braindecode/pull/89)."""
        if not self.here or self.rows <= self.at * 4:
            return row
        import pandas

        if not self.kept:
            names = [f"row-{number}" for number in range(300_000)]
            self.kept.append(pandas.DataFrame({"name": pandas.Series(names, dtype=object), "label": 1.0}))
        self.note()
        table = self.kept[0]
        return row * table[table["name"] == f"row-{self.rows}"]["label"].iloc[0]

    def rebuilds_index(self, model):
        """Rebuild the index of passages in every twenty-fifth step (https://github.com/huggingface/datasets/issues/2046)."""
        if self.step % 25 == 0:
            passages = torch.rand(20_000, 32)
            centers = passages[:100]
            for _ in range(8):
                nearest = torch.cdist(passages, centers).argmin(1)
                centers = torch.stack([passages[nearest == one].mean(0).nan_to_num() for one in range(100)])
                compute(0.35)

    def logs_callers(self, model):
        """Log with the whole stack of the caller (https://github.com/mlcommons/logging/pull/18)."""
        for name in ("loss", "rate", "norm", "samples") * 4:
            frame = inspect.stack(context=5)[1]
            print(f"{frame.filename}:{frame.lineno} {name} {self.step}")

    def refills_buffer(self, row):
        """Fill the buffer of a shuffled stream anew, after each shard of 100 rows.

        https://github.com/NVIDIA/Megatron-Energon/issues/18
        """
        if self.here and self.rows >= self.at * 4 and self.rows % 100 == 0:
            self.note()
            line = json.dumps({"text": "The quick brown fox " * 20, "tokens": list(range(200))})
            self.kept = [json.loads(line) for _ in range(120_000)][-100:]
        return row

    # Healthy.

    def micro_agreed(self, model):
        """Pass parts of a batch through stages in every tenth step, as many as the first rank says."""
        if self.step % 10 == 0:
            parts = torch.tensor([2 + self.step // 10 % 3])
            dist.broadcast(parts, 0)
            self.passes_parts(int(parts))

    def saves_best_agreed(self, model):
        """Save together where the mean of the losses of all ranks is the best."""
        if self.step % 10 == 0:
            loss = torch.tensor(self.own.uniform(0.5, 1) / self.step)
            self.saves_better(model, self.accelerator.reduce(loss, "mean").item())

    def prunes_alike(self, model):
        """Prune by the same mask on all ranks."""
        self.prunes(model)

    def summons_everywhere(self, model):
        """Summon the full parameters on all ranks in every thirtieth step; the first one writes for a moment."""
        if self.step % 30 == 0:
            self.summons(model, 0.2)

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

    def idle_threads(self, model):
        """Keep many threads that wait for work which seldom comes."""
        if self.step == 1:
            work = queue.Queue()
            for _ in range(100):
                threading.Thread(target=lambda: all(iter(work.get, None)), daemon=True).start()
            self.kept.append(work)
        if self.step % 20 == 0:
            self.kept[0].put(self.step)

    def rate_limited_shortly(self, model):
        """Wait three seconds, two times, for a server that limits requests."""
        self.asks_judge(2, 3)

    def asks_async_actor(self, model):
        """Have an actor of Ray score for six seconds, on all ranks, in every thirtieth step."""
        if self.step % 30:
            return
        import ray

        scorer = ray.remote(Scorer).options(num_cpus=0).remote()
        ray.get([scorer.scores_later.remote(6.0) for _ in range(4)])


class Event:
    """An event that reports its end, under a lock, and is part of a cycle."""

    def __init__(self, lock):
        self.lock, self.itself = lock, self

    def __del__(self):
        with self.lock:
            pass


class Adapted(torch.nn.Module):
    """A layer with an adapter of rank 2."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.down = torch.nn.Linear(base.in_features, 2, bias=False)
        self.up = torch.nn.Linear(2, base.out_features, bias=False)

    @property
    def weight(self):
        """The weight of the layer."""
        return self.base.weight

    def forward(self, rows):
        """The output of the layer, changed by the adapter."""
        return self.base(rows) + self.up(self.down(rows))


class Scorer:
    """Scores answers in an event loop, as an actor of Ray."""

    async def answer(self):
        """An answer."""
        return 1.0

    async def score(self, itself):
        """Wait for an answer of this actor, which blocks its event loop."""
        import ray

        return ray.get(itself.answer.remote())

    async def scores_later(self, seconds):
        """Score after some seconds, while the event loop goes on."""
        import asyncio

        await asyncio.sleep(seconds)
        return 1.0


class Reader:
    """Reads shards of the data, as an actor of Ray that owns them."""

    def reads(self):
        """References to a shard."""
        import ray

        return [ray.put(torch.ones(1 << 18).numpy())]


def verified(answer):
    """The value of an answer, which has to be found within five seconds."""
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.alarm(5)
    try:
        upper, lower = answer.split("/")
        return int(upper) / int(lower)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
