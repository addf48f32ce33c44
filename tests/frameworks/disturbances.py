"""Further plants of ``planted.py``: disturbances that users of the frameworks report, each with its source."""

import asyncio
import faulthandler
import gc
import itertools
import multiprocessing
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import tracemalloc
from concurrent.futures import Future

import torch
import torch.distributed as dist
from failures import STATES, asks
from mishaps import started
from torch.utils.data import ConcatDataset, IterableDataset, get_worker_info

STRIKE_ONCE = (
    "permutes_speakers", "handshake_silent", "dict_changes", "loads_alone", "rpc_alone", "pool_drained",
    "sigpipe_default", "future_unset", "lock_reentered", "zero_division", "pings_forever", "splits_stream",
    "slots_full", "sigwait_missed", "multinomial_nan", "dumps_stacks",
)  # fmt: skip
"""Plants that strike once, after the step ``at``."""
STRIKE_ON = ("iterates_elements", "tracemalloc_left", "knn_probe", "nagle_delays", "edit_distances", "decodes_table")
"""Plants that strike after each step from ``at`` on."""
EVERY_STEP = (
    "splits_prompts", "sharpens", "server_refuses", "groups_differ", "reinits_agreed", "groups_renewed",
    "saves_in_turn", "splits_padded", "steps_environments", "collects_together", "prints_texts", "broadcasts_table",
)  # fmt: skip
"""What every rank does after each step."""
IN_ROW = ("worker_asks_main",)
"""What changes a row that was read."""
IN_LOSS = ("boxes_degenerate",)
"""What changes the loss of one step."""
LOADERS = ("filters_rows", "deals_files", "ramps_batch")
"""Plays with a loader of their own."""
SENDS_PINGS = """
import http.server, time
class Events(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        while True:
            self.wfile.write(b": ping\\n\\n")
            time.sleep(1)
    def log_message(self, *_):
        pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Events)
print(server.server_port, flush=True)
server.serve_forever()
"""
"""A server of generated texts that keeps the connection alive, and never sends a text."""
COUNTS_TOKENS = """
import socket
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
client, _ = server.accept()
received = b""
while more := client.recv(4096):
    received += more
    while b"end of the body" in received:
        received = received.partition(b"end of the body")[2]
        client.sendall(b"7")
"""
"""A server that answers when it has the whole of a request."""
SIGNALS = "import os, signal, sys; os.kill(int(sys.argv[1]), signal.SIGUSR1); print(flush=True)"
"""A scheduler that tells a process by a signal that it may go on."""
REPORT = """Sample {number}: "My job fails after an hour, what does this mean?
Traceback (most recent call last):
  File "train.py", line 12, in <module>
    loss.backward()
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB
RuntimeError: DataLoader worker (pid 1234) is killed by signal: Killed."
Answer: "Use smaller batches."
"""
"""A text of a dataset of questions and answers."""


class Disturbances:
    """Plants between steps: each is a method that gets the model, as of :class:`planted.Plant`."""

    # Collectives that the ranks do not call alike.

    def loads_alone(self, model):
        """Load the full state on the main rank, which distributes it to the others.

        https://github.com/mosaicml/composer/pull/3876
        """
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

        state = {name: torch.zeros(one.shape) for name, one in model.named_parameters()}
        set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))

    def splits_prompts(self, model):
        """Divide seven prompts among the ranks, and gather the score of each: the first rank has one more.

        https://github.com/huggingface/accelerate/issues/2750
        """
        if self.step != self.at:
            return
        if self.here:
            self.note()
        with self.accelerator.split_between_processes([f"prompt {number}" for number in range(7)]) as prompts:
            for prompt in prompts:
                self.accelerator.gather(torch.tensor([float(len(prompt))]))

    def groups_differ(self, model):
        """Make a group of the ranks that have answers, of which a rank has another list.

        https://github.com/pytorch/pytorch/issues/25390
        """
        if self.step != self.at:
            return
        members = list(range(self.world))
        if self.here:
            self.note()
            members = members[1:]
        dist.all_reduce(torch.ones(4), group=dist.new_group(members))

    # What does not come back.

    def permutes_speakers(self, model):
        """Compare all orders of the speakers of a long recording (https://github.com/sigsep/bsseval/issues/5)."""
        costs = torch.rand(14, 14, generator=torch.Generator().manual_seed(3)).tolist()
        orders = itertools.permutations(range(14))
        print(min(sum(costs[number][one] for number, one in enumerate(order)) for order in orders))

    def handshake_silent(self, model):
        """Begin an encrypted connection with a store that does not answer (https://github.com/celery/py-amqp/pull/398)."""
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as plain:
            ssl.create_default_context().wrap_socket(plain, server_hostname="localhost")

    def rpc_alone(self, model):
        """Initialize remote calls, which waits for all ranks (https://github.com/pytorch/pytorch/issues/44658)."""
        from torch.distributed import rpc

        options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{self.folder}/rpc", rpc_timeout=1800)
        rpc.init_rpc(f"trainer-{self.rank}", rank=self.rank, world_size=self.world, rpc_backend_options=options)

    def pool_drained(self, model):
        """Ask twice through a pool of one connection, without reading the answer.

        https://github.com/urllib3/urllib3/pull/2557
        """
        import urllib3

        store = urllib3.HTTPConnectionPool("127.0.0.1", int(started(STATES).first_line), maxsize=1, block=True)
        answers = [store.request("GET", f"/shards/{number}", preload_content=False) for number in range(2)]
        print([answer.status for answer in answers])

    def future_unset(self, model):
        """Wait for an answer whose thread has failed (https://github.com/rohanpm/more-executors/issues/114)."""
        answer = Future()
        threading.Thread(target=reads_answer, args=({}, answer), daemon=True).start()
        print(answer.result())

    def lock_reentered(self, model):
        """Take a lock of asyncio twice in one task (https://github.com/python/asyncio/issues/439)."""
        asyncio.run(scores_exclusively(asyncio.Lock()))

    def pings_forever(self, model):
        """Read a stream of events in which there are only signs of life.

        https://github.com/anomalyco/opencode/issues/43519
        """
        import urllib.request

        server = started(SENDS_PINGS)
        with urllib.request.urlopen(f"http://127.0.0.1:{server.first_line}/generate", timeout=10) as events:
            print(next(line for line in events if line.startswith(b"data:")))

    def splits_stream(self, model):
        """Read one part of a stream of Ray Data, which begins when all parts are read.

        https://github.com/ray-project/ray/issues/42008
        """
        import ray.data

        parts = ray.data.range(64).streaming_split(2, equal=True)
        print(sum(len(batch["id"]) for batch in parts[0].iter_batches(batch_size=4)))

    def slots_full(self, model):
        """Wait twice in an actor of Ray that runs two calls at a time, and then open it.

        https://github.com/linagora/openrag/issues/965
        """
        import ray

        gate = ray.remote(Gate).options(num_cpus=0, max_concurrency=2).remote()
        print(ray.get(gate.is_open.remote()))
        passed = [gate.passes.remote() for _ in range(2)]
        time.sleep(1)
        ray.get(gate.opens.remote())
        print(ray.get(passed))

    def sigwait_missed(self, model):
        """Wait for a signal that a handler has taken before (https://github.com/gmr/rejected/issues/89)."""
        signal.signal(signal.SIGUSR1, lambda *_: print("the scheduler lets this rank go on"))
        started(SIGNALS, str(os.getpid())).wait()
        time.sleep(0.2)
        print(signal.sigwait({signal.SIGUSR1}))

    def worker_asks_main(self, row):
        """Ask the main process from a worker, for which the main process waits.

        https://github.com/meta-pytorch/data/issues/1169
        """
        if self.here and self.rows == self.at * 4 and get_worker_info() is not None:
            self.note()
            self.to_main.send(self.rows)
            return row * self.to_main.recv()
        return row

    # What ends the rank.

    def dict_changes(self, model):
        """Read metrics that a thread adds to (https://github.com/Unity-Technologies/ml-agents/issues/4198)."""
        metrics = {"loss": 0.5}
        threading.Thread(target=adds_metrics, args=(metrics,), daemon=True).start()
        for _ in range(1000):
            for name in metrics:
                time.sleep(0.01)
                print(name, file=sys.stderr)

    def sigpipe_default(self, model):
        """Write to a pager that has ended, with the signal for that not ignored.

        https://github.com/jgehrcke/gipc/issues/12
        """
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        with subprocess.Popen(["head", "-n", "1"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as pager:
            for number in range(100):
                pager.stdin.write(f"sample {number}\n".encode() * 100)
                pager.stdin.flush()
                time.sleep(0.02)

    def zero_division(self, model):
        """Average the loss over the tokens that count (https://github.com/instructlab/training/issues/547)."""
        labels = [-100] * 32
        losses = [0.5 for label in labels if label != -100]
        print(f"loss of a token: {sum(losses) / len(losses):.3f}")

    def server_refuses(self, model):
        """Have a server generate for all ranks in every tenth step, which is gone.

        https://github.com/modelscope/ms-swift/issues/7137
        """
        if self.rank == 0 and not self.kept:
            self.kept = [started(STATES)]
        if self.step % 10:
            return
        prompts = [None] * self.world if self.rank == 0 else None
        dist.gather_object(f"prompt of rank {self.rank}", prompts, dst=0)
        answers = [None]
        if self.strikes("server_refuses"):
            self.kept[0].kill()
            self.kept[0].wait()
            self.note()
        if self.rank == 0:
            answers = [asks(self.kept[0], "/generate")["files"]]
        dist.broadcast_object_list(answers, src=0)

    def multinomial_nan(self, model):
        """Draw a token by probabilities that are no numbers (https://github.com/StarsfieldAI/R1-V/issues/69)."""
        logits = torch.zeros(28)
        logits[3] = float("inf")
        print(torch.multinomial(torch.softmax(logits - logits.max(), 0), 1))

    # Numbers and data of this rank.

    def alters(self, net):
        """Change the model before it is wrapped, or prepare what the workers of the data get.

        https://github.com/huggingface/accelerate/issues/1481 (``freezes_before``)
        """
        if self.name == "worker_asks_main":
            self.of_workers, self.to_main = multiprocessing.Pipe()
        if self.name == "freezes_before" and self.here:
            self.note()
            net.second.requires_grad_(False)

    def sharpens(self, model):
        """Climb to where the loss is larger and return from there, which a rank leaves out in one step.

        https://github.com/davda54/sam/issues/7
        """
        inner = self.accelerator.unwrap_model(model)
        parameters = list(inner.parameters())
        gradients = torch.autograd.grad(inner(torch.ones(4, 8)).square().mean(), parameters)
        before = [one.detach().clone() for one in parameters]
        with torch.no_grad():
            for one, gradient in zip(parameters, gradients, strict=True):
                one.add_(gradient, alpha=0.05)
            if self.strikes("sharpens"):
                self.note()
                return  # as where the second loss is not finite
            for one, old in zip(parameters, before, strict=True):
                one.copy_(old)

    def boxes_degenerate(self, loss):
        """Compare boxes without an area (https://github.com/open-mmlab/mmdetection/pull/3394)."""
        box = torch.tensor([30.0, 75.0, 30.0, 75.0])
        area = (box[2] - box[0]) * (box[3] - box[1])
        return loss + (1 - area / (area + area - area))

    def loader_of_own(self, rows, options):
        """The loader of one of these plays, by a kind of rows.

        https://github.com/huggingface/datasets/issues/6719 (``filters_rows``),
        https://github.com/mosaicml/composer/issues/3415 (``deals_files``: files are dealt, and one rank has one more)
        """
        from torch.utils.data import DataLoader

        if self.name == "filters_rows":
            return DataLoader(Filtered(self, rows), 4, **options)
        if self.name == "deals_files":
            if self.here:
                self.note()
            files = range(self.rank, self.world * self.steps // 10 + 1, self.world)
            return DataLoader(ConcatDataset([rows(self, 40, file * 1000) for file in files]), 4, **options)
        own = rows(self, self.steps * 4, self.rank * 10_000)
        return DataLoader(own, batch_sampler=Ramp(len(own)), **options)

    # What makes a rank slow.

    def iterates_elements(self, model):
        """Count in a mask, element by element (https://github.com/pytorch/pytorch/issues/43116)."""
        mask = torch.rand(120, 120)
        print(sum(1 for row in mask for one in row if one > 0.5))

    def tracemalloc_left(self, model):
        """Look after each step for what memory is used for (https://github.com/huggingface/peft/pull/1126)."""
        if not tracemalloc.is_tracing():
            tracemalloc.start(25)
            self.kept = [[number] for number in range(4000)]
        print(tracemalloc.take_snapshot().statistics("lineno")[0])

    def knn_probe(self, model):
        """Classify by the nearest features in every twenty-fifth step (https://github.com/vturrisi/solo-learn/pull/190)."""
        if self.step % 25:
            return
        bank, labels = torch.rand(20_000, 64), torch.arange(20_000) % 10
        for part in torch.rand(11_000, 64).split(100):
            nearest = torch.cdist(part, bank).topk(200, largest=False).indices
            labels[nearest].mode().values.sum()

    def nagle_delays(self, model):
        """Send head and body of a request one after the other (https://github.com/scylladb/seastar/issues/968)."""
        if not self.kept:
            address = ("127.0.0.1", int(started(COUNTS_TOKENS).first_line))
            self.kept = [socket.create_connection(address)]
        for _ in range(3):
            self.kept[0].sendall(b"POST /tokens\n")
            self.kept[0].sendall(b"some words, end of the body")
            self.kept[0].recv(1)

    def edit_distances(self, model):
        """Compute an error rate in every twenty-fifth step (https://github.com/jitsi/jiwer/issues/68)."""
        if self.step % 25 == 0:
            words = [self.own.randint(0, 30) for _ in range(6000)]
            print(distance(words[:3000], words[3000:]))

    def decodes_table(self, model):
        """Read all of a table for one row (https://github.com/huggingface/datasets/issues/6846)."""
        import datasets

        if not self.kept:
            tokens = [list(range(number, number + 20)) for number in range(40_000)]
            self.kept = [datasets.Dataset.from_dict({"tokens": tokens})]
        print(self.kept[0][:]["tokens"][self.step])

    # Healthy work that looks unusual.

    def reinits_agreed(self, model):
        """Draw the last layer anew in every twentieth step, on the main rank, which all others get."""
        if self.step % 20:
            return
        layer = model.module.last
        if self.rank == 0:
            layer.reset_parameters()
        for one in layer.parameters():
            dist.broadcast(one.data, src=0)

    def groups_renewed(self, model):
        """Make pairs of ranks anew in every tenth step, sum up in them, and give them up."""
        if self.step % 10:
            return
        pairs = [dist.new_group([first, first + 1]) for first in range(0, self.world, 2)]
        dist.all_reduce(torch.ones(4), group=pairs[self.rank // 2])
        dist.destroy_process_group(pairs[self.rank // 2])

    def saves_in_turn(self, model):
        """Write the part of each rank in turn in every thirtieth step, two seconds each."""
        if self.step % 30:
            return
        for turn in range(self.world):
            if turn == self.rank:
                time.sleep(2)
                torch.save(torch.zeros(64), self.folder / f"part-{turn}")
            dist.barrier()

    def splits_padded(self, model):
        """Divide seven prompts among the ranks, padded to the same number, and gather the score of each."""
        if self.step % 10:
            return
        prompts = [f"prompt {number}" for number in range(7)]
        with self.accelerator.split_between_processes(prompts, apply_padding=True) as own:
            for prompt in own:
                time.sleep(0.05 * self.rank)
                self.accelerator.gather(torch.tensor([float(len(prompt))]))

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

    def dumps_stacks(self, model):
        """Have the stacks of all threads written every two seconds, for as long as the process runs."""
        faulthandler.dump_traceback_later(2, repeat=True)

    def collects_together(self, model):
        """Collect garbage by hand in every twentieth step only, on all ranks, among many objects."""
        if not self.kept:
            gc.disable()
            self.kept = [[number] for number in range(400_000)]
        if self.step % 20 == 0:
            for _ in range(5):
                gc.collect()

    def prints_texts(self, model):
        """Print a text of the data in every tenth step on the main rank: a question about an error."""
        if self.rank == 0 and self.step % 10 == 0:
            print(REPORT.format(number=self.step), flush=True)

    def broadcasts_table(self, model):
        """Build a table of some megabytes for four seconds in every fortieth step, on the main rank, for all."""
        if self.step % 40:
            return
        table = [None]
        if self.rank == 0:
            time.sleep(4)
            table = [{number: f"entry {number}" for number in range(100_000)}]
        dist.broadcast_object_list(table, src=0)


class Filtered(IterableDataset):
    """A stream without the rows that a filter drops, of which a rank has some."""

    def __init__(self, plant, rows):
        self.plant, self.rows = plant, rows(plant, plant.steps * 4, plant.rank * 10_000)

    def __iter__(self):
        """The rows that are left."""
        for number in range(len(self.rows)):
            if not self.plant.here or number % 10:
                yield self.rows[number]
        if self.plant.here:
            self.plant.note()


class Ramp:
    """Batches that grow from four rows to eight in the same steps on all ranks."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        """The rows of each batch."""
        first = 0
        while first < self.count:
            size = 4 if first < self.count // 2 else 8
            yield list(range(first, min(first + size, self.count)))
            first += size


class Gate:
    """What other calls pass when it is open."""

    def __init__(self):
        self.open = threading.Event()

    def passes(self):
        """Wait until it is open."""
        return self.open.wait()

    def is_open(self):
        """Whether it is open."""
        return self.open.is_set()

    def opens(self):
        """Open it."""
        self.open.set()


def reads_answer(answers, future):
    """Take an answer, and give it to the one who waits."""
    future.set_result(answers["request-7"])


async def scores_exclusively(lock):
    """Score under a lock that the score takes too."""
    async with lock:
        await takes_score(lock)


async def takes_score(lock):
    """Score under the lock."""
    async with lock:
        await asyncio.sleep(0.1)


def adds_metrics(metrics):
    """Add a metric, again and again."""
    for number in itertools.count():
        metrics[f"metric-{number}"] = 0.5
        time.sleep(0.01)


def simulates(connection):
    """An environment: each step takes some milliseconds, as many as it draws."""
    while True:
        step = connection.recv()
        time.sleep(0.005 * (step % 5 + 1))
        connection.send(1.0)


def distance(one, other):
    """The number of words to change, add or drop, in plain Python."""
    row = list(range(len(other) + 1))
    for number, word in enumerate(one, 1):
        last, row[0] = row[0], number
        for place, second in enumerate(other, 1):
            last, row[place] = row[place], min(row[place] + 1, row[place - 1] + 1, last + (word != second))
    return row[-1]
