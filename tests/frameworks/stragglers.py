"""Plants of ``planted.py``: what makes a rank slow."""

import copy
import cProfile
import fcntl
import gc
import gzip
import hashlib
import inspect
import io
import json
import logging
import multiprocessing
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
import urllib.request
import zlib
from collections import deque

import numpy
import torch
from moments import every_step, from_then_on, in_model, in_row, once
from shared_helpers import SERVER, Side, compute, full_server, scores_shortly, started
from torch.utils.data import DataLoader

LIMITER = """
import os, signal, sys, time
while True:
    os.kill(int(sys.argv[1]), signal.SIGSTOP)
    time.sleep(0.1)
    os.kill(int(sys.argv[1]), signal.SIGCONT)
    time.sleep(0.05)
"""
"""What limits the processor time of another process, as the tool cpulimit does; it ends with that process."""
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
QUERY = "import time; time.sleep(0.05); print('0, 73 %, 61204 MiB')"
"""What a command does that asks the driver of GPUs for their memory: it takes 50 ms."""
BUSY = "while True: sum(range(1000))"
COUNTS_WORDS = """
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


class Stragglers:
    """Methods of :class:`planted.Plant`, which get the model unless they are called elsewhere."""

    @once
    def backward_slow(self, model):
        """Take longer in each backward pass from now on, as where activations come back from a slow disk."""
        next(model.parameters()).register_hook(lambda gradient: time.sleep(0.06))

    @from_then_on
    def grows(self, model):
        """Take longer with each step, as where a growing list is searched."""
        time.sleep(0.0005 * (self.step - self.at))

    @from_then_on
    def compress(self, model):
        """Compress a log, without the interpreter's lock."""
        until, text = time.thread_time() + 0.05, repr(list(range(60_000))).encode()
        while time.thread_time() < until:
            zlib.compress(text, 9)

    @from_then_on
    def copytree(self, model):
        """Copy a folder of many files in every twentieth step."""
        source = self.folder / "last"
        if not source.exists():
            source.mkdir()
            for number in range(4000):
                (source / f"shard-{number}").write_bytes(b"x" * 2000)
        if self.step % 20 == 0:
            shutil.copytree(source, self.folder / f"best-{self.step}")
            shutil.rmtree(self.folder / f"best-{self.step}")

    @once
    def throttled(self, model):
        """Have another process limit the processor time of this one."""
        self.kept.append(started(LIMITER, str(os.getpid()), says=False))

    def zipped(self):
        """Read a row out of a compressed file, from its beginning each time."""
        path = self.folder / "rows.gz"
        if not self.kept:
            path.write_bytes(gzip.compress(repr(list(range(600_000))).encode()))
            self.kept.append(gzip.open(path))  # noqa: SIM115 - for the rest of the process
        self.kept[0].seek(0)
        self.kept[0].seek(3_000_000)

    @once
    def histograms(self, model):
        """Describe each gradient in the backward pass, as where gradients are logged."""
        for one in model.parameters():
            one.register_hook(lambda gradient: compute(0.012))

    @from_then_on
    def slow_tracking(self, model):
        """Send the loss to a tracking server that takes 60 ms to answer."""
        if not self.kept:
            server = subprocess.Popen([sys.executable, "-S", "-c", SERVER, "0", "0.06"], stdout=subprocess.PIPE)
            self.kept.extend((server, server.stdout.readline().decode().strip()))
        urllib.request.urlopen(f"http://127.0.0.1:{self.kept[1]}", b"loss=0.5", timeout=5).close()

    @in_model
    def long_rows(self):
        """Compute more in the model, as for longer rows, from some step on."""
        if self.here and self.step >= self.at:
            self.note()
            compute(0.06)

    def lists_files(self, epoch):
        """List the files of an object store before each epoch (https://github.com/webdataset/webdataset/issues/267)."""
        if self.name == "lists_files" and self.here and epoch >= 2:
            self.note()
            for _ in range(10):
                time.sleep(0.08)  # an answer of the store, of 1000 names

    @every_step
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

    @once
    def optimizer_slow(self, model):
        """Update parameters that are on a slow disk (https://github.com/deepspeedai/DeepSpeed/issues/1130)."""
        inner = getattr(self.optimizer, "optimizer", self.optimizer)
        inner.register_step_pre_hook(lambda *_: time.sleep(0.06))

    @from_then_on
    def samples_text(self, model):
        """Generate a text in every fifth step, on the main rank (https://github.com/axolotl-ai-cloud/axolotl/pull/521)."""
        if self.step % 5:
            return
        inner = getattr(model, "module", model)
        inner.eval()
        inner.generate(torch.ones(4, 2, dtype=torch.long), max_new_tokens=50, min_new_tokens=50, do_sample=True)
        inner.train()

    @from_then_on
    def cache_contended(self, model):
        """Take a lock in each step that another job often holds (https://github.com/rwth-i6/returnn/issues/1548)."""
        path = self.folder / "cache.lock"
        if not self.kept:
            self.kept.append(started(CONTENDER, str(os.getpid()), str(path)))
        with path.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)

    @from_then_on
    def history(self, model):
        """Write the whole history of the loss after each step.

        https://github.com/NVlabs/GR00T-WholeBodyControl/pull/200
        """
        if not self.kept:
            self.kept = [{"step": step, "loss": 0.5, "learning_rate": 1e-3} for step in range(60_000)]
        (self.folder / "trainer_state.json").write_text(json.dumps(self.kept))

    @from_then_on
    def queries_gpu(self, model):
        """Ask the driver of GPUs after each step (https://github.com/Lightning-AI/pytorch-lightning/issues/189)."""
        subprocess.run([sys.executable, "-S", "-c", QUERY], capture_output=True, check=True)

    @from_then_on
    def averages_weights(self, model):
        """Average many weights one by one (https://github.com/lucidrains/ema-pytorch/issues/5)."""
        if not self.kept:
            self.kept = [torch.zeros(8) for _ in range(36_000)]
        new = torch.ones(8)
        for held in self.kept:
            held.lerp_(new, 0.001)

    def reads_slowly(self):
        """Read a row from a disk of the network, on one rank in the process that trains."""
        if self.here and self.rows > self.at * 4:
            self.note()
        time.sleep(0.012)

    def tokenizes(self):
        """Tokenize where batches are made, on a rank without a cache.

        https://github.com/huggingface/transformers/issues/14428, https://github.com/hiyouga/LlamaFactory/issues/903
        """
        if self.name != "tokenizes" or not self.here or self.rows < self.at * 4:
            return
        self.note()
        until, text = time.thread_time() + 0.06, "The quick brown fox, 42 times. " * 40
        while time.thread_time() < until:
            [len(word) for word in re.findall(r"\w+|[^\w\s]", text)]

    @every_step
    def recompiles(self, model):
        """Call a compiled function, on a rank with another length in each step.

        https://github.com/pytorch/pytorch/issues/140229
        """
        if not self.kept:
            torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 10**6
            self.kept.append(torch.compile(attention, backend="eager", dynamic=False))
        length = 8
        if self.here and self.step >= self.at:
            self.note()
            length = self.step
        self.kept[0](torch.ones(length, 8))

    def decodes(self):
        """Decode an image, which on a rank is much larger (https://github.com/YijinHuang/pytorch-DR/issues/1)."""
        from PIL import Image

        large = self.here and self.rows > self.at * 4
        if large:
            self.note()
        if not self.kept:
            self.kept = [image_of(64), image_of(1200)]
        Image.open(io.BytesIO(self.kept[large])).convert("RGB").resize((8, 8))

    @from_then_on
    def auc(self, model):
        """Compute a curve over all predictions in each step (https://github.com/Lightning-AI/torchmetrics/issues/1461)."""
        from torchmetrics.classification import BinaryAUROC

        if not self.kept:
            self.kept.append(BinaryAUROC(sync_on_compute=False))
            self.kept[0].update(torch.rand(400_000), torch.randint(0, 2, (400_000,)))
        self.kept[0].update(torch.rand(4), torch.randint(0, 2, (4,)))
        self.kept[0].compute()

    @from_then_on
    def formats_tensors(self, model):
        """Format whole tensors for a message that is not written (https://github.com/pytorch/pytorch/issues/9185)."""
        torch.set_printoptions(profile="full")
        logging.getLogger("model").debug(f"hidden states: {torch.rand(128, 96)}")

    @from_then_on
    def board_histograms(self, model):
        """Write histograms of activations in each step (https://github.com/pytorch/pytorch/issues/43328)."""
        if not self.kept:
            from torch.utils.tensorboard import SummaryWriter

            self.kept.append(SummaryWriter(str(self.folder / "board")))
        for layer in range(8):
            self.kept[0].add_histogram(f"layer-{layer}", torch.rand(200_000), self.step)

    @in_model
    def shares_core(self):
        """Compute, on a core that another process of the host was bound to as well.

        https://github.com/pytorch/pytorch/issues/101850, https://github.com/pytorch/pytorch/issues/8126
        """
        if self.here and self.passes == self.at:
            self.note()
            core = max(os.sched_getaffinity(0))
            os.sched_setaffinity(0, {core})
            for _ in range(2):
                self.kept.append(subprocess.Popen([sys.executable, "-S", "-c", BUSY]))
        until, matrix = time.thread_time() + 0.03, torch.ones(64, 64)
        while time.thread_time() < until:
            matrix = matrix @ matrix / 64

    @from_then_on
    def concat_frames(self, model):
        """Append to a table of all predictions, and average it, in each step (https://github.com/iomega/ms2query/pull/231)."""
        import pandas

        if not self.kept:
            self.kept.append(pandas.DataFrame(torch.rand(2_000_000, 8).numpy()))
        self.kept[0] = pandas.concat([self.kept[0], self.kept[0].iloc[:4]], ignore_index=True)
        self.kept[0].mean()

    @from_then_on
    def inspects_memory(self, model):
        """Log the memory of the process in detail after each step.

        https://github.com/rwth-i6/returnn/issues/1479, https://github.com/ray-project/ray/issues/55117
        """
        import psutil

        process = psutil.Process()
        print(process.memory_full_info().uss, sum(one.private_dirty for one in process.memory_maps(grouped=False)))

    @from_then_on
    def puts_weights(self, model):
        """Put each parameter into the object store of Ray (https://github.com/ray-project/ray/issues/263)."""
        import ray

        self.kept = [ray.put(torch.ones(64, 1024).numpy()) for _ in range(40)]

    @in_row
    def weighted_draws(self, row):
        """Draw a second row by the weights of all rows (https://github.com/pytorch/pytorch/issues/32221)."""
        if not self.here or self.rows <= self.at * 4:
            return row
        self.note()
        if not self.kept:
            self.kept.append(torch.rand(600_000))
        drawn = torch.multinomial(self.kept[0], 1).item()
        return row + 1e-9 * drawn

    @in_model
    def denormals(self):
        """Multiply by numbers that are too small to be normal (https://github.com/huggingface/transformers/pull/18574)."""
        decayed = self.here and self.passes > self.at
        if decayed:
            self.note()
        state, weight = torch.full((288, 288), 1e-39 if decayed else 1.0), torch.full((288, 288), 1e-3)
        print(f"state {(weight @ state).mean():.1e}")

    @from_then_on
    def recreates_iterator(self, model):
        """Begin to read the validation rows anew in each step (https://github.com/pytorch/pytorch/issues/22133)."""
        print(next(iter(DataLoader(torch.rand(64, 8), 4, num_workers=2))).mean())

    @in_row
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

    @from_then_on
    def rebuilds_index(self, model):
        """Rebuild the index of passages in every twenty-fifth step (https://github.com/huggingface/datasets/issues/2046)."""
        if self.step % 25 == 0:
            passages = torch.rand(20_000, 32)
            centers = passages[:100]
            for _ in range(8):
                nearest = torch.cdist(passages, centers).argmin(1)
                centers = torch.stack([passages[nearest == one].mean(0).nan_to_num() for one in range(100)])
                compute(0.35)

    @from_then_on
    def logs_callers(self, model):
        """Log with the whole stack of the caller (https://github.com/mlcommons/logging/pull/18)."""
        for name in ("loss", "rate", "norm", "samples") * 4:
            frame = inspect.stack(context=5)[1]
            print(f"{frame.filename}:{frame.lineno} {name} {self.step}")

    @in_row
    def refills_buffer(self, row):
        """Fill the buffer of a shuffled stream anew, after each shard of 100 rows.

        https://github.com/NVIDIA/Megatron-Energon/issues/18
        """
        if self.here and self.rows >= self.at * 4 and self.rows % 100 == 0:
            self.note()
            line = json.dumps({"text": "The quick brown fox " * 20, "tokens": list(range(200))})
            self.kept = [json.loads(line) for _ in range(120_000)][-100:]
        return row

    @from_then_on
    def projects_gradients(self, model):
        """Decompose gradients in every twenty-fifth step (https://github.com/jiaweizzhao/GaLore/issues/6)."""
        if self.step % 25 == 0:
            until = time.monotonic() + 2.5
            while time.monotonic() < until:
                self.kept = [torch.linalg.svd(torch.rand(500, 500)).U[:, :8]]

    @in_row
    def copies_annotations(self, row):
        """Copy all polygons of an image (https://github.com/facebookresearch/detectron2/issues/939)."""
        if not self.here or self.rows <= self.at * 4:
            return row
        self.note()
        if not self.kept:
            self.kept = [{"polygon": [[float(x), float(y)] for x in range(40) for y in range(40)]} for _ in range(10)]
        return row + len(copy.deepcopy(self.kept)) * 0

    @in_row
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

    @from_then_on
    def copies_vocabulary(self, model):
        """Ask for the size of the vocabulary, by a copy of it (https://github.com/huggingface/tokenizers/issues/483)."""
        if not self.kept:
            self.kept = [tokenizer_of(100_000)]
        print(f"step {self.step}, vocabulary {len(self.kept[0].get_vocab())}")

    @from_then_on
    def redefines_task(self, model):
        """Define a task of Ray anew for each of many texts (https://github.com/ray-project/ray/issues/6240)."""
        import ray

        for number in range(40):
            task = ray.remote(num_cpus=0)(lambda number=number: number)
            ray.get(task.remote())

    @from_then_on
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

    @from_then_on
    def pickles_table(self, model):
        """Score in another process, by a method of an object with a table (https://github.com/dfm/emcee/issues/199)."""
        if not self.kept:
            self.kept = [multiprocessing.get_context("fork").Pool(1), SlowScorer()]
        print(self.kept[0].apply(self.kept[1].score, (self.step,)))

    @from_then_on
    def tensor_of_arrays(self, model):
        """Make a tensor out of a list of arrays (https://github.com/pytorch/pytorch/issues/30460)."""
        arrays = [numpy.ones(2000, numpy.float32) for _ in range(100)]
        print(f"step {self.step}, reward {torch.tensor(arrays).mean():.1f}")

    @from_then_on
    def encodes_grid(self, model):
        """Encode a large image in every twenty-fifth step (https://github.com/vladmandic/sdnext/issues/2305)."""
        if self.step % 25:
            return
        from PIL import Image

        pixels = (numpy.random.default_rng(0).random((1700, 1700, 3)) * 255).astype("uint8")
        Image.fromarray(pixels).save(self.folder / f"grid-{self.step}.png", optimize=True)

    @from_then_on
    def gets_in_turn(self, model):
        """Wait for each of eight short tasks of Ray before the next (https://github.com/ray-project/tutorial/issues/78)."""
        import ray

        if not self.kept:
            self.kept = [ray.remote(num_cpus=0)(scores_shortly)]
        print(sum(ray.get(self.kept[0].remote(number)) for number in range(8)))

    @in_row
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

    @from_then_on
    def iterates_elements(self, model):
        """Count in a mask, element by element (https://github.com/pytorch/pytorch/issues/43116)."""
        mask = torch.rand(120, 120)
        print(sum(1 for row in mask for one in row if one > 0.5))

    @from_then_on
    def tracemalloc_left(self, model):
        """Look after each step for what memory is used for (https://github.com/huggingface/peft/pull/1126)."""
        if not tracemalloc.is_tracing():
            tracemalloc.start(25)
            self.kept = [[number] for number in range(4000)]
        print(tracemalloc.take_snapshot().statistics("lineno")[0])

    @from_then_on
    def knn_probe(self, model):
        """Classify by the nearest features in every twenty-fifth step (https://github.com/vturrisi/solo-learn/pull/190)."""
        if self.step % 25:
            return
        bank, labels = torch.rand(20_000, 64), torch.arange(20_000) % 10
        for part in torch.rand(11_000, 64).split(100):
            nearest = torch.cdist(part, bank).topk(200, largest=False).indices
            labels[nearest].mode().values.sum()

    @from_then_on
    def nagle_delays(self, model):
        """Send head and body of a request one after the other (https://github.com/scylladb/seastar/issues/968)."""
        if not self.kept:
            address = ("127.0.0.1", int(started(COUNTS_WORDS).first_line))
            self.kept = [socket.create_connection(address)]
        for _ in range(3):
            self.kept[0].sendall(b"POST /tokens\n")
            self.kept[0].sendall(b"some words, end of the body")
            self.kept[0].recv(1)

    @from_then_on
    def edit_distances(self, model):
        """Compute an error rate in every twenty-fifth step (https://github.com/jitsi/jiwer/issues/68)."""
        if self.step % 25 == 0:
            words = [self.own.randint(0, 30) for _ in range(6000)]
            print(distance(words[:3000], words[3000:]))

    @from_then_on
    def decodes_table(self, model):
        """Read all of a table for one row (https://github.com/huggingface/datasets/issues/6846)."""
        import datasets

        if not self.kept:
            tokens = [list(range(number, number + 20)) for number in range(40_000)]
            self.kept = [datasets.Dataset.from_dict({"tokens": tokens})]
        print(self.kept[0][:]["tokens"][self.step])

    @from_then_on
    def samples_deque(self, model):
        """Sample a batch out of a long deque (https://github.com/HorizonRobotics/SocialRobot/issues/5)."""
        if not self.kept:
            self.kept = [deque(range(1_000_000), maxlen=1_000_000)]
        print(f"step {self.step}, rewards {sum(self.own.sample(self.kept[0], 1024))}")

    @in_row
    def unpacks_arrays(self, row):
        """Read a row of an array that is unpacked anew each time (https://github.com/facebookresearch/spdl/pull/293)."""
        if not self.here or self.rows <= self.at * 4:
            return row
        path = self.folder / "features.npz"
        if not path.exists():
            features = numpy.random.default_rng(0).integers(0, 50, (6000, 250), numpy.uint16)
            numpy.savez_compressed(path, features=features)
        self.note()
        self.kept = self.kept or [numpy.load(path)]
        return row + float(self.kept[0]["features"][self.rows % 4000].mean()) * 0

    @in_row
    def parses_yaml(self, row):
        """Parse the annotation of each image by a parser in Python (https://github.com/keephq/keep/pull/3056)."""
        if not self.here or self.rows <= self.at * 4:
            return row
        import yaml

        self.note()
        text = "".join(f"- {{id: {number}, label: cat, box: [1.5, 2.5, 30.0, 40.0]}}\n" for number in range(25))
        return row + len(yaml.safe_load(text)) * 0

    @from_then_on
    def compiles_patterns(self, model):
        """Look for more words in a text than compiled patterns are kept (https://github.com/nipunsadvilkar/pySBD/issues/41)."""
        for number in range(700):
            re.search(rf"(?<!\w)word{number}\.(?=\s)", "a sample of a few words")

    @from_then_on
    def hashes_checkpoint(self, model):
        """Hash the files of a large checkpoint in every twenty-fifth step (https://github.com/wandb/wandb/pull/10157)."""
        if self.step % 25:
            return
        shard = bytes(64 << 20)
        (self.folder / "manifest").write_text("".join(hashlib.md5(shard).hexdigest() for _ in range(13)))

    @from_then_on
    def actor_each_time(self, model):
        """Make two actors of Ray, one after the other, in every twenty-fifth step.

        https://github.com/ray-project/ray/issues/20244
        """
        if self.step % 25:
            return
        import ray

        for _ in range(2):
            actor = ray.remote(Side).options(num_cpus=0).remote()
            print(ray.get(actor.answers.remote()))
            ray.kill(actor)

    @from_then_on
    def permutes_index(self, model):
        """Permute the index of all samples for each batch (https://github.com/ServiceNow/Fast-LLM/issues/132)."""
        print(numpy.random.default_rng(self.step).permutation(2_500_000)[:4])

    @from_then_on
    def writes_embedding(self, model):
        """Write embeddings as text in every twenty-fifth step (https://github.com/pytorch/pytorch/issues/51445)."""
        if self.step % 25:
            return
        with (self.folder / "tensors.tsv").open("w") as file:
            file.writelines("\t".join(map(str, row)) + "\n" for row in torch.rand(25_000, 100).tolist())

    @from_then_on
    def waits_singly(self, model):
        """Take the answers of many tasks of Ray one by one, in every twenty-fifth step.

        https://github.com/ray-project/ray/issues/49905
        """
        if self.step % 25:
            return
        import ray

        left = [ray.put(number) for number in range(2000)]
        while left:
            _, left = ray.wait(left)

    @from_then_on
    def draws_boxes(self, model):
        """Draw boxes with a font that is loaded for each, in every twenty-fifth step.

        https://github.com/pytorch/vision/issues/3072
        """
        if self.step % 25:
            return
        from PIL import Image, ImageDraw, ImageFont

        drawing = ImageDraw.Draw(Image.new("RGB", (1600, 1200)))
        for number in range(5_000):
            left, top = number * 37 % 1500, number * 41 % 1100
            drawing.rectangle((left, top, left + 40, top + 60))
            drawing.text((left, top), f"person {number}", font=ImageFont.load_default(12))

    @from_then_on
    def convolves(self, model):
        """Add an echo by a direct convolution (https://github.com/iver56/audiomentations/issues/30)."""
        print(numpy.convolve(numpy.ones(60_000), numpy.ones(6_000)).sum())

    @from_then_on
    def iterates_frame(self, model):
        """Weigh samples by a loop over the rows of a table (https://github.com/ddmms/ml-peg/pull/616)."""
        import pandas

        if not self.kept:
            self.kept.append(pandas.DataFrame({"name": ["a"] * 2500, "weight": [0.5] * 2500}))
        print(sum(row["weight"] for _, row in self.kept[0].iterrows()))

    @from_then_on
    def straggle_sleep(self, model):
        """Sleep."""
        time.sleep(0.06)

    @from_then_on
    def straggle_compute(self, model):
        """Compute in Python."""
        until = time.thread_time() + 0.05
        while time.thread_time() < until:
            sum(range(1000))

    @from_then_on
    def rare(self, model):
        """Sleep long, in every twenty-fifth step."""
        if self.step % 25 == 0:
            time.sleep(2.5)

    @from_then_on
    def collect(self, model):
        """Make the garbage collector walk through many objects in every fifth step."""
        if not self.kept:
            self.kept = [[number] for number in range(2_000_000)]
        if self.step % 5 == 0:
            gc.collect()

    @from_then_on
    def checkpoint_slow(self, model):
        """Save for 1.5 seconds in every twentieth step."""
        if self.step % 20 == 0:
            self.saves(model, 1.5)

    @from_then_on
    def threads(self, model):
        """Compute in Python in six threads beside the training."""
        while len(self.kept) < 6:
            self.kept.append(threading.Thread(target=compute_forever, daemon=True))
            self.kept[-1].start()

    @from_then_on
    def leak(self, model):
        """Keep two MiB."""
        self.kept.append(bytearray(os.urandom(1 << 10)) * (2 << 10))


def token_of(number):
    """A number of a token."""
    return number % 997


def attention(rows):
    """Something to compile."""
    return torch.relu(rows @ rows.T).softmax(-1).sum()


def image_of(width):
    """A photo, as JPEG."""
    from PIL import Image

    written = io.BytesIO()
    Image.effect_noise((width, width * 3 // 4), 60).convert("RGB").save(written, "JPEG")
    return written.getvalue()


def tokenizer_of(count):
    """A tokenizer with so many words."""
    from tokenizers import Tokenizer, models

    return Tokenizer(models.WordLevel({f"w{number}": number for number in range(count)}, unk_token="w0"))


class SlowScorer:
    """Scores by a table."""

    def __init__(self):
        self.table = {f"word-{number}": float(number) for number in range(60_000)}

    def score(self, step):
        """The score of a step."""
        return self.table[f"word-{step}"]


def distance(one, other):
    """The number of words to change, add or drop, in plain Python."""
    row = list(range(len(other) + 1))
    for number, word in enumerate(one, 1):
        last, row[0] = row[0], number
        for place, second in enumerate(other, 1):
            last, row[place] = row[place], min(row[place] + 1, row[place - 1] + 1, last + (word != second))
    return row[-1]


def compute_forever():
    """Keep a processor and the interpreter's lock busy."""
    while True:
        sum(range(1000))
