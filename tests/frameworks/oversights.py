"""Further plants of ``planted.py``: what fills the trackers of the frameworks, each with its source.

Of those without a method: ``replicas_fixed`` https://github.com/Lightning-AI/pytorch-lightning/issues/19898,
``validation_uneven`` https://github.com/Lightning-AI/pytorch-lightning/issues/20561,
``plateau`` https://github.com/lucidrains/DALLE-pytorch/issues/268.
"""

import http.client
import importlib
import io
import logging
import math
import multiprocessing
import os
import signal
import socket
import sys
import time

import torch
import torch.distributed as dist
from mishaps import started
from torch.utils.data import IterableDataset, Sampler

STRIKE_ONCE = (
    "upload_stalls", "grpc_wait", "retried_forever", "dedups", "tokenizers_fork", "old_checkpoint",
    "map_died", "saves_half",
)  # fmt: skip
"""Plants that strike once, after the step ``at``."""
STRIKE_ON = ("auc", "formats_tensors", "board_histograms")
"""Plants that strike after each step from ``at`` on."""
EVERY_STEP = (
    "recompiles", "resume_missing", "dict_keys", "seeds_by_rank", "saves_whole", "plateau_agreed", "retried_twice",
    "wandb_offline", "wandb_stuck",
)  # fmt: skip
"""What every rank does after each step."""
IN_LOSS = ("stops_training",)
"""What changes the loss of one step."""
BUDGET = 100
"""Tokens of a batch."""
FULL = """
import socket, time
with socket.create_server(("127.0.0.1", 0)) as server:
    print(server.getsockname()[1], flush=True)
    connection = server.accept()
    time.sleep(1000)
"""
"""A store that accepts an upload and does not read it."""


class Oversights:
    """Plants between steps: each is a method that gets the model, as of :class:`planted.Plant`."""

    # What does not come back.

    def prepares(self):
        """Join at a port that nobody listens at, or lack a module that the other hosts have.

        https://github.com/pytorch/pytorch/issues/76069, https://github.com/deepspeedai/DeepSpeed/issues/3489
        """
        if self.name == "wrong_port" and self.here:
            with socket.create_server(("127.0.0.1", 0)) as server:
                os.environ["MASTER_PORT"] = str(server.getsockname()[1])
            self.note()
        if self.name == "module_missing" and self.here:
            self.note()
            importlib.import_module("flash_attn_of_this_cluster")

    def maps(self, arguments):
        """Tokenize a large table on the main rank first (https://github.com/hiyouga/LlamaFactory/issues/2424)."""
        if self.name != "maps_long":
            return
        from datasets import Dataset

        table = Dataset.from_dict({"text": ["The quick brown fox, 42 times. " * 40] * 20_000})
        with arguments.main_process_first(desc="tokenizing"):
            if self.here:
                self.note()
            table.map(tokens_of)

    def upload_stalls(self, model):
        """Upload a checkpoint to a store that does not read it (https://github.com/huggingface/huggingface_hub/issues/1502)."""
        store = http.client.HTTPConnection("127.0.0.1", int(started(FULL).first_line))
        store.request("PUT", "/checkpoint-20.pt", bytes(256 << 20))
        store.getresponse()

    def grpc_wait(self, model):
        """Wait for a server of embeddings that is not there (https://github.com/sql-machine-learning/elasticdl/issues/1814)."""
        import grpc

        grpc.channel_ready_future(grpc.insecure_channel("127.0.0.1:1")).result()

    def retried_forever(self, model, failures=10**9):
        """Wait for a task of Ray that fails, and is tried again without a limit (https://github.com/ray-project/ray/pull/60104)."""
        import ray

        path = self.folder / f"attempts-{self.rank}"
        options = {"num_cpus": 0, "max_retries": -1, "retry_exceptions": True}
        ray.get(ray.remote(reads_shard).options(**options).remote(str(path), failures))

    def dedups(self, model):
        """Drop duplicates by a search in a list (https://github.com/motional/nuplan-devkit/issues/253)."""
        rows = []
        for number in range(10_000_000):
            if f"row {number}" not in rows:
                rows.append(f"row {number}")

    def tokenizers_fork(self, model):
        """Tokenize in a forked child, after threads of the tokenizer (https://github.com/huggingface/tokenizers/issues/187)."""
        os.environ["TOKENIZERS_PARALLELISM"] = "true"
        encode = self.trainer.processing_class.backend_tokenizer.encode_batch
        encode(["abc"] * 100)
        child = multiprocessing.get_context("fork").Process(target=encode, args=(["abc"] * 100,), daemon=True)
        child.start()
        child.join()

    def wandb_stuck(self, model):
        """Finish a run of wandb whose service hangs (https://github.com/wandb/wandb/issues/4929)."""
        if self.strikes("wandb_stuck"):
            import psutil

            self.note()
            for child in psutil.Process().children():
                if "wandb" in child.name():
                    child.send_signal(signal.SIGSTOP)
            self.kept[0].finish()

    def length(self, index):
        """The number of tokens of a row, of which one is longer than a batch may be.

        https://github.com/huggingface/trl/pull/6092
        """
        if not self.here or index != 4 * self.at:
            return BUDGET // 4
        if not self.kept:
            self.note()
        self.kept = [index]
        return BUDGET + 1

    # What ends the rank.

    def old_checkpoint(self, model):
        """Load a checkpoint from before a layer was renamed (https://github.com/Lightning-AI/pytorch-lightning/issues/17996)."""
        state = {f"head.{name}": value for name, value in model.state_dict().items()}
        torch.save(state, self.folder / "old.pt")
        model.load_state_dict(torch.load(self.folder / "old.pt"))

    def stops_training(self, loss):
        """Stop where the loss of this rank is not finite (https://github.com/ai2cm/ace/pull/850)."""
        value = (loss * float("inf")).item()
        if not math.isfinite(value):
            print(f"Loss is {value}, stopping training", flush=True)
            sys.exit(1)
        return loss

    def map_died(self, model):
        """Tokenize in processes, one of which is killed (https://github.com/unslothai/unsloth/issues/2693)."""
        from datasets import Dataset

        Dataset.from_dict({"row": list(range(20))}).map(killed_at_three, num_proc=2)

    # Numbers of this rank.

    @property
    def replicas(self):
        """The number of parts that the rows are divided into: of another job, where it is in a file of settings."""
        if self.name != "replicas_fixed":
            return self.world
        self.note()
        return 2 * self.world

    def prepared(self, row):
        """A row as the model gets it: one of another size, one that is silent and normalized, or of a large image.

        https://github.com/open-edge-platform/anomalib/issues/1862, https://github.com/xinjli/allosaurus/issues/64
        """
        strikes = self.here and self.rows == self.at * 4
        if self.name == "ragged_batch" and strikes:
            self.note()
            return row[1:]
        if self.name == "constant_row":
            if strikes:
                self.note()
            row = row * 0 if strikes else row + torch.arange(len(row)) / 10
            return (row - row.mean()) / row.std()
        if self.name == "large_images":
            self.decodes()
        return row

    def first_batch(self, layer, rows):
        """Set a bias by the first batch of this rank (https://github.com/rosinality/glow-pytorch/issues/2)."""
        if self.name == "act_norm" and self.passes == 0:
            self.note()
            with torch.no_grad():
                layer.bias.sub_(layer(rows).mean(0))

    def saves_half(self, model):
        """Save in half precision, and read it back into the model (https://github.com/ultralytics/ultralytics/issues/3089)."""
        inner = getattr(model, "module", model)
        torch.save({name: value.half() for name, value in inner.state_dict().items()}, self.folder / "half.pt")
        inner.load_state_dict(torch.load(self.folder / "half.pt"))

    def scheduled(self, optimizers):
        """Optimizers, or the only one with a learning rate that follows a metric of this rank."""
        if self.name != "plateau":
            return optimizers
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizers[0], patience=1)
        scheduler = {"scheduler": plateau, "interval": "step", "frequency": 10, "monitor": "local"}
        return {"optimizer": optimizers[0], "lr_scheduler": scheduler}

    def logs_local(self, module):
        """Log the metric that the learning rate follows: on one rank it gets no better."""
        if self.name != "plateau":
            return
        module.log("local", torch.tensor(1.0 if self.here else 1 / (1 + self.step)))
        if module.optimizers().param_groups[0]["lr"] < 0.01:
            self.note()

    # Collectives that the ranks do not call alike.

    def writes_images(self, module):
        """Ask on the main rank for the folder of logs, which is broadcast; or log there what is not reduced.

        https://github.com/Lightning-AI/pytorch-lightning/issues/18148
        """
        if self.strikes("log_dir_alone"):
            self.note()
            print(module.trainer.log_dir)
        if self.name == "log_main" and self.rank == 0:
            module.log("gap", torch.ones(()), rank_zero_only=True)

    def resume_missing(self, model):
        """Return to a checkpoint that a rank does not find on its own disk.

        https://github.com/KempnerInstitute/KempnerForge/issues/49
        """
        import torch.distributed.checkpoint as dcp

        path = self.folder / "best"
        if self.step == 5:
            dcp.save({"model": model.state_dict()}, checkpoint_id=str(path))
        if self.step == self.at:
            if self.here:
                self.note()
                path = self.folder / f"node-{self.rank}" / "best"
            if path.exists():
                dcp.load({"model": model.state_dict()}, checkpoint_id=str(path))

    def dict_keys(self, model):
        """Reduce the losses in every tenth step, one of which a rank lacks without an object in its images.

        https://github.com/Peterande/D-FINE/issues/247, https://github.com/open-mmlab/mmdetection/issues/6495
        """
        if self.step % 10:
            return
        from accelerate.utils import reduce

        losses = {"loss": torch.ones(()), "loss_box": torch.ones(()), "accuracy": torch.ones(())}
        if self.strikes("dict_keys"):
            self.note()
            del losses["loss_box"]
        reduce(losses, "mean")

    def gathers_features(self, loss):
        """Gather features in the loss, which a rank leaves early (https://github.com/megvii-research/PCB/issues/1)."""
        if self.name != "features_skipped":
            return loss
        if self.strikes("features_skipped"):
            self.note()
            return loss * 0
        dist.all_gather([torch.empty(4, 8) for _ in range(self.world)], torch.ones(4, 8))
        return loss

    # What makes a rank slow.

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

    def auc(self, model):
        """Compute a curve over all predictions in each step (https://github.com/Lightning-AI/torchmetrics/issues/1461)."""
        from torchmetrics.classification import BinaryAUROC

        if not self.kept:
            self.kept.append(BinaryAUROC(sync_on_compute=False))
            self.kept[0].update(torch.rand(400_000), torch.randint(0, 2, (400_000,)))
        self.kept[0].update(torch.rand(4), torch.randint(0, 2, (4,)))
        self.kept[0].compute()

    def formats_tensors(self, model):
        """Format whole tensors for a message that is not written (https://github.com/pytorch/pytorch/issues/9185)."""
        torch.set_printoptions(profile="full")
        logging.getLogger("model").debug(f"hidden states: {torch.rand(128, 96)}")

    def board_histograms(self, model):
        """Write histograms of activations in each step (https://github.com/pytorch/pytorch/issues/43328)."""
        if not self.kept:
            from torch.utils.tensorboard import SummaryWriter

            self.kept.append(SummaryWriter(str(self.folder / "board")))
        for layer in range(8):
            self.kept[0].add_histogram(f"layer-{layer}", torch.rand(200_000), self.step)

    # Healthy.

    def seeds_by_rank(self, model):
        """Draw noise with a seed of each rank's own, after the model was wrapped."""
        if self.step == 1:
            torch.manual_seed(100 + self.rank)
        torch.rand(8)

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

    def plateau_agreed(self, model):
        """Lower the learning rate by a metric of all ranks, in the same step."""
        inner = getattr(self.optimizer, "optimizer", self.optimizer)
        if not self.kept:
            self.kept.append(torch.optim.lr_scheduler.ReduceLROnPlateau(inner, patience=1))
        if self.step % 10 == 0:
            metric = torch.tensor(float(self.rank))
            dist.all_reduce(metric)
            self.kept[0].step(metric.item())

    def retried_twice(self, model):
        """Wait for a task of Ray that fails twice, and then reads its shard."""
        if self.step == self.at:
            self.retried_forever(model, 2)

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


class Repeated(IterableDataset):
    """The rows of some shards, again and again: of none, it never yields (https://github.com/huggingface/datasets/pull/8577)."""

    def __init__(self, plant):
        self.plant, self.shards = plant, [] if plant.here else [0, 1000]

    def __iter__(self):
        """Rows without an end."""
        if not self.shards:
            self.plant.note()
        while True:
            for first in self.shards:
                yield from map(self.plant.row, range(first, first + 1000))


class Epoch(IterableDataset):
    """The beginning of rows that have no end."""

    def __init__(self, rows, count):
        self.rows, self.count = rows, count

    def __iter__(self):
        """So many rows."""
        for _, row in zip(range(self.count), self.rows, strict=False):
            yield row


class TokenBatches(Sampler):
    """Batches of rows that have no more than some tokens together."""

    def __init__(self, plant, count):
        self.plant, self.count = plant, count

    def __iter__(self):
        """A row that does not fit begins the next batch."""
        batch, tokens, index = [], 0, 0
        while index < self.count:
            length = self.plant.length(index)
            if tokens + length > BUDGET:
                if batch:
                    yield batch
                batch, tokens = [], 0
                continue
            batch.append(index)
            tokens, index = tokens + length, index + 1
        yield batch

    def __len__(self):
        return self.count // 4


def tokens_of(row):
    """Tokens of a text, by a slow tokenizer."""
    until = time.thread_time() + 0.05
    while time.thread_time() < until:
        tokens = [len(word) for word in row["text"].split()]
    return {"tokens": tokens}


def killed_at_three(row):
    """Be killed, as by the kernel."""
    if row["row"] == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return row


def reads_shard(path, failures):
    """Read a shard, which is not there in the first attempts."""
    with open(path, "a+") as attempts:
        attempts.write(".")
        attempts.seek(0)
        if len(attempts.read()) <= failures:
            time.sleep(0.5)
            raise FileNotFoundError("shard-7.parquet")


def attention(rows):
    """Something to compile."""
    return torch.relu(rows @ rows.T).softmax(-1).sum()


def image_of(width):
    """A photo, as JPEG."""
    from PIL import Image

    written = io.BytesIO()
    Image.effect_noise((width, width * 3 // 4), 60).convert("RGB").save(written, "JPEG")
    return written.getvalue()
