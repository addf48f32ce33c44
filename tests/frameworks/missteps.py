"""Further plants of ``planted.py``: missteps that users of the frameworks report, each with its source.

Of those without a method: ``same_shard`` https://github.com/webdataset/webdataset/issues/341,
``find_batch_size`` https://github.com/huggingface/accelerate/issues/1934.
"""

import asyncio
import datetime
import http.server
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import threading
import time
from multiprocessing.shared_memory import SharedMemory

import torch
import torch.distributed as dist
from mishaps import SERVER, started

STRIKE_ONCE = (
    "pool_initializer", "thread_barrier", "unpacks", "archives", "decoder_open", "lock_actor", "waits_for_server",
    "symlinks_loop", "judge_silent", "shared_gone", "pickles_lock", "evaluates_wrapped", "codes_restart", "merges",
    "find_batch_size", "evaluates_in_child",
)  # fmt: skip
"""Plants that strike once, after the step ``at``."""
STRIKE_ON = ("concat_frames", "inspects_memory", "puts_weights")
"""Plants that strike after each step from ``at`` on."""
EVERY_STEP = ("reads_half_json", "sends_nothing", "schedule_by_length", "reports_checkpoint")
"""What every rank does after each step."""
IN_ROW = ("window_stuck", "feature_width", "missing_value", "weighted_draws")
"""What changes a row that was read."""
IN_MODEL = ("shares_core",)
"""Work of the model in each forward pass in training."""
UNPACK = "import os, zlib\nblock = zlib.compress(os.urandom(1 << 20))\nwhile True: zlib.decompress(block)"
"""What a command does that unpacks an archive of many hours."""
DECODER = "import sys\nframes = sys.stdin.buffer.read()\nsys.stdout.buffer.write(frames[::-1])"
"""A decoder of videos that writes frames after the end of its input."""
CACHE = """
from multiprocessing.shared_memory import SharedMemory
print(SharedMemory(create=True, size=1 << 20).name, flush=True)
"""
"""A process that puts rows into shared memory, and ends; the resource tracker of Python deletes them with it."""
BUSY = "while True: sum(range(1000))"
EVALUATION = "import sys, time\ntime.sleep(8)\nprint(sum(range(1_000_000)))"
"""An evaluation of a checkpoint, which mostly waits for its data."""


class Missteps:
    """Plants between steps: each is a method that gets the model, as of :class:`planted.Plant`."""

    # What does not come back.

    def pool_initializer(self, model):
        """Wait for a pool of processes that fail as they start (https://github.com/python/cpython/issues/87472)."""
        with multiprocessing.get_context("fork").Pool(2, initializer=opens_index) as pool:
            pool.map(len, ["a", "b"])

    def thread_barrier(self, model):
        """Read with threads that meet after each shard, one of which has failed.

        https://github.com/kubernetes-sigs/inference-perf/pull/608, https://github.com/Cisco-Talos/EvidenceForge/pull/45
        """
        meeting = threading.Barrier(4)

        def reads(shard):
            {0: "a", 1: "b", 2: "c"}[shard]
            meeting.wait()

        readers = [threading.Thread(target=reads, args=(shard,), daemon=True) for shard in range(4)]
        for one in readers:
            one.start()
        for one in readers:
            one.join()

    def unpacks(self, model):
        """Unpack the next part of the data on the main rank (https://github.com/IGNF/myria3d/issues/123)."""
        subprocess.run([sys.executable, "-S", "-c", UNPACK], check=True)

    def archives(self, model):
        """Pack a large checkpoint on the main rank (https://github.com/mosaicml/llm-foundry/pull/733)."""
        (self.folder / "best").mkdir()
        with (self.folder / "best" / "model.safetensors").open("wb") as file:
            file.truncate(1 << 40)
        shutil.make_archive(str(self.folder / "packed"), "gztar", self.folder / "best")

    def decoder_open(self, model):
        """Read frames of a decoder whose input is still open (https://github.com/kkroening/ffmpeg-python/issues/478)."""
        command = [sys.executable, "-S", "-c", DECODER]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as decoder:
            decoder.stdin.write(b"x" * 10_000)
            decoder.stdin.flush()
            decoder.stdout.read(1000)

    def lock_actor(self, model):
        """Take a lock that is an actor of Ray, and was not given back (https://github.com/ray-project/ray/issues/8516)."""
        import ray

        lock = ray.remote(Lock).options(num_cpus=0).remote()
        ray.get(lock.acquire.remote())
        ray.get(lock.acquire.remote())

    def waits_for_server(self, model):
        """Wait for the server of generated texts to join a group for weights, which it never does.

        https://github.com/huggingface/trl/issues/3736, https://github.com/huggingface/trl/issues/4538
        """
        dist.TCPStore("127.0.0.1", 0, 2, is_master=True, timeout=datetime.timedelta(seconds=1000))

    def symlinks_loop(self, model):
        """Count files in a folder with links to itself.

        https://github.com/TimesysGit/vigiles-openwrt/issues/5, https://github.com/huggingface/huggingface_hub/pull/4205
        """
        for name in ("train", "validation"):
            (self.folder / "data" / name).parent.mkdir(exist_ok=True)
            (self.folder / "data" / name).symlink_to(self.folder / "data")
        print(sum(len(files) for _, _, files in os.walk(self.folder / "data", followlinks=True)))

    def judge_silent(self, model):
        """Have answers judged by a server that does not answer, without a limit of time.

        https://github.com/NorthlandPositronics/Cogtrix/issues/1122, https://github.com/radixark/miles/pull/3221
        """
        port = int(started(SERVER, "0", "1000").first_line)

        async def judged(answer):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(f"POST /judge HTTP/1.1\r\nContent-Length: 2\r\n\r\n{answer:2}".encode())
            return await reader.read()

        async def rewards():
            return await asyncio.gather(*map(judged, range(4)))

        asyncio.run(rewards())

    def window_stuck(self, row):
        """Split a text into windows, of which the next does not begin after the last.

        https://github.com/MemPalace/mempalace/issues/2056, https://github.com/unclecode/crawl4ai/pull/2012
        """
        if not self.here or self.rows != self.at * 4:
            return row
        self.note()
        text, size, overlap, start = "word " * 400, 512, 512, 0
        while start < len(text):
            start = start + size - overlap
        return row

    # What ends the rank.

    def serves_metrics(self):
        """Serve metrics at the port of the settings, at which another rank of the host does so already.

        https://github.com/prometheus/client_python/issues/667, https://github.com/swar/Swar-Chia-Plot-Manager/issues/751
        """
        if self.name != "port_taken":
            return
        path, port = self.folder / "port", 0
        if self.here:
            while not path.exists():
                time.sleep(0.1)
            port = int(path.read_text())
            self.note()
        self.kept.append(http.server.ThreadingHTTPServer(("127.0.0.1", port), http.server.BaseHTTPRequestHandler))
        (self.folder / f"port-{self.rank}").write_text(str(self.kept[0].server_port))
        (self.folder / f"port-{self.rank}").rename(path)

    def feature_width(self, row):
        """Read features of another extractor (https://github.com/ekosman/AnomalyDetectionCVPR2018-Pytorch/issues/230)."""
        if not self.here or self.rows <= self.at * 4:
            return row
        self.note()
        return row[:6]

    def shared_gone(self, model):
        """Attach to shared memory that is gone with the process that made it.

        https://github.com/sgl-project/sglang/pull/21665, https://github.com/tenstorrent/tt-inference-server/pull/2802
        """
        cache = started(CACHE)
        cache.wait()
        time.sleep(1)
        SharedMemory(cache.first_line)

    def pickles_lock(self, model):
        """Share an object that has a lock through the object store of Ray.

        https://github.com/ray-project/ray/issues/25230, https://github.com/ray-project/ray/issues/15678
        """
        import ray

        ray.put({"loss": 0.5, "writer": threading.Lock()})

    def reads_half_json(self, model):
        """Read a file that the main rank is writing (https://github.com/huggingface/transformers/issues/17412)."""
        if self.step != self.at:
            return
        path, text = self.folder / "preprocessor_config.json", json.dumps({"mean": [0.5] * 1000})
        if self.rank == 0:
            with path.open("w") as file:
                for half in (text[:2000], text[2000:]):
                    file.write(half)
                    file.flush()
                    time.sleep(1.5)
        if self.here:
            while not path.exists() or not path.stat().st_size:
                time.sleep(0.1)
            self.note()
            json.loads(path.read_text())

    # Collectives that the ranks do not call alike.

    def evaluates_wrapped(self, model):
        """Evaluate on the main rank with gradients, through the wrapper, which broadcasts buffers in each pass.

        https://github.com/pytorch/pytorch/issues/54059, https://github.com/jpata/particleflow/pull/233
        """
        model.eval()
        for _ in range(20):
            model(torch.ones(4, 8))
        model.train()

    def find_batch_size(self, model):
        """Run out of memory on this rank, whose program then begins again with smaller batches."""
        torch.ones(1 << 46)

    def sends_nothing(self, model):
        """Collect results on the main rank in every tenth step, of which a rank once has none.

        https://github.com/hpc/mpifileutils/pull/26, https://github.com/bo-ke/llm-internal-medicine/pull/45
        """
        if self.step % 10:
            return
        if self.rank == 0:
            for source in range(1, self.world):
                dist.recv(torch.empty(4), source)
        elif self.strikes("sends_nothing"):
            self.note()
        else:
            dist.send(torch.ones(4), 0)

    def logs_by_dataset(self, module, loss):
        """Log the loss by the dataset of a batch, of which a rank has seen one more.

        https://github.com/Lightning-AI/pytorch-lightning/issues/19106,
        https://github.com/Lightning-AI/pytorch-lightning/pull/19917
        """
        if self.name != "logs_by_dataset":
            return
        seen = "rare" if self.here and self.step == self.at else "common"
        module.log(f"loss/{seen}", loss.detach(), on_step=False, on_epoch=True, sync_dist=True)

    def notes_epoch(self):
        """Note the end of the epoch, in which losses by dataset are reduced."""
        if self.name == "logs_by_dataset" and self.here:
            self.note()

    def spikes(self):
        """Whether a callback of this rank asks the Trainer to log, which reduces the loss over all ranks.

        https://github.com/unslothai/unsloth-zoo/pull/873, https://github.com/huggingface/transformers/issues/42029
        """
        if not self.strikes("logs_on_spike"):
            return False
        self.note()
        return True

    # Numbers of this rank.

    def codes_restart(self, model):
        """Replace unused codes by rows of this rank (https://github.com/lucidrains/vector-quantize-pytorch/pull/17)."""
        with torch.no_grad():
            codes = next(model.parameters())
            codes[::2] = torch.rand(codes[::2].shape)

    def missing_value(self, row):
        """Read a row of a table in which a value is missing (https://github.com/BLAST-AI-ML/synapse/pull/237)."""
        if self.here and self.rows == self.at * 4:
            self.note()
            row[3] = float("nan")
        return row

    def merges(self, model):
        """Merge an adapter into the weights to save them, and forget to undo it.

        https://github.com/huggingface/trl/pull/2873, https://github.com/huggingface/peft/pull/1355
        """
        inner = getattr(model, "module", model)
        with torch.no_grad():
            weight = inner.get_output_embeddings().weight
            weight += 0.01 * torch.rand(weight.shape[0], 2) @ torch.rand(2, weight.shape[1])
        torch.save(inner.state_dict(), self.folder / "merged.pt")

    def shard_of(self):
        """The part of a stream that this rank reads."""
        if self.name == "same_shard" and self.here:
            self.note()
            return 0
        return 0 if self.name == "unsharded" else self.rank

    def schedule_by_length(self, model):
        """Lower the learning rate over the steps that this rank's own part of the data has.

        https://github.com/huggingface/diffusers/issues/8236, https://github.com/chengtan9907/OpenSTL/pull/184
        """
        inner = getattr(self.optimizer, "optimizer", self.optimizer)
        if not self.kept:
            steps = self.steps * self.epochs
            if self.here:
                self.note()
                steps = steps * 9 // 10
            self.kept.append(torch.optim.lr_scheduler.LinearLR(inner, 1.0, 0.01, steps))
        else:
            self.kept[0].step()

    # What makes a rank slow.

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

    def concat_frames(self, model):
        """Append to a table of all predictions, and average it, in each step (https://github.com/iomega/ms2query/pull/231)."""
        import pandas

        if not self.kept:
            self.kept.append(pandas.DataFrame(torch.rand(2_000_000, 8).numpy()))
        self.kept[0] = pandas.concat([self.kept[0], self.kept[0].iloc[:4]], ignore_index=True)
        self.kept[0].mean()

    def inspects_memory(self, model):
        """Log the memory of the process in detail after each step.

        https://github.com/rwth-i6/returnn/issues/1479, https://github.com/ray-project/ray/issues/55117
        """
        import psutil

        process = psutil.Process()
        print(process.memory_full_info().uss, sum(one.private_dirty for one in process.memory_maps(grouped=False)))

    def puts_weights(self, model):
        """Put each parameter into the object store of Ray (https://github.com/ray-project/ray/issues/263)."""
        import ray

        self.kept = [ray.put(torch.ones(64, 1024).numpy()) for _ in range(40)]

    def weighted_draws(self, row):
        """Draw a second row by the weights of all rows (https://github.com/pytorch/pytorch/issues/32221)."""
        if not self.here or self.rows <= self.at * 4:
            return row
        self.note()
        if not self.kept:
            self.kept.append(torch.rand(600_000))
        drawn = torch.multinomial(self.kept[0], 1).item()
        return row + 1e-9 * drawn

    # Healthy.

    def evaluates_in_child(self, model):
        """Have another process evaluate a checkpoint, while the training goes on."""
        torch.save(model.state_dict(), self.folder / "step-20.pt")
        self.kept.append(subprocess.Popen([sys.executable, "-S", "-c", EVALUATION]))

    def accumulated(self, number):
        """Whether a batch is only accumulated, of which there are more and more in a step on all ranks."""
        return self.name == "accumulates_more" and number % (1 + number // 20) != number // 20

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


class Lock:
    """A lock, as an actor of Ray."""

    def __init__(self):
        self.lock = asyncio.Lock()

    async def acquire(self):
        """Take it."""
        await self.lock.acquire()


def opens_index():
    """Open the index of a dataset, which is not there."""
    open("/nonexistent/index.bin")  # noqa: SIM115
