"""What the callback costs a run: CPU time a step, wall time of a 10 ms step, memory over 100,000 steps.

    python benchmarks/callback_cost.py [steps] [ten] [growth] [first] [where] [--world 1 2] [--run] [--part | --write]

``steps``: within one fit, blocks of steps run by turns without any callback, without one again (what noise looks like),
with an empty callback, with the doctor's, and with Lightning's DeviceStatsMonitor and ThroughputMonitor; which comes
when is drawn anew each round. CPU time of the thread that trains, on one process and on rank 0 of two over Gloo, which
judges: that of the process has what Gloo's threads take, which varies more than a callback costs. What the doctor does
beside the steps, reading of what its hooks noted among it, goes on in all blocks alike, so it is measured by itself and
added. ``ten``: the same with steps of 10 ms, by wall clock. ``growth``: two fits of 100,000 steps. ``first``: what the
callback adds to a whole fit of eight batches, from its import to the report: to the first fit of a process and to the
second one, in processes of their own, with modules that are compiled, as pip leaves them. ``where``: what each hook
takes. ``--run``: ``doctor run`` starts the processes, and the callback is the one that it adds. ``--part``: two or
three rounds of one process, for which the limits are not meant. Needs torch and Lightning. Ends with 1 where a limit is
not kept.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import inspect
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "checks")]

from evidence_pages import add_part, word_of, write_between  # noqa: E402 - the path comes first

from doctor.monitor.integrations.hook_guard import SWITCH  # noqa: E402 - the path comes first

BLOCK = 100
"""Steps of a block: what all of them do every 50 (a log line, a look at memory) falls into each block twice."""
TEN_BLOCK, TEN = 20, 0.010
STEPS, WARM = 100_000, 20_000


class Extent(NamedTuple):
    """Rounds of blocks, those of a job of two ranks and of steps of 10 ms, and processes that fit for the first time;
    ``warms_up``: one more of these that is not counted, which compiles modules."""

    rounds: int = 240
    of_two: int = 80
    of_ten: int = 60
    first: int = 11
    warms_up: bool = True


ALL, PART = Extent(), Extent(3, 3, 2, 1, warms_up=False)
MOST = 50.0
"""Limit: microseconds of CPU time a step."""
MOST_HELD, MOST_RESIDENT = 256 << 10, 2 << 20
"""Limits: bytes by which what the doctor holds, and the whole process, may grow from step ``WARM`` to ``STEPS``. Not 0:
a look meets cards that are under way, samples that are kept fill their 256 places by the clock and not by the step, and
the allocator takes memory in pieces. What is kept of every step, were it one number, would be 2.5 MB."""

T = TypeVar("T")

BARE, AGAIN, EMPTY, DOCTOR = "no callback", "no callback, again", "empty callback", "DoctorCallback"
DEVICE, THROUGHPUT = "DeviceStatsMonitor", "ThroughputMonitor"


class Stamp(NamedTuple):
    """Clocks in seconds: CPU time of the process, of the thread that trains, and the wall's."""

    process: float
    thread: float
    wall: float

    def less(self, earlier: Stamp) -> Stamp:
        """What passed since ``earlier``."""
        return Stamp(self.process - earlier.process, self.thread - earlier.thread, self.wall - earlier.wall)


def now() -> Stamp:
    """All clocks, now."""
    return Stamp(time.process_time(), time.thread_time(), time.perf_counter())


class Turns:
    """Changes the callbacks of a Trainer between two steps, from the loader's collate function, and takes the time.

    What runs in which block is drawn from one seed, the same on all ranks: none waits for another's callback. The first
    round warms up and is not counted. ``on_block`` is told the number of each block that begins.
    """

    def __init__(
        self, callbacks: Mapping[str, Any], rounds: int, block: int, on_block: Callable[[int], None] | None = None
    ) -> None:
        self.callbacks = callbacks
        self.block = block
        self.trainer: Any = None
        self.taken: dict[str, list[Stamp]] = {name: [] for name in callbacks}
        draw = random.Random(0)
        self._order = [name for _ in range(rounds + 1) for name in draw.sample(list(callbacks), len(callbacks))]
        self._on_block = on_block
        self._steps = 0
        self._since = now()

    @property
    def steps(self) -> int:
        """Batches in all, and one after the last block, in which every callback hears of the end."""
        return len(self._order) * self.block + 1

    def between(self) -> None:
        """A batch is about to be made: where a block is over, note what it took and go on with the next."""
        number, within = divmod(self._steps, self.block)
        self._steps += 1
        if within:
            return
        if number > len(self.callbacks):
            self.taken[self._order[number - 1]].append(now().less(self._since))
        if self._on_block is not None:
            self._on_block(number)
        names = [self._order[number]] if number < len(self._order) else list(self.callbacks)
        self.trainer.callbacks = [one for name in names if (one := self.callbacks[name]) is not None]
        if DOCTOR in self.callbacks:
            self._hang(self.callbacks[DOCTOR]._run, DOCTOR in names)
        self._since = now()

    def _hang(self, run: Any, on: bool) -> None:
        """Take away, or put back, what the doctor hung on the run beside its hooks: on parts of the Trainer and on
        torch's loaders."""
        for owner, name, replacement in run.replaced:
            if on:
                setattr(owner, name, replacement)
            else:
                vars(owner).pop(name, None)
        loop = self.trainer.fit_loop
        loop._data_fetcher._start_profiler = loop.epoch_loop._on_before_fetch  # it keeps the method of its start
        run.telemetry.loaders.close()
        if on:
            run.telemetry.loaders.open()

    def a_step(self, name: str, clock: str, less: str | None = None) -> list[float]:
        """Microseconds a step in each round, above those of ``less`` in the same round."""
        spent = [getattr(stamp, clock) for stamp in self.taken[name]]
        base = [getattr(stamp, clock) for stamp in self.taken[less]] if less else [0.0] * len(spent)
        return [1e6 * (a - b) / self.block for a, b in zip(spent, base, strict=True)]


def fit(turns: Turns, folder: Path, *, sleep: float = 0.0, logs: bool = True) -> Stamp:
    """Train a tiny model with the callbacks of ``turns``; what its steps took in all. ``sleep``: seconds that a step
    waits, as a host does while a device computes."""
    import torch
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.loggers import CSVLogger
    from torch.utils.data import DataLoader, TensorDataset

    whole: list[Stamp] = []

    class Tiny(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(32, 2)

        def on_train_start(self) -> None:
            whole.append(now())

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if sleep:
                time.sleep(sleep)
            return self.layer(batch).sum()

        def on_train_end(self) -> None:
            whole.append(now())

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.layer.parameters(), lr=1e-6)

    def collate(rows: Any) -> Any:
        turns.between()
        return torch.stack([row for (row,) in rows])

    world = int(os.environ.get("WORLD_SIZE", "1"))
    turns.trainer = Trainer(
        accelerator="cpu",
        devices=world,
        strategy="ddp" if world > 1 else "auto",
        max_epochs=1,
        logger=CSVLogger(str(folder)) if logs else False,
        default_root_dir=str(folder),
        callbacks=[callback for callback in turns.callbacks.values() if callback is not None],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    if _is_added() and DOCTOR in turns.callbacks:
        from doctor.monitor.integrations.lightning.callback import LightningHooks

        added = next(one for one in turns.trainer.callbacks if isinstance(one, LightningHooks))
        turns.callbacks = {**turns.callbacks, DOCTOR: added}
    rows = TensorDataset(torch.randn(turns.steps * world, 32))
    turns.trainer.fit(Tiny(), DataLoader(rows, batch_size=1, collate_fn=collate))
    return whole[1].less(whole[0])


def callbacks(*names: str) -> dict[str, Any]:
    """New callbacks by name; ``None`` for no callback."""
    from lightning.pytorch import Callback
    from lightning.pytorch.callbacks import DeviceStatsMonitor, ThroughputMonitor

    def doctors() -> Any:
        from doctor import DoctorCallback

        return None if _is_added() else DoctorCallback()

    makers: dict[str, Callable[[], Any]] = {
        BARE: lambda: None,
        AGAIN: lambda: None,
        EMPTY: Callback,
        DOCTOR: doctors,
        DEVICE: DeviceStatsMonitor,
        THROUGHPUT: lambda: ThroughputMonitor(batch_size_fn=len),
    }
    return {name: makers[name]() for name in names}


def _is_added() -> bool:
    """Whether ``doctor run`` adds the callback to each Trainer."""
    return "DOCTOR_RUN" in os.environ


# -- what runs in processes of their own; each returns what can be written as JSON


def measure_steps(folder: Path, extent: Extent) -> dict[str, Any]:
    """Microseconds of CPU time a step, per round: of the bare step, and what each callback adds."""
    names = (AGAIN, EMPTY, DOCTOR, DEVICE, THROUGHPUT)
    rounds = extent.rounds if os.environ.get("WORLD_SIZE", "1") == "1" else extent.of_two
    turns = Turns(callbacks(BARE, *names), rounds, BLOCK)
    with _reading_timed() as read:
        fit(turns, folder)
    added = {name: turns.a_step(name, "thread", BARE) for name in names}
    reading = 1e6 * sum(read) / (BLOCK * rounds)
    return {
        "added": added,
        "bare": turns.a_step(BARE, "thread"),
        "wall": turns.a_step(BARE, "wall"),
        "reading": reading,
    }


@contextlib.contextmanager
def _reading_timed() -> Iterator[list[float]]:
    """CPU seconds that go into reading what the hooks noted, which other threads do at another time."""
    from doctor.monitor.telemetry.rank_telemetry import RankTelemetry

    spent: list[float] = []
    read = RankTelemetry._read

    def timed(monitor: Any) -> None:
        began = time.thread_time()
        read(monitor)
        spent.append(time.thread_time() - began)

    RankTelemetry._read = timed  # type: ignore[method-assign, assignment]
    try:
        yield spent
    finally:
        RankTelemetry._read = read  # type: ignore[method-assign]


def measure_ten(folder: Path, extent: Extent) -> dict[str, Any]:
    """A step of 10 ms: microseconds of wall clock and of CPU time that callbacks add, and CPU seconds a second of the
    doctor's own threads."""
    sleep = _sleep_for(TEN, folder)
    seen: list[tuple[float, float]] = []
    own: dict[int, float] = {}
    turns = Turns(
        callbacks(BARE, AGAIN, EMPTY, DOCTOR),
        extent.of_ten,
        TEN_BLOCK,
        lambda _: seen.append((_own_threads(own), time.perf_counter())),
    )
    whole = fit(turns, folder, sleep=sleep)
    (cpu_before, began), (cpu_after, ended) = seen[0], seen[-1]
    return {
        "bare": turns.a_step(BARE, "wall"),
        "again": turns.a_step(AGAIN, "wall", BARE),
        "doctor": turns.a_step(DOCTOR, "wall", BARE),
        "cpu": turns.a_step(DOCTOR, "thread", BARE),
        "empty": turns.a_step(EMPTY, "thread", BARE),
        "beside": (cpu_after - cpu_before) / (ended - began),
        "seconds": whole.wall,
    }


def _own_threads(seen: dict[int, float]) -> float:
    """CPU seconds of the doctor's threads until now; ``seen`` keeps those of threads that have ended since."""
    for thread in threading.enumerate():
        if thread.name.startswith("doctor-") and thread.ident is not None and thread.native_id is not None:
            seen[thread.native_id] = time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    return sum(seen.values())


def _sleep_for(seconds: float, folder: Path) -> float:
    """How long a step has to sleep so that it takes ``seconds`` in all.

    The callback that ``doctor run`` adds is off: no block would tell it of the end, and its thread would go on.
    """
    turns = Turns(callbacks(BARE), 4, TEN_BLOCK)
    os.environ[SWITCH] = "1"
    fit(turns, folder, sleep=seconds / 2)
    del os.environ[SWITCH]
    return max(0.0, seconds / 2 + seconds - statistics.median(turns.a_step(BARE, "wall")) / 1e6)


def measure_growth(folder: Path, _: Extent) -> dict[str, Any]:
    """Bytes that came to be from step ``WARM`` to ``STEPS``: of the process, and in a second fit, because tracing takes
    memory itself, those that lines of the doctor allocated. Without a logger, which keeps all that it is told."""
    resident = _looks(folder, _resident)
    tracemalloc.start()
    held = _looks(folder, _held)
    tracemalloc.stop()
    before, after = (min(held[step], key=lambda lines: sum(lines.values())) for step in (WARM, STEPS))
    grown = {line: size - before.get(line, 0) for line, size in after.items()}
    return {
        "resident": min(resident[STEPS]) - min(resident[WARM]),
        "doctor": sum(after.values()) - sum(before.values()),
        "holds": sum(after.values()),
        "most": {line: grown[line] for line in sorted(grown, key=lambda line: -grown[line])[:5] if grown[line] > 0},
    }


def _looks(folder: Path, look: Callable[[], T]) -> dict[int, list[T]]:
    """What ``look`` sees in a watched fit by step ``WARM`` and by step ``STEPS``: three times each, for one look may
    meet the doctor at work."""
    seen: dict[int, list[T]] = {WARM: [], STEPS: []}

    def on_block(block: int) -> None:
        for step, looks in seen.items():
            if step - 2000 <= block * 1000 <= step:
                looks.append(look())

    fit(Turns(callbacks(DOCTOR), STEPS // 1000, 1000, on_block), folder, logs=False)
    return seen


def _resident() -> int:
    import psutil

    return int(psutil.Process().memory_info().rss)


def _held() -> dict[str, int]:
    """Bytes that live, by the line of the doctor that allocated them."""
    own = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, str(ROOT / "doctor" / "*"))])
    return {str(line.traceback): line.size for line in own.statistics("lineno")}


def measure_first(folder: Path, _: Extent) -> dict[str, Any]:
    """Seconds of one process, after a fit without callbacks that warms up: of a bare fit, and with the callback, which
    is imported for the first one."""
    _whole_fit(folder, BARE)
    bare = _whole_fit(folder, BARE)
    return {"bare": bare, "first": _whole_fit(folder, DOCTOR), "second": _whole_fit(folder, DOCTOR)}


def _whole_fit(folder: Path, name: str) -> Stamp:
    began = now()
    fit(Turns(callbacks(name), 0, 8), folder, logs=False)
    return now().less(began)


def measure_where(folder: Path, extent: Extent) -> dict[str, Any]:
    """Calls a step and quartiles of microseconds a call: of the doctor's hooks, and in a second fit of what they tell
    the monitor, where what is called within another counts in both and each call costs the clock's own time more.
    Between two hooks the step itself fills the caches, so that a call takes several times what it takes in a loop."""
    from doctor.monitor.integrations.lightning.callback import LightningHooks
    from doctor.monitor.telemetry.data.loader_history import LoaderHistories
    from doctor.monitor.telemetry.data.sample_trace import SampleTrace
    from doctor.monitor.telemetry.memory.memory_samples import MemorySampler
    from doctor.monitor.telemetry.progress import Progress
    from doctor.monitor.telemetry.rank_telemetry import RankTelemetry
    from doctor.monitor.telemetry.replica.replica_tracker import ReplicaTracker
    from doctor.monitor.telemetry.step_clock import StepClock

    within = (RankTelemetry, Progress, StepClock, LoaderHistories, SampleTrace, ReplicaTracker, MemorySampler)
    return {"hooks": _where((LightningHooks,), folder, extent), "within": _where(within, folder, extent)}


def _where(kinds: Sequence[type], folder: Path, extent: Extent) -> list[tuple[str, float, float, float, float]]:
    took: dict[str, list[int]] = {"(the clock itself)": []}
    clock = _timed(lambda: None, took["(the clock itself)"])
    with contextlib.ExitStack() as stack:
        for kind in kinds:
            for name, function in [*vars(kind).items()]:
                if inspect.isfunction(function) and not name.startswith("__"):
                    setattr(kind, name, _timed(function, took.setdefault(f"{kind.__name__}.{name}", [])))
                    stack.callback(setattr, kind, name, function)
        turns = Turns(callbacks(DOCTOR), extent.rounds, BLOCK, lambda _: clock())
        fit(turns, folder)
    rows = []
    for name, spent in took.items():
        if len(spent) > extent.rounds // 2:
            low, middle, high = (nanoseconds / 1000 for nanoseconds in statistics.quantiles(spent, n=4))
            rows.append((name, len(spent) / turns.steps, low, middle, high))
    return rows


def _timed(function: Callable[..., Any], spent: list[int]) -> Callable[..., Any]:
    trainer = threading.get_ident()

    @functools.wraps(function)
    def timed(*arguments: Any, **named: Any) -> Any:
        began = time.perf_counter_ns()
        try:
            return function(*arguments, **named)
        finally:
            if threading.get_ident() == trainer:
                spent.append(time.perf_counter_ns() - began)

    return timed


MEASURES = {
    "steps": measure_steps,
    "ten": measure_ten,
    "growth": measure_growth,
    "first": measure_first,
    "where": measure_where,
}


def child(name: str, out: Path, extent: Extent) -> None:
    """Measure ``name`` here; rank 0 writes what it found."""
    import logging

    import torch

    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        found = MEASURES[name](Path(folder), extent)
    if os.environ.get("RANK", "0") == "0":
        out.write_text(json.dumps(found))


def measured(name: str, world: int, extent: Extent, *, run: bool = False) -> dict[str, Any]:
    """What processes of their own found: one, or ``world`` that torchrun starts; ``run``: below ``doctor run``."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"] if world > 1 else []
    below = [sys.executable, "-m", "doctor", "run", "--"] if run else []
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        command = [*below, sys.executable, *launcher, str(Path(__file__).resolve()), "--child", name, str(out)]
        command += ["--part"] if extent is PART else []
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        environ.pop("PYTHONDONTWRITEBYTECODE", None)
        environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [environ.get("PYTHONPATH")])])
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environ, cwd=folder)
        if done.returncode != 0 or not out.exists():
            raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-4000:]}")
        found: dict[str, Any] = json.loads(out.read_text())
        return found


# -- tables


class Table:
    """Rows of a table in Markdown, and whether the limits are kept."""

    def __init__(self) -> None:
        self.lines = ["| what | measured | limit | kept |", "| --- | --- | --- | --- |"]
        self.kept = True

    def row(self, what: str, measured: str, limit: str = "", kept: bool | None = None) -> None:
        """One row; ``kept``: whether it keeps its limit, where it has one."""
        self.kept = self.kept and kept is not False
        self.lines.append(f"| {what} | {measured} | {limit} | {word_of(kept)} |")


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Median and quartiles; a single value alone."""
    if len(values) == 1:
        return f"{values[0]:.{digits}f}"
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def interval(values: Sequence[float], draws: int = 2000) -> tuple[float, float]:
    """95 % of the medians of samples drawn from ``values`` lie between these (bootstrap)."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(draws))
    return medians[int(0.025 * draws)], medians[int(0.975 * draws)]


def tell_steps(table: Table, world: int, beside: float, extent: Extent, *, run: bool = False) -> None:
    """The rows of ``steps``. ``beside``: CPU seconds a second that the doctor takes beside the steps."""
    found = measured("steps", world, extent, run=run)
    added, bare = found["added"], statistics.median(found["bare"])
    where = _processes(world, run=run)
    table.row(f"{where}: CPU time of a bare step, {len(found['wall'])} blocks of {BLOCK}", f"{bare:.0f} µs")
    for name in (AGAIN, EMPTY, DEVICE, THROUGHPUT):
        table.row(f"{where}: {name}, above none", _with_ratio(added[name], bare))
    table.row(f"{where}: {DOCTOR}, in its hooks", _with_ratio(added[DOCTOR], bare))
    thread = beside * statistics.median(found["wall"])
    whole = statistics.median(added[DOCTOR]) + found["reading"] + thread
    table.row(f"{where}: reading of what they noted", f"{found['reading']:.1f} µs")
    table.row(f"{where}: its own threads besides, a step of this run", f"{thread:.1f} µs")
    low, high = interval(added[AGAIN])
    if high - low > MOST:  # waiting for other ranks takes CPU time, too, and not the same in all blocks
        words = f"{whole:.1f} µs; none again is 95 % between {low:+.0f} and {high:+.0f} µs: not told apart"
        table.row(f"{where}: {DOCTOR}, in total", words)
        return
    table.row(f"{where}: {DOCTOR}, in total", f"{whole:.1f} µs", f"{MOST:.0f} µs", whole <= MOST)
    for name in (DEVICE, THROUGHPUT):
        ratio = whole / statistics.median(added[name])
        table.row(f"{where}: against {name}", f"{ratio:.2f} times", "1", ratio < 1.0)


def tell_ten(table: Table, world: int, extent: Extent, *, run: bool = False) -> float:
    """The rows of ``ten``; CPU seconds a second beside the steps."""
    found = measured("ten", world, extent, run=run)
    where, step = f"{_processes(world, run=run)}, step of 10 ms", statistics.median(found["bare"])
    for what, name in (("none again", "again"), (DOCTOR, "doctor")):
        low, high = interval(found[name])
        middle = statistics.median(found[name])
        words = f"{middle:+.0f} µs (95 % between {low:+.0f} and {high:+.0f}), {100 * middle / step:+.2f} %"
        table.row(f"{where}: wall clock above none, {what}", words)
    hooks, thread = statistics.median(found["cpu"]), found["beside"] * step
    table.row(f"{where}: CPU time of {EMPTY}", f"{statistics.median(found['empty']):.1f} µs")
    table.row(f"{where}: CPU time of {DOCTOR}", f"{hooks:.1f} µs in hooks and {thread:.1f} µs in its own threads")
    beside: float = found["beside"]
    return beside


def tell_growth(table: Table, extent: Extent) -> None:
    """The rows of ``growth``."""
    found = measured("growth", 1, extent)
    span = f"from step {WARM:,} to {STEPS:,}"
    table.row(
        f"memory that its lines allocated, {span}",
        f"{found['doctor'] / 1024:+.1f} KiB of {found['holds'] / 1024:.0f}",
        f"{MOST_HELD // 1024} KiB",
        found["doctor"] <= MOST_HELD,
    )
    table.row(
        f"resident memory of the process, {span}",
        f"{found['resident'] / 1024:+,.0f} KiB",
        f"{MOST_RESIDENT // 1024:,} KiB",
        found["resident"] <= MOST_RESIDENT,
    )
    for where, size in found["most"].items():
        print(f"{size / 1024:+8.1f} KiB {where}")


def tell_first(extent: Extent) -> str:
    """The table of ``first``."""
    lines = ["| what | wall clock | CPU time |", "| --- | --- | --- |"]
    if extent.warms_up:
        measured("first", 1, extent)
    found = [measured("first", 1, extent) for _ in range(extent.first)]
    bare = [Stamp(*one["bare"]) for one in found]
    rows = {"a bare fit": bare}
    for name in ("first", "second"):
        added = [Stamp(*one[name]).less(base) for one, base in zip(found, bare, strict=True)]
        rows[f"added by {DOCTOR} to the {name} fit of a process"] = added
    for what, stamps in rows.items():
        wall, cpu = (spread([getattr(one, clock) for one in stamps], 2) for clock in ("wall", "process"))
        lines.append(f"| {what} | {wall} s | {cpu} s |")
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[1]
    lines.append(f"| {extent.first} processes on {cores} cores with a load of {load:.1f} | | |")
    return "\n".join(lines)


def tell_where(world: int, extent: Extent) -> None:
    """What each hook takes, printed."""
    for what, rows in measured("where", world, extent).items():
        print(f"{_processes(world)}, {what}: calls a step, quartiles of microseconds a call")
        for name, calls, low, middle, high in sorted(rows, key=lambda row: -row[1] * row[3]):
            print(f"  {name:40s} {calls:6.2f} {low:8.2f} {middle:8.2f} {high:8.2f}")


def _processes(world: int, *, run: bool = False) -> str:
    where = "1 process" if world == 1 else f"rank 0 of {world}"
    return f"{where} under doctor run" if run else where


def _with_ratio(values: Sequence[float], bare: float) -> str:
    return f"{spread(values)} µs, {1 + statistics.median(values) / bare:.3f} of a bare step"


def main(arguments: Sequence[str]) -> int:
    """Measure what is asked for (all but ``where`` by default) and print it; 1 where a limit is not kept."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("what", nargs="*", choices=[*MEASURES, []], help="default: steps, ten, growth, first")
    parser.add_argument("--world", type=int, nargs="+", default=[1, 2], help="processes (default: 1 2)")
    parser.add_argument("--run", action="store_true", help="steps and ten: started by doctor run")
    parser.add_argument("--write", action="store_true", help="write the table into docs/evidence")
    parser.add_argument("--child", nargs=2, metavar=("WHAT", "FILE"), help=argparse.SUPPRESS)
    add_part(parser, "two or three rounds of one process")
    options = parser.parse_args(arguments)
    extent = PART if options.part else ALL
    if options.child:
        child(options.child[0], Path(options.child[1]), extent)
        return 0
    what, table = options.what or ["ten", "steps", "growth", "first"], Table()
    for world in [1] if options.part else options.world:
        beside = tell_ten(table, world, extent, run=options.run) if {"ten", "steps"} & {*what} else 0.0
        if "steps" in what:
            tell_steps(table, world, beside, extent, run=options.run)
        if "where" in what:
            tell_where(world, extent)
    if "growth" in what:
        tell_growth(table, extent)
    if {*what} - {"where", "first"}:
        print("\n".join(table.lines))
        if options.write and not options.part:
            write_between("callback-cost", "\n".join(table.lines))
    if "first" in what:
        print(first := tell_first(extent))
        if options.write and not options.part:
            write_between("first-fit", first)
    return 0 if table.kept or options.part else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
