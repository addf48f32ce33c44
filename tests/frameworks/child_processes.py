"""Plants of ``planted.py``: ranks that wait for processes that they started, and for tasks and actors of Ray."""

import asyncio
import concurrent.futures
import contextlib
import multiprocessing
import os
import random
import select
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from multiprocessing.connection import Listener
from multiprocessing.shared_memory import SharedMemory

import torch
from moments import LONG, every_step, in_row, once
from shared_helpers import Scorer, Side, scores_shortly, started
from torch.utils.data import get_worker_info

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
DECODER = "import sys\nframes = sys.stdin.buffer.read()\nsys.stdout.buffer.write(frames[::-1])"
"""A decoder of videos that writes frames after the end of its input."""
DEBUGGER = """
import ctypes, os, sys, time
libc = ctypes.CDLL(None)
print(flush=True)
for thread in os.listdir(f"/proc/{sys.argv[1]}/task"):
    libc.ptrace(0x4206, int(thread), 0, 0)
    libc.ptrace(0x4207, int(thread), 0, 0)
time.sleep(1000)
"""
"""A debugger that stops all threads of a process (``PTRACE_SEIZE``, ``PTRACE_INTERRUPT``), and does not go on."""
COUNTS_TOKENS = """
import sys
for line in sys.stdin:
    print(len(line.split()))
"""
"""A command that answers each line, and does not flush what it writes to a pipe."""
ASKS = "print(input('Password of the repository: '))"
"""What a command does that clones a repository, and finds no password."""
TWO_LINES = "import time\nprint('ready\\nloss 0.5', flush=True)\ntime.sleep(1000)"
"""An engine that writes two lines at once, and runs on."""


class ChildProcesses:
    """Methods of :class:`planted.Plant`, which get the model unless they are called elsewhere."""

    @once
    def pipe_full(self, model):
        """Wait for a command that writes more than its pipe holds."""
        command = [sys.executable, "-S", "-c", "print('x' * 1_000_000)"]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
            child.wait()

    @once
    def pool(self, model):
        """Wait for a pool of processes whose workers were killed, as by the kernel."""
        with multiprocessing.Pool(2) as pool:
            pool.map(die, range(2))

    @once
    def grandchild(self, model):
        """Read what a command prints, whose output a process that it left behind keeps open."""
        subprocess.run("echo started; sleep 1000 &", shell=True, capture_output=True, check=True)

    @once
    def pending(self, model):
        """Wait for a task of Ray that needs more processors than there are."""
        import ray

        ray.get(ray.remote(num_cpus=64)(lambda: None).remote())

    @once
    def report_alone(self, model):
        """Report to Ray Train, which waits for the reports of all workers."""
        import ray.train

        ray.train.report({"loss": 0.5})

    @once
    def fork_lock(self, model):
        """Wait for a child that was forked while a thread held a lock, which it takes."""
        lock, taken = threading.Lock(), threading.Event()

        def logs():
            with lock:
                taken.set()
                time.sleep(1)

        threading.Thread(target=logs, daemon=True).start()
        taken.wait()
        child = os.fork()
        if not child:
            lock.acquire()
            os._exit(0)
        os.waitpid(child, 0)

    @once
    def queue_room(self, model):
        """Pass samples to a process that writes them, and has been killed."""
        samples = multiprocessing.Queue(2)
        writer = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,), daemon=True)
        writer.start()
        writer.kill()
        for number in range(10):
            samples.put(number)

    @once
    def join_before_get(self, model):
        """Wait for the end of a process before its result is taken (https://github.com/python/cpython/issues/73983)."""
        context = multiprocessing.get_context("fork")
        results = context.Queue()
        child = context.Process(target=results.put, args=(b"x" * (1 << 20),), daemon=True)
        child.start()
        child.join()
        results.get()

    @once
    def ray_queue(self, model):
        """Wait for what nobody puts into a queue of Ray (https://github.com/agentscope-ai/Trinity-RFT/issues/182)."""
        from ray.util.queue import Queue

        Queue(actor_options={"num_cpus": 0}).get()

    @once
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

    @once
    def fork_openmp(self, model):
        """Compute in a forked child after threads of OpenMP (https://github.com/pytorch/pytorch/issues/89693)."""
        torch.set_num_threads(2)
        sums_of_rows()
        child = multiprocessing.get_context("fork").Process(target=sums_of_rows, daemon=True)
        child.start()
        child.join()

    @once
    def environment_dead(self, model):
        """Wait for the answer of an environment whose process has failed.

        https://github.com/RLinf/RLinf/issues/1384, https://github.com/facebookresearch/moolib/issues/11
        """
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        context.Process(target=steps_environment, args=(theirs,), daemon=True).start()
        ours.send("left")
        ours.recv()

    @once
    def code_endless(self, model):
        """Run a generated program without a limit (https://github.com/wizard-III/ArcherCodeR/issues/6)."""
        program = "n = 27\nwhile n != 0:\n    n = n // 2 if n % 2 == 0 else 3 * n + 1"
        child = multiprocessing.get_context("fork").Process(target=exec, args=(program, {}), daemon=True)
        child.start()
        child.join()

    @once
    def actors_wait(self, model):
        """Call two actors of Ray that wait for each other (https://github.com/ray-project/ray/issues/3307)."""
        import ray

        actor = ray.remote(Side).options(num_cpus=0)
        left, right = actor.remote(), actor.remote()
        ray.get([left.meets.remote(right), right.meets.remote(left)])

    @once
    def retried_forever(self, model, failures=10**9):
        """Wait for a task of Ray that fails, and is tried again without a limit (https://github.com/ray-project/ray/pull/60104)."""
        import ray

        path = self.folder / f"attempts-{self.rank}"
        options = {"num_cpus": 0, "max_retries": -1, "retry_exceptions": True}
        ray.get(ray.remote(reads_shard).options(**options).remote(str(path), failures))

    @once
    def tokenizers_fork(self, model):
        """Tokenize in a forked child, after threads of the tokenizer (https://github.com/huggingface/tokenizers/issues/187)."""
        os.environ["TOKENIZERS_PARALLELISM"] = "true"
        encode = self.trainer.processing_class.backend_tokenizer.encode_batch
        encode(["abc"] * 100)
        child = multiprocessing.get_context("fork").Process(target=encode, args=(["abc"] * 100,), daemon=True)
        child.start()
        child.join()

    @once
    def pool_initializer(self, model):
        """Wait for a pool of processes that fail as they start (https://github.com/python/cpython/issues/87472)."""
        with multiprocessing.get_context("fork").Pool(2, initializer=opens_index) as pool:
            pool.map(len, ["a", "b"])

    @once
    def decoder_open(self, model):
        """Read frames of a decoder whose input is still open (https://github.com/kkroening/ffmpeg-python/issues/478)."""
        command = [sys.executable, "-S", "-c", DECODER]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as decoder:
            decoder.stdin.write(b"x" * 10_000)
            decoder.stdin.flush()
            decoder.stdout.read(1000)

    @once
    def lock_actor(self, model):
        """Take a lock that is an actor of Ray, and was not given back (https://github.com/ray-project/ray/issues/8516)."""
        import ray

        lock = ray.remote(Lock).options(num_cpus=0).remote()
        ray.get(lock.acquire.remote())
        ray.get(lock.acquire.remote())

    @once
    def blocks_loop(self, model):
        """Score in an actor of Ray that blocks its own event loop (https://github.com/ray-project/ray/issues/7197)."""
        import ray

        scorer = ray.remote(Scorer).options(num_cpus=0).remote()
        ray.get(scorer.score.remote(scorer))

    @once
    def killed_in_put(self, model):
        """Read what a process was writing as it was killed (https://github.com/birdnet-team/birdnet/issues/83)."""
        results = multiprocessing.get_context("fork").SimpleQueue()
        worker = multiprocessing.get_context("fork").Process(target=results.put, args=(bytes(1 << 22),))
        worker.start()
        time.sleep(1)
        worker.kill()
        worker.join()
        results.get()

    @once
    def debugger_attached(self, model):
        """Be stopped by a debugger that does not let it go on (https://github.com/benfred/py-spy/issues/390)."""
        started(DEBUGGER, str(os.getpid()))
        time.sleep(1000)

    @once
    def pool_unpickles(self, model):
        """Wait for a pool whose error can't be unpickled (https://github.com/python/cpython/issues/103061)."""
        with multiprocessing.get_context("fork").Pool(2) as pool:
            pool.map(label_of, range(4))

    @once
    def ring_full(self, model):
        """Write into a ring of shared memory until it is read by an engine that was killed.

        https://github.com/vllm-project/vllm-ascend/issues/9405
        """
        ring = SharedMemory(create=True, size=4)
        reader = multiprocessing.get_context("fork").Process(target=reads_slowly, args=(ring,), daemon=True)
        reader.start()
        reader.kill()
        reader.join()
        for number in range(100):
            while ring.buf[number % 4]:
                os.sched_yield()
            ring.buf[number % 4] = 1

    @once
    def placement_waits(self, model):
        """Wait for a placement group that fits on no node (https://github.com/ray-project/ray/issues/27287)."""
        import ray
        from ray.util import placement_group

        ray.get(placement_group([{"CPU": 64}]).ready())

    @once
    def lock_of_killed(self, model):
        """Write past a progress bar, whose lock a process had that was killed (https://github.com/tqdm/tqdm/issues/1500)."""
        from tqdm import tqdm

        tqdm.get_lock()
        taken = multiprocessing.get_context("fork").Event()
        worker = multiprocessing.get_context("fork").Process(target=takes_lock, args=(tqdm, taken), daemon=True)
        worker.start()
        taken.wait()
        worker.kill()
        worker.join()
        tqdm.write(f"loss of step {self.step}: 0.5")

    @once
    def sleeps_in_disk(self, model):
        """Start a command with an input on a disk that is gone, in a sleep that nothing interrupts.

        https://github.com/BVLC/caffe/issues/6020
        """
        shard = self.folder / "shard"
        os.mkfifo(shard)  # the child waits as it opens it, and until it has, this process is in the state D
        os.posix_spawn("/bin/true", ["true"], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 0, str(shard), os.O_RDONLY, 0)])

    @once
    def child_buffers(self, model):
        """Ask a command that keeps its answer in a buffer (https://github.com/denoland/deno/issues/22767)."""
        command = [sys.executable, "-S", "-c", COUNTS_TOKENS]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as tokenizer:
            tokenizer.stdin.write("a text of six words here\n")
            tokenizer.stdin.flush()
            print(tokenizer.stdout.readline())

    @once
    def accepts_never(self, model):
        """Accept the connection of a worker, which has failed before (https://github.com/marimo-team/marimo/pull/9289)."""
        worker = [sys.executable, "-S", "-c", "import engine_of_rollouts"]
        with Listener(("127.0.0.1", 0)) as listener, subprocess.Popen(worker):
            listener.accept().recv()

    @once
    def generator_paused(self, model):
        """Wait for the end of a generator of Ray that waits until its items are taken.

        https://github.com/ray-project/ray/pull/63791
        """
        import ray

        options = {"num_cpus": 0, "num_returns": "streaming", "_generator_backpressure_num_objects": 2}
        answers = ray.remote(ten_answers).options(**options).remote()
        ray.get(answers.completed())
        print(sum(ray.get(one) for one in answers))

    @once
    def splits_stream(self, model):
        """Read one part of a stream of Ray Data, which begins when all parts are read.

        https://github.com/ray-project/ray/issues/42008
        """
        import ray.data

        parts = ray.data.range(64).streaming_split(2, equal=True)
        print(sum(len(batch["id"]) for batch in parts[0].iter_batches(batch_size=4)))

    @once
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

    @in_row
    def worker_asks_main(self, row):
        """Ask the main process from a worker, for which the main process waits.

        https://github.com/meta-pytorch/data/issues/1169
        """
        if self.here and self.rows == self.at * 4 and get_worker_info() is not None:
            self.note()
            self.to_main.send(self.rows)
            return row * self.to_main.recv()
        return row

    @once
    def child_asks(self, model):
        """Clone code by a command that asks for a password at a terminal (https://github.com/ansible/ansible/issues/7720)."""
        self.kept.extend(os.openpty())
        subprocess.run([sys.executable, "-S", "-c", ASKS], stdin=self.kept[1], check=True)

    @once
    def pool_not_refilled(self, model):
        """Score in a process that ends after two texts, and is not replaced (https://github.com/python/cpython/issues/115634)."""
        with concurrent.futures.ProcessPoolExecutor(1, max_tasks_per_child=2) as pool:  # from Python 3.11 on
            print(sum(pool.map(scores_shortly, range(10))))

    @once
    def selects_buffered(self, model):
        """Wait for a line of an engine that was read into a buffer with the line before.

        https://github.com/Exa-Networks/exabgp/pull/1422
        """
        with subprocess.Popen([sys.executable, "-S", "-c", TWO_LINES], stdout=subprocess.PIPE) as engine:
            for _ in range(2):
                select.select([engine.stdout], [], [])
                print(engine.stdout.readline())

    @once
    def actor_elsewhere(self, model):
        """Look for an actor of Ray by its name, until it is found: it is in another namespace.

        https://github.com/ray-project/ray/issues/16380
        """
        import ray

        self.kept = [ray.remote(Side).options(name="judge", namespace="rewards", num_cpus=0).remote()]
        judge = None
        while judge is None:
            with contextlib.suppress(ValueError):
                judge = ray.get_actor("judge")
            time.sleep(0.5)
        print(ray.get(judge.answers.remote()))

    @once
    def restarts_forever(self, model):
        """Call an actor of Ray that dies in each call, and is restarted without a limit.

        https://github.com/ray-project/ray/issues/2635
        """
        import ray

        ray.get(ray.remote(Side).options(num_cpus=0, max_restarts=-1, max_task_retries=-1).remote().dies.remote())

    @once
    def processes_meet(self, model):
        """Wait until a process that was started is ready too, which has failed before.

        https://github.com/SemiAnalysisAI/InferenceX/pull/1102
        """
        context = multiprocessing.get_context("fork")
        ready = context.Barrier(2)
        context.Process(target=loads_scorer, args=(self.folder / "scorer.pt", ready), daemon=True).start()
        ready.wait()

    @once
    def keeps_pipe(self, model):
        """Read frames of a decoder, which has inherited the other end of its own input.

        https://github.com/Kludex/zuvloop/pull/6
        """
        reads, writes = os.pipe()
        os.set_inheritable(writes, True)
        with subprocess.Popen(
            [sys.executable, "-S", "-c", DECODER], stdin=reads, stdout=subprocess.PIPE, close_fds=False
        ) as decoder:
            os.write(writes, b"video")
            os.close(writes)
            print(decoder.stdout.read())

    @once
    def queue_full(self, model):
        """Put a third answer into a queue of Ray for two, from which nobody takes.

        https://github.com/ray-project/ray/pull/31303
        """
        from ray.util.queue import Queue

        answers = Queue(2, actor_options={"num_cpus": 0})
        for answer in range(3):
            answers.put(answer)

    @every_step
    def prefix_drawn(self, model):
        """Attach to an index in shared memory of a name that all ranks draw, of which a rank draws another one.

        https://github.com/mosaicml/streaming/issues/145
        """
        if self.step != self.at:
            return
        draws = random.Random(f"{self.folder} {self.here}")
        if self.here:
            self.note()
        name = f"{draws.randrange(10**9):09}_index"
        if self.rank == 0:
            self.kept.append(SharedMemory(name, create=True, size=64))
        while len(self.kept) < 1:
            with contextlib.suppress(FileNotFoundError):
                self.kept.append(SharedMemory(name))
            time.sleep(0.1)

    @once
    def sigstop(self, model):
        """Be stopped by a signal."""
        os.kill(os.getpid(), signal.SIGSTOP)

    @once
    def child(self, model):
        """Wait for a command that does not end."""
        subprocess.run(["sleep", str(int(LONG))], check=True)


def die(number):
    """Be killed."""
    os.kill(os.getpid(), signal.SIGKILL)


def sums_of_rows():
    """Sums of the rows of a large matrix."""
    return (torch.ones(1024, 1024).double() * 2).sum(1)


def steps_environment(connection):
    """An environment that fails at its first action."""
    with contextlib.closing(connection):
        raise KeyError(f"no action {connection.recv()}")


def reads_shard(path, failures):
    """Read a shard, which is not there in the first attempts."""
    with open(path, "a+") as attempts:
        attempts.write(".")
        attempts.seek(0)
        if len(attempts.read()) <= failures:
            time.sleep(0.5)
            raise FileNotFoundError("shard-7.parquet")


def opens_index():
    """Open the index of a dataset, which is not there."""
    open("/nonexistent/index.bin")  # noqa: SIM115


class Lock:
    """A lock, as an actor of Ray."""

    def __init__(self):
        self.lock = asyncio.Lock()

    async def acquire(self):
        """Take it."""
        await self.lock.acquire()


def label_of(row):
    """The label of a row, which has none."""
    raise LabelError(row, "it has no label")


class LabelError(Exception):
    """A row without a label; pickle makes it with one argument, and fails."""

    def __init__(self, row, reason):
        super().__init__(f"row {row}: {reason}")


def reads_slowly(ring):
    """Read a ring of shared memory, from a second on."""
    while True:
        time.sleep(1)
        ring.buf[:] = bytes(4)


def takes_lock(bar, taken):
    """Take the lock of progress bars, as a process that writes its own."""
    bar.get_lock().acquire()
    taken.set()
    time.sleep(1000)


def loads_scorer(path, ready):
    """Load a scorer, which is not there, and report that it is ready."""
    torch.load(path)
    ready.wait()


def ten_answers():
    """Answers, one after the other."""
    for number in range(10):
        yield number / 10


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
