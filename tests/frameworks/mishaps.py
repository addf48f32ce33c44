"""Further plants of ``planted.py``: helpers of a training (threads, children, services, files) that let a rank down."""

import asyncio
import concurrent.futures
import contextlib
import datetime
import gzip
import multiprocessing
import os
import queue
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import torch
import torch.distributed as dist

ONCE = (
    "lock_order", "backoff", "exit_thread", "event_loop", "stdout_full", "pool", "interrupted", "pending",
    "report_alone", "starved", "sqlite", "grandchild", "memory_limit", "unsynced", "evaluates_more", "throttled",
    "child_works", "pool_saves", "lock_held", "backoff_ends", "alarm_handled",
)  # fmt: skip
"""Plants that strike once, after the step ``at``."""
ON = ("copytree",)
"""Plants that strike after each step from ``at`` on."""
ON_ALL = ("ema", "generate", "monitored", "naps")
"""What every rank does after each step."""
SERVER = """
import http.server, sys, time
left, seconds = int(sys.argv[1]), float(sys.argv[2])
class Tracking(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        global left
        left -= 1
        time.sleep(seconds)
        self.send_response(503 if left >= 0 else 200)
        self.end_headers()
    def log_message(self, *_):
        pass
server = http.server.HTTPServer(("127.0.0.1", 0), Tracking)
print(server.server_port, flush=True)
server.serve_forever()
"""
"""A tracking server that is not available for the first requests, and takes some seconds for each."""
HOLDER = """
import sqlite3, sys, time
base = sqlite3.connect(sys.argv[1])
base.execute("BEGIN EXCLUSIVE")
print(flush=True)
time.sleep(float(sys.argv[2]))
"""
"""A process that keeps a database locked for some seconds."""
LIMITER = """
import os, signal, sys, time
while True:
    os.kill(int(sys.argv[1]), signal.SIGSTOP)
    time.sleep(0.1)
    os.kill(int(sys.argv[1]), signal.SIGCONT)
    time.sleep(0.05)
"""
"""What limits the processor time of another process, as the tool cpulimit does; it ends with that process."""
WORK = "import time\nend = time.process_time() + 4\nwhile time.process_time() < end: sum(range(1000))"


class Mishaps:
    """Plants between steps: each is a method that gets the model, as of :class:`planted.Plant`."""

    # What does not come back.

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

    def backoff(self, model, refused=1_000_000):
        """Send a metric to a tracking server that is not available, and wait longer after each attempt."""
        with served(refused) as address:
            for attempt in range(1000):
                try:
                    urllib.request.urlopen(address, b"loss=0.5", timeout=5).close()
                    return
                except urllib.error.HTTPError:
                    time.sleep(min(0.5 * 2**attempt, 30))

    def event_loop(self, model):
        """Wait inside an event loop for what only this loop can do."""

        async def uploads():
            return asyncio.run_coroutine_threadsafe(asyncio.sleep(0), asyncio.get_running_loop()).result()

        asyncio.run(uploads())

    def stdout_full(self, model):
        """Print to a collector of logs that has stopped to read."""
        self.kept.extend(os.pipe())
        os.dup2(self.kept[1], 1)
        for number in range(100_000):
            print(f"sample {number}: loss 0.5", flush=True)

    def pool(self, model):
        """Wait for a pool of processes whose workers were killed, as by the kernel."""
        with multiprocessing.Pool(2) as pool:
            pool.map(die, range(2))

    def starved(self, model):
        """Wait in the only thread of a pool for another task of this pool."""
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            pool.submit(lambda: pool.submit(os.getpid).result()).result()

    def sqlite(self, model):
        """Write to a database that another process keeps locked."""
        with (
            started(HOLDER, str(self.folder / "runs.db"), "1000"),
            sqlite3.connect(self.folder / "runs.db", 1000) as base,
        ):
            base.execute("CREATE TABLE losses (value REAL)")

    def grandchild(self, model):
        """Read what a command prints, whose output a process that it left behind keeps open."""
        subprocess.run("echo started; sleep 1000 &", shell=True, capture_output=True, check=True)

    def pending(self, model):
        """Wait for a task of Ray that needs more processors than there are."""
        import ray

        ray.get(ray.remote(num_cpus=64)(lambda: None).remote())

    def report_alone(self, model):
        """Report to Ray Train, which waits for the reports of all workers."""
        import ray.train

        ray.train.report({"loss": 0.5})

    # What ends the rank.

    def exit_thread(self, model):
        """Be ended by a thread of the user's own, which watches something."""
        threading.Timer(0.2, os._exit, (3,)).start()

    def interrupted(self, model):
        """Get the signal of a keyboard that interrupts."""
        os.kill(os.getpid(), signal.SIGINT)

    def memory_limit(self, model):
        """Keep more memory than a limit of this process allows."""
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + (256 << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
        while True:
            self.kept.append(bytearray(1 << 20))

    # Collectives that the ranks do not call alike.

    def unsynced(self, model):
        """Leave out the reduction of gradients."""
        model.set_requires_gradient_sync(False)

    def evaluates_more(self, model):
        """Nothing more: the arguments of this rank's Trainer let it evaluate now."""

    def ema(self, model):
        """Average the parameters over the ranks in every tenth update by this rank's own count."""
        self.updates += 1
        if self.strikes("ema"):
            self.note()
            self.updates += 1
        if self.updates % 10 == 0:
            for parameter in model.parameters():
                dist.all_reduce(parameter.detach().clone())

    def generate(self, model):
        """Generate until the end of the text, which comes later on one rank."""
        if self.step != self.at:
            return
        if self.here:
            self.note()
        model.eval()
        with torch.no_grad():
            for _ in range(9 if self.here else 6):
                model(torch.ones(1, 8))
        model.train()

    def monitored(self, model):
        """Meet in every tenth step in a barrier with a short limit, which a rank misses that saves for long."""
        if self.strikes("monitored"):
            self.note()
            self.saves(model, 60)
        if self.step % 10 == 0:
            dist.monitored_barrier(timeout=datetime.timedelta(seconds=6))

    # What makes a rank slow.

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

    # In the loop.

    def prefetched(self, batches):
        """Batches that a thread reads ahead, which dies of an error at batch ``at``."""
        ahead = queue.Queue(2)

        def reads():
            for number, rows in enumerate(batches):
                if self.name == "prefetch_dead" and self.here and number == self.at:
                    self.note()
                    raise KeyError(f"no label of sample {number}")
                ahead.put(rows)
            ahead.put(None)

        threading.Thread(target=reads, daemon=True).start()
        while (rows := ahead.get()) is not None:
            yield rows

    # Healthy.

    def child_works(self, model):
        """Wait for a command that computes for 4 seconds."""
        subprocess.run([sys.executable, "-S", "-c", WORK], check=True)

    def pool_saves(self, model):
        """Save in a thread for 12 seconds, while the training goes on."""
        self.kept.append(concurrent.futures.ThreadPoolExecutor(1))
        self.kept.append(self.kept[0].submit(self.saves, model, 12))

    def lock_held(self, model):
        """Wait 4 seconds for a lock that a thread holds while it writes."""
        lock, taken = threading.Lock(), threading.Event()

        def writes():
            with lock:
                taken.set()
                self.saves(model, 4)

        threading.Thread(target=writes, daemon=True).start()
        taken.wait()
        with lock:
            pass

    def naps(self, model):
        """Look on all ranks for a file that a thread of one rank writes after 8 seconds."""
        if self.step != self.at:
            return
        if self.here:
            threading.Timer(8, (self.folder / "ready").touch).start()
        while not (self.folder / "ready").exists():
            time.sleep(0.2)

    def backoff_ends(self, model):
        """Send a metric to a tracking server that is available again after three attempts."""
        self.backoff(model, refused=3)

    def alarm_handled(self, model):
        """Give up a request after 2 seconds, by an alarm."""

        def gives_up(*_):
            raise TimeoutError

        before = signal.signal(signal.SIGALRM, gives_up)
        signal.alarm(2)
        with contextlib.suppress(TimeoutError):
            threading.Event().wait()
        signal.signal(signal.SIGALRM, before)


def started(program, *arguments, says=True):
    """A process that runs a program; with ``says`` its first line has been read."""
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", program, *arguments], stdout=subprocess.PIPE, start_new_session=True
    )
    if says:
        process.first_line = process.stdout.readline().decode().strip()
    return process


@contextlib.contextmanager
def served(refused):
    """The address of a tracking server in another process, which refuses so many requests."""
    process = started(SERVER, str(refused), "0")
    try:
        yield f"http://127.0.0.1:{process.first_line}"
    finally:
        process.kill()
        process.wait()


def die(number):
    """Be killed."""
    os.kill(os.getpid(), signal.SIGKILL)
