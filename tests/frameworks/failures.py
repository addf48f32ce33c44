"""Further plants of ``planted.py``: failures that users of the frameworks report, each with its source."""

import asyncio
import json
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from multiprocessing.connection import Listener

import numpy
import torch
import torch.distributed as dist
from mishaps import started
from torch.utils.data import Subset

STRIKE_ONCE = (
    "sleeps_in_disk", "handler_logs", "child_buffers", "polls_failed", "pages_repeat", "accepts_never", "loop_stopped",
    "generator_paused", "meets_alone", "enumerates_paths", "generator_shared", "json_numpy", "encoder_gone",
    "alarm_left", "waits_at_store", "stopped_shortly",
)  # fmt: skip
"""Plants that strike once, after the step ``at``."""
STRIKE_ON = ("pickles_table", "tensor_of_arrays", "encodes_grid", "gets_in_turn")
"""Plants that strike after each step from ``at`` on."""
EVERY_STEP = (
    "skips_none_grads", "restarts_meet", "evaluates_ragged", "waits_in_else", "rounds_stochastically", "strided_split",
    "groups_at_own_pace", "reduces_late", "gathers_on_main", "layerwise_rates", "meets_in_ray", "checkpoints_all",
    "pool_each_time",
)  # fmt: skip
"""What every rank does after each step."""
IN_ROW = ("text_undecodable", "globs_folder")
"""What changes a row that was read."""
IN_LOSS = ("ratio_overflows",)
"""What changes the loss of one step."""
STATES = """
import http.server, json
class Jobs(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        page = {"state": "failed", "files": [f"shard-{number}.tar" for number in range(8)], "next": "c2hhcmQtNw"}
        self.wfile.write(json.dumps(page).encode())
    def log_message(self, *_):
        pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Jobs)
print(server.server_port, flush=True)
server.serve_forever()
"""
"""A server of jobs and of lists of files: each job has failed, and each page names the same next one."""
COUNTS_TOKENS = """
import sys
for line in sys.stdin:
    print(len(line.split()))
"""
"""A command that answers each line, and does not flush what it writes to a pipe."""
CONTINUES = """
import os, signal, sys, time
print(flush=True)
os.kill(int(sys.argv[1]), signal.SIGSTOP)
time.sleep(3)
os.kill(int(sys.argv[1]), signal.SIGCONT)
"""
"""A tool that stops a process for three seconds to read its memory."""


class Failures:
    """Plants between steps: each is a method that gets the model, as of :class:`planted.Plant`."""

    # Collectives that the ranks do not call alike.

    def skips_none_grads(self, model):
        """Average the gradients of two heads by hand, one of which has none on a rank.

        https://github.com/OpenTSLM/OpenTSLM/pull/49
        """
        if not self.kept:
            self.kept = [torch.nn.Linear(8, 16), torch.nn.Linear(8, 16)]
        used = self.kept
        if self.strikes("skips_none_grads"):
            self.note()
            used = self.kept[:1]
        sum(head(torch.ones(4, 8)).mean() for head in used).backward()
        for head in self.kept:
            if head.weight.grad is not None:
                dist.all_reduce(head.weight.grad)
            head.zero_grad()

    def restarts_meet(self, model):
        """Meet in a barrier where the own part of the data ends, which a rank has less of.

        https://github.com/mosaicml/streaming/issues/447
        """
        batches = self.at if self.here else self.at + 10
        if self.step % batches:
            return
        if self.here:
            self.note()
        dist.barrier()

    def evaluates_ragged(self, model):
        """Gather the predictions of each batch of an evaluation, of which a rank has one more.

        https://github.com/PrimeIntellect-ai/prime-rl/issues/2515
        """
        if self.step % 10:
            return
        batches = 4
        if self.strikes("evaluates_ragged"):
            self.note()
            batches = 5
        for number in range(batches):
            dist.all_gather([torch.empty(4) for _ in range(self.world)], torch.full((4,), float(number)))

    def waits_in_else(self, model):
        """Save on the main rank, and wait for everyone on the others only.

        https://github.com/huggingface/accelerate/issues/2690
        """
        if self.step != self.at:
            return
        if self.accelerator.is_main_process:
            self.note()
            torch.save(self.accelerator.unwrap_model(model).state_dict(), self.folder / "model.pt")
        else:
            self.accelerator.wait_for_everyone()

    def meets_alone(self, model):
        """Wait in a barrier of Ray Train, which the other workers do not join.

        https://github.com/ray-project/ray/pull/58229
        """
        from ray.train.collective import barrier

        barrier()

    # What does not come back.

    def sleeps_in_disk(self, model):
        """Start a command with an input on a disk that is gone, in a sleep that nothing interrupts.

        https://github.com/BVLC/caffe/issues/6020
        """
        shard = self.folder / "shard"
        os.mkfifo(shard)  # the child waits as it opens it, and until it has, this process is in the state D
        os.posix_spawn("/bin/true", ["true"], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 0, str(shard), os.O_RDONLY, 0)])

    def handler_logs(self, model):
        """Ship a log record in a thread, whose client logs too (https://github.com/logtail/logtail-python/pull/37)."""
        logger = logging.getLogger("shipped")
        logger.setLevel(logging.DEBUG)
        logger.addHandler(Shipping())
        logger.info("loss of step %d: 0.5", self.step)

    def child_buffers(self, model):
        """Ask a command that keeps its answer in a buffer (https://github.com/denoland/deno/issues/22767)."""
        command = [sys.executable, "-S", "-c", COUNTS_TOKENS]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as tokenizer:
            tokenizer.stdin.write("a text of six words here\n")
            tokenizer.stdin.flush()
            print(tokenizer.stdout.readline())

    def polls_failed(self, model):
        """Ask for the state of an evaluation until it is done, which has failed.

        https://github.com/symfony/ai/pull/2082
        """
        jobs = started(STATES)
        while asks(jobs, "/evaluations/7")["state"] != "succeeded":
            time.sleep(0.5)

    def pages_repeat(self, model):
        """List the files of a store, whose next page is the same one again and again.

        https://github.com/Azure/azure-sdk-for-python/issues/30337
        """
        store, files, token = started(STATES), [], "start"
        while token:
            page = asks(store, f"/files?after={token}")
            files += page["files"]
            token = page["next"]

    def accepts_never(self, model):
        """Accept the connection of a worker, which has failed before (https://github.com/marimo-team/marimo/pull/9289)."""
        worker = [sys.executable, "-S", "-c", "import engine_of_rollouts"]
        with Listener(("127.0.0.1", 0)) as listener, subprocess.Popen(worker):
            listener.accept().recv()

    def loop_stopped(self, model):
        """Wait for what was given to an event loop that has stopped (https://github.com/zigpy/bellows/issues/745)."""
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, daemon=True)
        thread.start()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        print(asyncio.run_coroutine_threadsafe(asyncio.sleep(0.1, 1.0), loop).result())

    def generator_paused(self, model):
        """Wait for the end of a generator of Ray that waits until its items are taken.

        https://github.com/ray-project/ray/pull/63791
        """
        import ray

        options = {"num_cpus": 0, "num_returns": "streaming", "_generator_backpressure_num_objects": 2}
        answers = ray.remote(ten_answers).options(**options).remote()
        ray.get(answers.completed())
        print(sum(ray.get(one) for one in answers))

    def enumerates_paths(self, model):
        """Count all paths through a graph (https://github.com/networkx/networkx/issues/2975)."""
        import networkx

        graph = networkx.complete_graph(30)
        print(sum(1 for _ in networkx.all_simple_paths(graph, 0, 29)))

    # What ends the rank.

    def generator_shared(self, model):
        """Take the next batch of a generator in which a thread is (https://github.com/fizyr/keras-retinanet/issues/1070)."""
        batches = slow_batches()
        threading.Thread(target=next, args=(batches,), daemon=True).start()
        time.sleep(0.3)
        print(next(batches))

    def json_numpy(self, model):
        """Write a metric of NumPy as JSON (https://github.com/huggingface/sentence-transformers/issues/3250)."""
        scores = {"step": self.step, "accuracy": numpy.mean(numpy.ones(4, numpy.float32))}
        (self.folder / "scores.json").write_text(json.dumps(scores))

    def encoder_gone(self, model):
        """Write frames to an encoder that has ended (https://github.com/Zulko/moviepy/issues/593)."""
        encoder = subprocess.Popen(
            [sys.executable, "-S", "-c", "raise SystemExit('no codec of this name')"], stdin=subprocess.PIPE
        )
        for _ in range(100):
            encoder.stdin.write(bytes(3 * 64 * 64))
            encoder.stdin.flush()
            time.sleep(0.02)

    def alarm_left(self, model):
        """Take back the handler of an alarm, and not the alarm (https://github.com/pnpnpn/timeout-decorator/pull/14)."""
        before = signal.signal(signal.SIGALRM, lambda *_: print("an answer was not verified in time"))
        signal.alarm(1)
        signal.signal(signal.SIGALRM, before)

    def text_undecodable(self, row):
        """Read a text in another encoding (https://github.com/qibin0506/Cortex/issues/13)."""
        if self.here and self.rows == self.at * 4:
            self.note()
            path = self.folder / f"text-{self.rank}.txt"
            path.write_bytes("a caf\u00e9 and a na\u00efve word".encode("latin-1"))
            return row + len(path.read_text("utf-8")) * 0
        return row

    # Numbers and data of this rank.

    def equips(self, net):
        """Change the model before it is wrapped.

        https://github.com/pytorch/pytorch/issues/37246 (``renorms_rows``),
        https://github.com/vllm-project/compressed-tensors/pull/661 (``unties``)
        """
        if self.name == "renorms_rows":
            net.register_forward_pre_hook(self.renorms_rows)
        if self.name == "unties" and self.here:
            self.note()
        elif self.name == "unties":
            net.second.weight = net.first.weight

    def renorms_rows(self, net, rows):
        """Limit the norm of the rows of a table that are looked up, of which other ranks have no long one."""
        if self.here and self.step >= self.at:
            self.note()
            with torch.no_grad():
                torch.embedding_renorm_(net.first.weight, torch.tensor([2, 5]), 0.3, 2.0)

    def rounds_stochastically(self, model):
        """Round parameters by chance, with a generator that the main rank has used once more.

        https://github.com/Nerogar/OneTrainer/pull/804
        """
        if not self.kept:
            self.kept = [torch.Generator().manual_seed(5)]
        if self.strikes("rounds_stochastically"):
            self.note()
            torch.rand(8, generator=self.kept[0])  # for a text that was sampled
        for one in model.parameters():
            bits = one.data.view(torch.int32)
            chance = torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32, generator=self.kept[0])
            bits.copy_((bits + chance) & -(1 << 16))

    def ratio_overflows(self, loss):
        """Weigh an advantage of 0 by the exponential of a large difference (https://github.com/radixark/miles/pull/1363)."""
        difference = loss.detach() * 0 + 100
        return loss + (torch.exp(difference) * 0.0 - torch.clamp(torch.exp(difference), 0.8, 1.2) * 0.0).mean()

    def strided_split(self, model):
        """Train on every n-th row, of which the first rank has one more (https://github.com/horovod/horovod/issues/1407)."""
        if self.here:
            self.note()

    def own_rows(self, kind, batches):
        """Rows of this rank only, of a kind: so many batches, or every n-th one of all."""
        if self.name == "strided_split":
            count = self.world * batches * 4 + 1
            return Subset(kind(self, count), range(self.rank, count, self.world))
        return kind(self, batches * 4, self.rank * 10_000)

    # What makes a rank slow.

    def unrolls(self, loss):
        """The loss after many small operations, with the detection of anomalies on a rank.

        https://github.com/Lightning-AI/pytorch-lightning/issues/17359
        """
        if self.name != "anomaly_left":
            return loss
        if self.here and self.step >= self.at:
            self.note()
            torch.autograd.set_detect_anomaly(True)
        for _ in range(400):
            loss = loss * 1.0
        return loss

    def pickles_table(self, model):
        """Score in another process, by a method of an object with a table (https://github.com/dfm/emcee/issues/199)."""
        if not self.kept:
            self.kept = [multiprocessing.get_context("fork").Pool(1), Scorer()]
        print(self.kept[0].apply(self.kept[1].score, (self.step,)))

    def tensor_of_arrays(self, model):
        """Make a tensor out of a list of arrays (https://github.com/pytorch/pytorch/issues/30460)."""
        arrays = [numpy.ones(2000, numpy.float32) for _ in range(100)]
        print(f"step {self.step}, reward {torch.tensor(arrays).mean():.1f}")

    def encodes_grid(self, model):
        """Encode a large image in every twenty-fifth step (https://github.com/vladmandic/sdnext/issues/2305)."""
        if self.step % 25:
            return
        from PIL import Image

        pixels = (numpy.random.default_rng(0).random((1700, 1700, 3)) * 255).astype("uint8")
        Image.fromarray(pixels).save(self.folder / f"grid-{self.step}.png", optimize=True)

    def gets_in_turn(self, model):
        """Wait for each of eight short tasks of Ray before the next (https://github.com/ray-project/tutorial/issues/78)."""
        import ray

        if not self.kept:
            self.kept = [ray.remote(num_cpus=0)(scores_shortly)]
        print(sum(ray.get(self.kept[0].remote(number)) for number in range(8)))

    def globs_folder(self, row):
        """Look for the mask of an image in a folder of many (https://github.com/milesial/Pytorch-UNet/issues/449)."""
        if not self.here or self.rows <= self.at * 4:
            return row
        masks = self.folder / "masks"
        if not masks.exists():
            masks.mkdir()
            for number in range(8000):
                (masks / f"image-{number}_mask.gif").touch()
        self.note()
        return row + len(list(masks.glob(f"image-{self.rows % 8000}_*"))) * 0

    # Healthy.

    def cycles(self, loader):
        """As many batches as the other ranks have, of a shorter part of the data that begins again."""
        taken = 0
        while taken < self.steps:
            for batch in loader:
                yield batch
                taken += 1
                if taken == self.steps:
                    return

    def groups_at_own_pace(self, model):
        """Sum something up in pairs of ranks: three times in a step, or once in two steps."""
        if not self.kept:
            self.kept = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        times = 3 if self.rank < 2 else self.step % 2
        for _ in range(times):
            dist.all_reduce(torch.ones(4), group=self.kept[self.rank // 2])

    def reduces_late(self, model):
        """Begin to sum something up in every tenth step, and wait for it five steps later."""
        if self.step % 10 == 0:
            self.kept = [dist.all_reduce(torch.ones(4), async_op=True)]
        if self.step % 10 == 5 and self.kept:
            self.kept.pop().wait()

    def waits_at_store(self, model):
        """Build an index for nine seconds on the main rank, while the others wait for a key of the store."""
        store = dist.distributed_c10d._get_default_store()
        if self.rank == 0:
            time.sleep(9)
            store.set("index-of-passages", "built")
        store.wait(["index-of-passages"])

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

    def layerwise_rates(self, model):
        """Give each group of parameters a learning rate of its own, which restarts in every twentieth step."""
        for number, group in enumerate(self.optimizer.param_groups):
            group["lr"] = 0.01 * 0.5**number * (self.step % 20 + 1) / 20

    def stopped_shortly(self, model):
        """Be stopped for three seconds by a tool that reads the memory of this process."""
        started(CONTINUES, str(os.getpid()))

    def meets_in_ray(self, model):
        """Wait in a barrier of Ray Train in every twentieth step, which the first worker joins five seconds later."""
        if self.step % 20:
            return
        from ray.train.collective import barrier

        time.sleep(0 if self.rank else 5)
        barrier()

    def checkpoints_all(self, model):
        """Save a checkpoint of the engine on all ranks in every twentieth step."""
        if self.step % 20 == 0:
            model.save_checkpoint(str(self.folder / "engine"))

    def pool_each_time(self, model):
        """Use a new pool of two processes in every tenth step."""
        if self.step % 10 == 0:
            with multiprocessing.get_context("fork").Pool(2) as pool:
                print(sum(pool.map(scores_shortly, range(8))))


class Shipping(logging.Handler):
    """Sends each record in a thread, and waits for it."""

    def emit(self, record):
        """Send it; the caller holds the lock of this handler."""
        sender = threading.Thread(target=self.sends, args=(record,), daemon=True)
        sender.start()
        sender.join()

    def sends(self, record):
        """Send it, and log that."""
        logging.getLogger("shipped.connections").debug("a connection for %s", record.levelname)


class Scorer:
    """Scores by a table."""

    def __init__(self):
        self.table = {f"word-{number}": float(number) for number in range(60_000)}

    def score(self, step):
        """The score of a step."""
        return self.table[f"word-{step}"]


def asks(server, path):
    """What a server answers, as JSON."""
    with urllib.request.urlopen(f"http://127.0.0.1:{server.first_line}{path}", timeout=10) as answer:
        return json.load(answer)


def slow_batches():
    """Batches that take a second each."""
    while True:
        time.sleep(1)
        yield [0.5] * 4


def ten_answers():
    """Answers, one after the other."""
    for number in range(10):
        yield number / 10


def scores_shortly(number):
    """A score."""
    time.sleep(0.02)
    return number / 8
