"""Plants of ``planted.py``: ranks in loops that do not end, and in waits for their own threads and locks."""

import asyncio
import concurrent.futures
import contextlib
import ctypes
import difflib
import gc
import itertools
import logging
import os
import queue
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import Future

import torch
from moments import LONG, in_row, once
from sampled_data import BUDGET
from shared_helpers import started

CYCLE = """
import threading
reader = threading.Thread(target=lambda: __import__("labels").NAMES)
reader.start()
reader.join()
NAMES = ["cat", "dog"]
"""
"""A module whose import waits for a thread that imports it."""
UNPACK = "import os, zlib\nblock = zlib.compress(os.urandom(1 << 20))\nwhile True: zlib.decompress(block)"
"""What a command does that unpacks an archive of many hours."""
SIGNALS = "import os, signal, sys; os.kill(int(sys.argv[1]), signal.SIGUSR1); print(flush=True)"
"""A scheduler that tells a process by a signal that it may go on."""


class LoopsAndLocks:
    """Methods of :class:`planted.Plant`, which get the model unless they are called elsewhere."""

    @once
    def async_save(self, model):
        """Wait for a thread whose write of the last checkpoint is stuck."""
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            pool.submit(self.checkpoint_stuck, model).result()

    @once
    def handler(self, model):
        """Get a signal whose handler waits for a save that never ends."""
        signal.signal(signal.SIGUSR1, lambda *_: threading.Event().wait())
        os.kill(os.getpid(), signal.SIGUSR1)

    @once
    def lock_order(self, model):
        """Take two locks in the order opposite to that of a thread that reads data."""
        cache, index, taken = threading.Lock(), threading.Lock(), threading.Event()

        def reads():
            with index:
                taken.set()
                time.sleep(0.2)
                with cache:
                    pass

        with cache:
            threading.Thread(target=reads, daemon=True).start()
            taken.wait()
            with index:
                pass

    @once
    def event_loop(self, model):
        """Wait inside an event loop for what only this loop can do."""

        async def uploads():
            return asyncio.run_coroutine_threadsafe(asyncio.sleep(0), asyncio.get_running_loop()).result()

        asyncio.run(uploads())

    @once
    def starved(self, model):
        """Wait in the only thread of a pool for another task of this pool."""
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            pool.submit(lambda: pool.submit(os.getpid).result()).result()

    @once
    def import_lock(self, model):
        """Import a module that waits for a thread, which imports it too."""
        (self.folder / "labels.py").write_text(CYCLE)
        sys.path.insert(0, str(self.folder))
        __import__("labels")

    @once
    def backtracking(self, model):
        """Match a text with an expression that backtracks (https://github.com/NVIDIA-NeMo/Guardrails/pull/2271)."""
        re.fullmatch(r"(\w+\s?)+:", "a" * 60)

    @once
    def undead(self, model):
        """Fail while a thread keeps the process alive (https://github.com/mlc-ai/pith-train/pull/31)."""
        threading.Thread(target=time.sleep, args=(LONG,)).start()
        raise RuntimeError("the shard has another number of rows than its index")

    @once
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

    @once
    def converges_never(self, model):
        """Normalize a matrix with a NaN until it converges (https://github.com/mmgalushka/hungarian-loss/issues/5)."""
        plan = torch.rand(64, 64)
        plan[0, 0] = float("nan")
        while not (plan.sum(0) - 1).abs().max() < 1e-4:
            plan = plan / plan.sum(1, keepdim=True)
            plan = plan / plan.sum(0)

    @once
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

    @once
    def big_power(self, model):
        """Compare an answer that is a power of a power (https://github.com/huggingface/Math-Verify/issues/65)."""
        import sympy

        sympy.parse_expr("9**9**9").equals(sympy.parse_expr("81"))

    @once
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

    @once
    def dedups(self, model):
        """Drop duplicates by a search in a list (https://github.com/motional/nuplan-devkit/issues/253)."""
        rows = []
        for number in range(10_000_000):
            if f"row {number}" not in rows:
                rows.append(f"row {number}")

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

    @once
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

    @once
    def unpacks(self, model):
        """Unpack the next part of the data on the main rank (https://github.com/IGNF/myria3d/issues/123)."""
        subprocess.run([sys.executable, "-S", "-c", UNPACK], check=True)

    @once
    def archives(self, model):
        """Pack a large checkpoint on the main rank (https://github.com/mosaicml/llm-foundry/pull/733)."""
        (self.folder / "best").mkdir()
        with (self.folder / "best" / "model.safetensors").open("wb") as file:
            file.truncate(1 << 40)
        shutil.make_archive(str(self.folder / "packed"), "gztar", self.folder / "best")

    @once
    def symlinks_loop(self, model):
        """Count files in a folder with links to itself.

        https://github.com/TimesysGit/vigiles-openwrt/issues/5, https://github.com/huggingface/huggingface_hub/pull/4205
        """
        for name in ("train", "validation"):
            (self.folder / "data" / name).parent.mkdir(exist_ok=True)
            (self.folder / "data" / name).symlink_to(self.folder / "data")
        print(sum(len(files) for _, _, files in os.walk(self.folder / "data", followlinks=True)))

    @in_row
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

    @once
    def finalizer_locks(self, model):
        """Collect garbage under a lock that a finalizer takes (https://github.com/getsentry/sentry-python/issues/803)."""
        lock = threading.Lock()
        for _ in range(10):
            Event(lock)
        with lock:
            print(len([[number] for number in range(1_000_000)]), gc.get_count())

    @once
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

    @once
    def timeout_in_vain(self, model):
        """Give up a judge after two seconds, whose thread the event loop waits for at its end.

        https://github.com/python/cpython/issues/82448
        """

        async def score():
            try:
                return await asyncio.wait_for(asyncio.to_thread(asks_silent), 2)
            except asyncio.TimeoutError:
                return 0.0

        print(asyncio.run(score()))

    @once
    def matches_texts(self, model):
        """Compare two long texts that repeat themselves (https://github.com/python/cpython/issues/107578)."""
        print(difflib.SequenceMatcher(None, "the cat " * 20_000, "a cat the " * 20_000, autojunk=False).ratio())

    @once
    def wakeup_lost(self, model):
        """Wait for the notice of a thread that came before (https://github.com/pytorch/pytorch/pull/1140)."""
        ready = threading.Condition()

        def reads():
            with ready:
                ready.notify_all()

        threading.Thread(target=reads, daemon=True).start()
        time.sleep(0.5)
        with ready:
            ready.wait()

    @once
    def handler_logs(self, model):
        """Ship a log record in a thread, whose client logs too (https://github.com/logtail/logtail-python/pull/37)."""
        logger = logging.getLogger("shipped")
        logger.setLevel(logging.DEBUG)
        logger.addHandler(Shipping())
        logger.info("loss of step %d: 0.5", self.step)

    @once
    def loop_stopped(self, model):
        """Wait for what was given to an event loop that has stopped (https://github.com/zigpy/bellows/issues/745)."""
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, daemon=True)
        thread.start()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        print(asyncio.run_coroutine_threadsafe(asyncio.sleep(0.1, 1.0), loop).result())

    @once
    def enumerates_paths(self, model):
        """Count all paths through a graph (https://github.com/networkx/networkx/issues/2975)."""
        import networkx

        graph = networkx.complete_graph(30)
        print(sum(1 for _ in networkx.all_simple_paths(graph, 0, 29)))

    @once
    def permutes_speakers(self, model):
        """Compare all orders of the speakers of a long recording (https://github.com/sigsep/bsseval/issues/5)."""
        costs = torch.rand(14, 14, generator=torch.Generator().manual_seed(3)).tolist()
        orders = itertools.permutations(range(14))
        print(min(sum(costs[number][one] for number, one in enumerate(order)) for order in orders))

    @once
    def future_unset(self, model):
        """Wait for an answer whose thread has failed (https://github.com/rohanpm/more-executors/issues/114)."""
        answer = Future()
        threading.Thread(target=reads_answer, args=({}, answer), daemon=True).start()
        print(answer.result())

    @once
    def lock_reentered(self, model):
        """Take a lock of asyncio twice in one task (https://github.com/python/asyncio/issues/439)."""
        asyncio.run(scores_exclusively(asyncio.Lock()))

    @once
    def sigwait_missed(self, model):
        """Wait for a signal that a handler has taken before (https://github.com/gmr/rejected/issues/89)."""
        signal.signal(signal.SIGUSR1, lambda *_: print("the scheduler lets this rank go on"))
        started(SIGNALS, str(os.getpid())).wait()
        time.sleep(0.2)
        print(signal.sigwait({signal.SIGUSR1}))

    @in_row
    def reads_past_end(self, row):
        """Read the head of a file up to a line break, in a file that ends before it.

        https://github.com/python-pillow/Pillow/pull/1401
        """
        if not self.here or self.rows != self.at * 4:
            return row
        self.note()
        path, head = self.folder / f"image-{self.rank}.ppm", b""
        path.write_bytes(b"P6 64 64")
        with path.open("rb") as file:
            while not head.endswith(b"\n"):
                head += file.read(1)
        return row

    @once
    def follows_cycle(self, model):
        """Look for the first message of a chat, in which two messages answer each other.

        https://github.com/ai-dynamo/aiperf/pull/723
        """
        answers_to, first = {102: 101, 101: 100, 100: 101}, 102
        while first in answers_to:
            first = answers_to[first]
        print(f"the chat begins with {first}")

    @once
    def sets_from_thread(self, model):
        """Wait in an event loop for a result that a thread sets without a wakeup of the loop.

        https://github.com/pybind/pybind11/issues/3597
        """

        async def answered():
            answer = asyncio.get_running_loop().create_future()
            threading.Timer(0.5, answer.set_result, (1.0,)).start()
            return await answer

        print(asyncio.run(answered()))

    @once
    def upgrades_lock(self, model):
        """Write to a cache that this thread is reading (https://github.com/Abhigyan-Shekhar/Waggle-mcp/issues/67)."""
        lock = ReadWriteLock()
        with lock.read(), lock.write():
            self.kept.append("not in the cache yet")

    @once
    def swallows_cancel(self, model):
        """Ask a judge for two seconds, by a client that takes the end of this time for an error and asks again.

        https://github.com/python/cpython/pull/7216
        """
        asyncio.run(asyncio.wait_for(asks_again(), 2))

    @once
    def fast_forwards(self, model):
        """Read all batches of before to skip them, on a rank without the saved position of its data.

        https://github.com/huggingface/transformers/issues/11284
        """
        for number in range(660_000):
            torch.full((8,), float(number))
            time.sleep(0.005)

    @once
    def factors_answer(self, model):
        """Simplify an answer, whose large number is factored (https://github.com/huggingface/Math-Verify/issues/65)."""
        import sympy

        print(sympy.factorint(sympy.nextprime(10**34) * sympy.nextprime(3 * 10**36)))

    @once
    def lock(self, model):
        """Take a lock that a thread holds."""
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()

    @once
    def queue(self, model):
        """Wait for a thread that has ended."""
        import queue

        queue.Queue().get()

    @once
    def retry(self, model):
        """Try forever what fails each time."""
        while True:
            with contextlib.suppress(OSError):
                (self.folder / "never" / "there").read_text()
            time.sleep(0.5)

    @once
    def gil(self, model):
        """Call native code that keeps the interpreter's lock."""
        ctypes.PyDLL(None).sleep(int(LONG))


def tokens_of(row):
    """Tokens of a text, by a slow tokenizer."""
    until = time.thread_time() + 0.05
    while time.thread_time() < until:
        tokens = [len(word) for word in row["text"].split()]
    return {"tokens": tokens}


class Event:
    """An event that reports its end, under a lock, and is part of a cycle."""

    def __init__(self, lock):
        self.lock, self.itself = lock, self

    def __del__(self):
        with self.lock:
            pass


def asks_silent():
    """Read from a server that does not answer."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        return client.recv(1)


async def asks_again():
    """Ask a judge until it answers, whatever happens."""
    while True:
        try:
            await asyncio.sleep(LONG)
        except BaseException as error:
            print(f"asked again after {error!r}")


class ReadWriteLock:
    """A lock for many readers or one writer."""

    def __init__(self):
        self.changed, self.readers = threading.Condition(), 0

    @contextlib.contextmanager
    def read(self):
        """Keep writers out."""
        with self.changed:
            self.readers += 1
        yield
        with self.changed:
            self.readers -= 1
            self.changed.notify_all()

    @contextlib.contextmanager
    def write(self):
        """Wait until nobody reads."""
        with self.changed:
            self.changed.wait_for(lambda: not self.readers)
            yield


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
