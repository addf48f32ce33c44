"""Small real jobs over Gloo that hang, each for a reason of its own, and what their ranks know of it.

``python hanging.py FOLDER SCENE…`` plays the scenes side by side, by fork after one import of torch. A watcher in each
rank writes its facts to FOLDER/SCENE-RANK.json when it stands still; ranks that can't are looked at from outside.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import faulthandler
import os
import signal
import sys
import threading
import time
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from doctor.collectors.base import NotPresent, NotVisible
from doctor.collectors.host.local_processes import process_start_time, process_state
from doctor.core.facts import Failure, Missing, MissingReason, ProgressFacts
from doctor.core.frames import frames_of_traceback
from doctor.monitor.telemetry.event_log import BatchMark, StageEntered
from doctor.monitor.telemetry.flight_recorder import read_recorder
from doctor.monitor.telemetry.progress import Progress
from doctor.monitor.telemetry.stacks.live_stacks import thread_stack
from doctor.monitor.telemetry.stacks.stack_files import HEAD, read_stack_file
from tests.lab.speed import slowness

STILL = 1.0 * slowness()
PATIENCE = 30.0 * slowness()


class Ranks:
    """What a scene is given: its rank and the record of its progress."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank = rank
        self.world = world
        self.progress = Progress("lab", hang_after=STILL)

    def mark(self, point: str, more: BatchMark | StageEntered | None = None) -> None:
        self.progress.take([(time.monotonic(), point, more)])

    def batch(self, number: int, point: str = "step") -> None:
        if self.progress.stage != "train":
            self.mark("epoch-start", StageEntered("train", 0))
        self.mark(point, (number, 0, number))


def _step(me: Ranks, number: int, size: int = 4) -> None:
    me.batch(number)
    dist.all_reduce(torch.ones(size))
    dist.broadcast(torch.ones(1), 0)


def gather_under_condition(me: Ranks) -> None:
    for number in range(8):
        _step(me, number)
        if me.rank == 0 and number == 4:
            dist.all_gather([torch.ones(2), torch.ones(2)], torch.ones(2))


def gather_without_a_word_of_ranks(me: Ranks) -> None:
    surprising = [] if me.rank == 0 else [4]
    for number in range(8):
        _step(me, number)
        if number in surprising:
            dist.all_gather([torch.ones(2), torch.ones(2)], torch.ones(2))


def gather_after_return(me: Ranks) -> None:
    def log(number: int) -> None:
        if me.rank != 2:
            return
        if number == 3:
            dist.barrier()

    for number in range(8):
        _step(me, number)
        log(number)


def most_gather(me: Ranks) -> None:
    for number in range(8):
        _step(me, number)
        if me.rank != 1 and number == 4:
            dist.all_gather([torch.ones(2) for _ in range(me.world)], torch.ones(2))


def skipped_batch(me: Ranks) -> None:
    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    for number in range(8):
        me.batch(number)
        dist.broadcast(torch.ones(1), 0)
        loss = model(torch.ones(3, 4)).sum()
        poisoned = me.rank == 1 and number == 4
        if poisoned:
            continue
        me.batch(number, "backward")
        loss.backward()


def shifted_in_silence(me: Ranks) -> None:
    extra = me.rank == 1
    for number in range(6):
        me.batch(number)
        if extra and number == 2:
            dist.all_reduce(torch.ones(4))
        dist.all_reduce(torch.ones(4))
        if number == 4:
            dist.broadcast(torch.ones(1), 0)


def other_order(me: Ranks) -> None:
    for number in range(4):
        me.batch(number)
        dist.all_reduce(torch.ones(4))
    if me.rank == 0:
        dist.all_reduce(torch.ones(4))
        dist.barrier()
    else:
        dist.barrier()
        dist.all_reduce(torch.ones(4))


def other_operation(me: Ranks) -> None:
    reduce = dist.broadcast if me.rank == 1 else dist.all_reduce
    for number in range(4):
        me.batch(number)
        dist.all_reduce(torch.ones(4))
    reduce(torch.ones(4), 0) if me.rank == 1 else reduce(torch.ones(4))


def other_size(me: Ranks) -> None:
    for number in range(4):
        _step(me, number)
    dist.all_reduce(torch.ones(12 if me.rank == 1 else 10))
    time.sleep(PATIENCE)


def other_type(me: Ranks) -> None:
    for number in range(4):
        _step(me, number)
    dist.all_reduce(torch.ones(10, dtype=torch.float64 if me.rank == 2 else torch.float32))
    dist.barrier()


def nonsense(me: Ranks) -> None:
    for number in range(4):
        _step(me, number)
    dist.all_reduce(torch.ones(10, dtype=torch.int32 if me.rank == 2 else torch.float32))
    for number in range(4, 8):
        _step(me, number)
    time.sleep(PATIENCE)


def sleeps_in_step(me: Ranks) -> None:
    for number in range(8):
        _step(me, number)
        if me.rank == 2 and number == 3:
            time.sleep(PATIENCE)


class Slow(torch.utils.data.Dataset):
    def __init__(self, slow: bool) -> None:
        self.slow = slow

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.slow and index == 3:
            time.sleep(PATIENCE)
        return torch.ones(4)


def sleeps_in_data(me: Ranks) -> None:
    me.batch(0)
    for number, batch in enumerate(torch.utils.data.DataLoader(Slow(me.rank == 1))):
        me.batch(number)
        dist.all_reduce(batch)
        me.mark("data")


class Drip:
    """A file that takes its time."""

    def write(self, data: bytes) -> int:
        time.sleep(PATIENCE)
        return len(data)

    def flush(self) -> None: ...


def saves_slowly(me: Ranks) -> None:
    for number in range(4):
        _step(me, number)
    if me.rank == 0:
        torch.save({"weight": torch.ones(4)}, Drip())
    dist.barrier()


def stopped(me: Ranks) -> None:
    for number in range(8):
        _step(me, number)
        if me.rank == 0 and number == 3:
            os.kill(os.getpid(), signal.SIGSTOP)


def killed(me: Ranks) -> None:
    for number in range(8):
        _step(me, number)
        if me.rank == 1 and number == 3:
            os.kill(os.getpid(), signal.SIGKILL)


def raises(me: Ranks) -> None:
    for number in range(8):
        _step(me, number)
        if me.rank == 1 and number == 3:
            raise ValueError("the loss is not finite")


def interrupted(me: Ranks, ranks: tuple[int, ...] = (1,)) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in range(8):
        _step(me, number)
        if me.rank in ranks and number == 3:
            os.kill(os.getpid(), signal.SIGINT)


def all_interrupted(me: Ranks) -> None:
    interrupted(me, (0, 1, 2))


def holds_the_lock(me: Ranks) -> None:
    for number in range(8):
        _step(me, number)
        if me.rank == 1 and number == 3:
            ctypes.PyDLL(None).sleep(int(PATIENCE))


def send_without_receive(me: Ranks) -> None:
    _step(me, 0)
    if me.rank == 0:
        dist.send(torch.ones(10_000_000), 1)
    dist.all_reduce(torch.ones(4))


def both_receive(me: Ranks) -> None:
    _step(me, 0)
    dist.recv(torch.ones(4), 1 - me.rank)


def crossed_groups(me: Ranks) -> None:
    first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
    _step(me, 0)
    mine = (first, second) if me.rank == 0 else (second, first)
    for group in mine:
        dist.all_reduce(torch.ones(3), group=group)


def one_of_a_group(me: Ranks) -> None:
    some = dist.new_group([1, 2])
    for number in range(6):
        _step(me, number)
        if me.rank == 1 and number == 3:
            dist.all_reduce(torch.ones(3), group=some)


def uneven(me: Ranks) -> None:
    batches = 6 if me.rank == 1 else 5
    for number in range(batches):
        _step(me, number)
    me.progress.end_of_loader("train", 0, 0, batches)
    me.mark("epoch-end")
    dist.barrier()


def all_busy(me: Ranks) -> None:
    _step(me, 0)
    time.sleep(PATIENCE)


def gather_unrecorded(me: Ranks) -> None:
    gather_under_condition(me)


def sleeps_unrecorded(me: Ranks) -> None:
    sleeps_in_step(me)


WORLDS = {"gather_after_return": 3, "most_gather": 3, "skipped_batch": 3, "sleeps_in_step": 3, "one_of_a_group": 3}
WORLDS |= {"sleeps_unrecorded": 3, "stopped": 3, "other_type": 3, "nonsense": 3}


def play(scene: str, folder: Path) -> dict[int, int]:
    """Start the ranks of a scene; their process ids."""
    meeting = str(folder / f".{scene}")
    world = WORLDS.get(scene, 2)
    return {rank: _start(scene, rank, world, meeting, folder) for rank in range(world)}


def _start(scene: str, rank: int, world: int, meeting: str, folder: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    with contextlib.suppress(BaseException):
        _live(scene, Ranks(rank, world), meeting, folder / f"{scene}-{rank}.json")
    os._exit(1)


def _live(scene: str, me: Ranks, meeting: str, record: Path) -> None:
    if scene.endswith("_unrecorded"):
        os.environ["TORCH_FR_BUFFER_SIZE"] = "0"
    threading.Thread(target=_watch, args=(me, record), daemon=True).start()
    store = dist.FileStore(meeting, me.world)
    timeout = datetime.timedelta(seconds=PATIENCE)
    dist.init_process_group("gloo", store=store, rank=me.rank, world_size=me.world, timeout=timeout)
    try:
        globals()[scene](me)
    except (Exception, KeyboardInterrupt) as error:
        if not record.exists():
            words = f"{type(error).__name__}: {error}"
            me.progress.failure = Failure(
                type(error).__name__, words, time.time(), frames_of_traceback(error.__traceback__)
            )
            me.progress.state = "failed"
            _write(me, record)
        os._exit(1)
    time.sleep(PATIENCE)


def _watch(me: Ranks, record: Path) -> None:
    """Write where this rank stands, and again if it went on after all. Where this thread can't run any more,
    faulthandler's own writes the stacks."""
    written = -1
    with record.with_suffix(".txt").open("w", buffering=1) as stacks:
        stacks.write(HEAD.format(me.progress.training_thread))
        while me.progress.state == "running":
            faulthandler.dump_traceback_later(2 * STILL, file=stacks)
            passed = me.progress.passed
            if me.progress.stage != "setup" and passed != written and me.progress.stall():
                _write(me, record)
                written = passed
            time.sleep(STILL / 10)
        faulthandler.cancel_dump_traceback_later()


def _write(me: Ranks, record: Path) -> None:
    stack = thread_stack(me.progress.training_thread)
    progress = msgspec.structs.replace(me.progress.facts(), stack=stack, stack_from="interpreter")
    sections: dict[str, object] = {"progress": progress}
    try:
        sections["flight-recorder"] = read_recorder()
    except NotPresent as absence:
        sections["flight-recorder"] = Missing(MissingReason.ABSENT, str(absence))
    except NotVisible as barrier:
        sections["flight-recorder"] = Missing(MissingReason.HIDDEN, barrier.reason, barrier.unhide)
    draft = record.with_suffix(".draft")
    draft.write_bytes(msgspec.json.encode(sections))
    draft.replace(record)


def _look_from_outside(record: Path, pid: int, started: float | None) -> None:
    state, letter = process_state(pid, started)
    stack = read_stack_file(record.with_suffix(".txt"))
    seen_by = "signal" if stack else ""
    progress = ProgressFacts(
        state=state, kernel_state=letter, stage="train", point="step", stack=stack, stack_from=seen_by
    )
    record.write_bytes(msgspec.json.encode({"progress": progress}))


def settle(records: list[Path]) -> None:
    """Wait until all ranks have written, or nobody writes any more."""
    deadline, changed, seen = time.monotonic() + PATIENCE / 2, time.monotonic(), []
    while time.monotonic() < deadline:
        now = sorted((record.name, record.stat().st_mtime_ns) for record in records if record.exists())
        if now != seen:
            seen, changed = now, time.monotonic()
        quiet = time.monotonic() - changed
        if (quiet > STILL and len(seen) == len(records)) or (quiet > 3 * STILL and seen):
            return
        time.sleep(STILL / 10)


def main() -> None:
    folder, scenes = Path(sys.argv[1]), sys.argv[2:]
    _warm_up()
    ranks = [(folder / f"{scene}-{rank}.json", pid) for scene in scenes for rank, pid in play(scene, folder).items()]
    try:
        started = {pid: process_start_time(pid) for _, pid in ranks}
        settle([record for record, _ in ranks])
        for record, pid in ranks:
            if not record.exists():
                _look_from_outside(record, pid, started[pid])
    finally:
        for _, pid in ranks:
            os.kill(pid, signal.SIGKILL)
        for _, pid in ranks:
            os.waitpid(pid, 0)


def _warm_up() -> None:
    """What torch loads for its first stack of a recorder, once for all ranks."""
    with contextlib.suppress(ImportError, AttributeError):
        from torch._C._profiler import gather_traceback, symbolize_tracebacks

        symbolize_tracebacks([gather_traceback(python=True, script=False, cpp=False)])


if __name__ == "__main__":
    main()
