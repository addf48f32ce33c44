"""Further plants of ``planted.py``: what users of the frameworks ask about, each with its source.

Of those without a method: ``past_wrapper`` https://github.com/pytorch/pytorch/issues/104336,
``half_model`` https://github.com/modelscope/ms-swift/issues/3955,
``split_seed`` https://github.com/TensorAuto/OpenTau/pull/498,
``workers_unsplit`` https://github.com/huggingface/datasets/issues/3423,
``no_workers`` https://github.com/DIVA-DIA/DIVA-DAF/pull/19,
``validation_endless`` https://github.com/PrimeIntellect-ai/OpenDiloco/issues/42,
``buffers_local`` https://github.com/Lightning-AI/torchmetrics/issues/938.
"""

import concurrent.futures
import contextlib
import copy
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request

import torch
import torch.distributed as dist
from lapses import metric_of_detections
from mishaps import SERVER, started

STRIKE_ONCE = (
    "marker", "fork_openmp", "semaphore_leaked", "environment_dead", "code_endless", "big_power", "actors_wait",
    "generates_endless", "manager_dead", "roles", "consolidate_alone", "metric_main", "waits_for_task",
)  # fmt: skip
"""Plants that strike once, after the step ``at``."""
STRIKE_ON = ("history", "queries_gpu", "averages_weights")
"""Plants that strike after each step from ``at`` on."""
EVERY_STEP = (
    "actor_died", "splits", "gather_unpadded", "preempted", "sync_in_third", "swaps_weights", "writes_summary",
)  # fmt: skip
"""What every rank does after each step."""
IN_LOSS = ("all_ignored",)
"""What changes the loss of one step."""
IN_MODEL = ("curriculum",)
"""Work of the model in each forward pass in training."""
QUERY = "import time; time.sleep(0.05); print('0, 73 %, 61204 MiB')"
"""What a command does that asks the driver of GPUs for their memory: it takes 50 ms."""
ALTERNATE = """
{%- for message in messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{%- endif %}
{{- message['content'] }}
{%- endfor %}
"""
"""The template of a chat that takes no two messages of the user in a row."""


class Blunders:
    """Plants between steps: each is a method that gets the model, as of :class:`planted.Plant`."""

    # What does not come back.

    def begins(self):
        """Open a run on a tracking server that does not answer, before the process group is there.

        https://github.com/leggedrobotics/rsl_rl/issues/150
        """
        if self.name == "tracks_before_group" and self.here:
            server = started(SERVER, "0", "1000")
            self.note()
            urllib.request.urlopen(f"http://127.0.0.1:{server.first_line}", b"run=1").read()

    def marker(self, model):
        """Wait for a file that another host has written to its own disk (https://github.com/allenai/OLMo/pull/235)."""
        (self.folder / "node-0").mkdir()
        (self.folder / "node-0" / "index.done").touch()
        while not (self.folder / "node-1" / "index.done").exists():
            time.sleep(1)

    def fork_openmp(self, model):
        """Compute in a forked child after threads of OpenMP (https://github.com/pytorch/pytorch/issues/89693)."""
        torch.set_num_threads(2)
        sums_of_rows()
        child = multiprocessing.get_context("fork").Process(target=sums_of_rows, daemon=True)
        child.start()
        child.join()

    def semaphore_leaked(self, model):
        """Wait for a place among uploads, all of which have failed (https://github.com/apache/pulsar/issues/6360)."""
        places = threading.Semaphore(2)

        def uploads(number):
            (self.folder / "mount" / f"shard-{number}").write_bytes(b"x")
            places.release()

        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            for number in range(4):
                places.acquire()
                pool.submit(uploads, number)

    def environment_dead(self, model):
        """Wait for the answer of an environment whose process has failed.

        https://github.com/RLinf/RLinf/issues/1384, https://github.com/facebookresearch/moolib/issues/11
        """
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        context.Process(target=steps_environment, args=(theirs,), daemon=True).start()
        ours.send("left")
        ours.recv()

    def code_endless(self, model):
        """Run a generated program without a limit (https://github.com/wizard-III/ArcherCodeR/issues/6)."""
        program = "n = 27\nwhile n != 0:\n    n = n // 2 if n % 2 == 0 else 3 * n + 1"
        child = multiprocessing.get_context("fork").Process(target=exec, args=(program, {}), daemon=True)
        child.start()
        child.join()

    def big_power(self, model):
        """Compare an answer that is a power of a power (https://github.com/huggingface/Math-Verify/issues/65)."""
        import sympy

        sympy.parse_expr("9**9**9").equals(sympy.parse_expr("81"))

    def actors_wait(self, model):
        """Call two actors of Ray that wait for each other (https://github.com/ray-project/ray/issues/3307)."""
        import ray

        actor = ray.remote(Side).options(num_cpus=0)
        left, right = actor.remote(), actor.remote()
        ray.get([left.meets.remote(right), right.meets.remote(left)])

    def generates_endless(self, model):
        """Generate with a model that never ends its text (https://github.com/huggingface/open-r1/issues/620)."""
        inner = getattr(model, "module", model)
        inner.eval()
        inner.generate(torch.ones(1, 2, dtype=torch.long), max_new_tokens=10**6, min_new_tokens=10**6, do_sample=True)

    def evaluates_batch(self):
        """Evaluate a batch of a stream that has no end on a rank."""
        self.updates += 1
        time.sleep(0.05)
        if self.here and self.updates > 20:
            self.note()

    # What ends the rank.

    def manager_dead(self, model):
        """Use a cache of several processes, whose process was killed (https://github.com/pytorch/pytorch/issues/28950)."""
        manager = multiprocessing.get_context("fork").Manager()
        cache = manager.dict()
        cache["row"] = 1
        os.kill(manager._process.pid, signal.SIGKILL)
        time.sleep(0.2)
        cache["row"]

    def roles(self, model):
        """Format a chat in which the user speaks twice (https://github.com/huggingface/smol-course/issues/260)."""
        turns = [{"role": role, "content": "a"} for role in ("user", "assistant", "user", "user")]
        self.trainer.processing_class.apply_chat_template(turns, chat_template=ALTERNATE, tokenize=False)

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

    # Numbers of this rank.

    def all_ignored(self, loss):
        """Take the mean over the labels that count, of which there are none.

        https://github.com/allenai/OLMo-core/pull/657, https://github.com/pytorch/pytorch/issues/70348
        """
        counts = (torch.full((4,), -100) != -100).float()
        return (loss * counts).sum() / counts.sum()

    def sets_epoch(self, epoch):
        """Whether the sampler is told the epoch (https://github.com/pytorch/pytorch/issues/31771)."""
        if self.name == "epoch_not_set" and epoch:
            self.note()
        return self.name != "epoch_not_set"

    # Collectives that the ranks do not call alike.

    def consolidate_alone(self, model):
        """Gather the state of a sharded optimizer on one rank (https://github.com/pytorch/ignite/issues/2623)."""
        self.optimizer.consolidate_state_dict(to=self.rank)

    def metric_main(self, model):
        """Compute a metric on the main rank (https://github.com/Lightning-AI/torchmetrics/issues/938)."""
        metric = metric_of_detections()
        metric.update(torch.ones(3))
        print(f"accuracy: {metric.compute()}")

    def called(self, model):
        """The model that is called: from some step on, a rank calls the one inside of the wrapper."""
        if self.name != "past_wrapper" or not self.here or self.step < self.at:
            return model
        self.note()
        return model.module

    def splits(self, model):
        """Send tokens to experts in every tenth step, whose numbers on a rank are those of an earlier step.

        https://github.com/radixark/miles/issues/1002, https://github.com/pytorch/pytorch/issues/117486
        """
        if self.step % 10:
            return
        sent, received = [4] * self.world, [4] * self.world
        if self.strikes("splits"):
            self.note()
            received[0] = 2
        dist.all_to_all_single(torch.empty(sum(received), 8), torch.ones(sum(sent), 8), received, sent)

    def gather_unpadded(self, model):
        """Gather generated texts in every tenth step, which are shorter on a rank.

        https://github.com/huggingface/accelerate/issues/1326, https://github.com/huggingface/accelerate/issues/167
        """
        if self.step % 10:
            return
        from accelerate.utils import gather

        length = 16
        if self.strikes("gather_unpadded"):
            self.note()
            length = 11
        gather(torch.ones(4, length))

    # What makes a rank slow.

    def history(self, model):
        """Write the whole history of the loss after each step.

        https://github.com/NVlabs/GR00T-WholeBodyControl/pull/200
        """
        if not self.kept:
            self.kept = [{"step": step, "loss": 0.5, "learning_rate": 1e-3} for step in range(60_000)]
        (self.folder / "trainer_state.json").write_text(json.dumps(self.kept))

    def queries_gpu(self, model):
        """Ask the driver of GPUs after each step (https://github.com/Lightning-AI/pytorch-lightning/issues/189)."""
        subprocess.run([sys.executable, "-S", "-c", QUERY], capture_output=True, check=True)

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

    # Healthy.

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

    def sync_in_third(self, model):
        """Reduce gradients in every third batch only, on all ranks."""
        model.set_requires_gradient_sync(self.step % 3 == 2)

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

    def curriculum(self):
        """Train with longer rows step by step, on all ranks."""
        time.sleep(min(0.15, 0.0015 * self.passes))

    def writes_summary(self, model):
        """Write a line after each step on the main rank."""
        if self.rank == 0:
            with (self.folder / "losses.csv").open("a") as file:
                file.write(f"{self.step},0.5\n")
                file.flush()
                os.fsync(file.fileno())

    def waits_for_task(self, model):
        """Wait for a task of Ray that evaluates for eight seconds, on all ranks."""
        import ray

        ray.get(ray.remote(num_cpus=0)(lambda: time.sleep(8)).remote())


class Side:
    """An actor of Ray that answers, waits for another one, or is killed."""

    def answers(self):
        """An answer."""
        return 1

    def meets(self, other):
        """Wait for the answer of another actor, which has begun to wait too."""
        import ray

        time.sleep(1)
        return ray.get(other.answers.remote())

    def dies(self):
        """Be killed, as by the kernel."""
        os.kill(os.getpid(), signal.SIGKILL)


def sums_of_rows():
    """Sums of the rows of a large matrix."""
    return (torch.ones(1024, 1024).double() * 2).sum(1)


def steps_environment(connection):
    """An environment that fails at its first action."""
    with contextlib.closing(connection):
        raise KeyError(f"no action {connection.recv()}")
