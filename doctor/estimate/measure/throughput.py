"""Whether several ranks on one device are worth it: a few real steps of each way to train the same, timed here.

Unlike an estimate this calls the factory with real weights, in child processes that end within a deadline.
"""

from __future__ import annotations

import contextlib
import os
import re
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from doctor.core.decoding import prepared
from doctor.core.errors import UnusableError
from doctor.core.process import abandon_child, start_python
from doctor.estimate.data_model import MeasuredThroughput, TrainingPlan

ROUNDS = 3
"""Each way is run so often, by turns, so that a machine that gets slower slows all of them."""
LATE = "it was not done in time"
KEPT = 300
"""Characters of what a process said last."""
_PREFIX = re.compile(r"^(\[rank\d+\]: )?(doctor\.core\.errors\.UnusableError: )?")
"""What torch and the interpreter put before an error."""


class TrainingTask(msgspec.Struct, frozen=True, kw_only=True):
    """What one process runs: ``rank`` of ``ranks``, which meet in the file ``meeting``. ``copies``: the batch is made
    so many times as large. ``seconds``: for all of it."""

    factory: str
    plan: TrainingPlan
    directory: str
    copies: int = 1
    rank: int = 0
    ranks: int = 1
    meeting: str = ""
    seconds: float = 60.0


class RankMeasurement(msgspec.Struct, frozen=True, kw_only=True):
    """What it saw: its own samples, the seconds that they took, bytes; ``batch_size`` of one micro-batch. ``unsteady``:
    half of the distance between its fastest and its slowest stretch, as a part of the time of one."""

    samples: int = 0
    seconds: float = 0.0
    unsteady: float = 0.0
    peak_bytes: int = 0
    batch_size: int = 0
    device: str = ""
    error: str = ""


class TrainingVariant(msgspec.Struct, frozen=True, kw_only=True):
    """How the same samples are trained on. ``copies``: the batch is so many times as large."""

    name: str
    plan: TrainingPlan
    ranks: int = 1
    copies: int = 1


Round = dict[str, tuple[RankMeasurement, ...]]
"""What the ranks of each way told in one round."""


def measure(factory: str, plan: TrainingPlan, *, directory: Path, seconds: float) -> tuple[MeasuredThroughput, ...]:
    """One rank by itself, then N ranks on its device and what one rank could do instead, on the same samples.

    N is ``plan.ranks_per_device``, 2 where that is 1. Ranks meet over Gloo: NCCL has no two on one GPU. ``directory``:
    where the factory's module is looked for. ``seconds``: for everything; a way that does not get its turn says so.

    Raises:
        UnusableError: the first run, of one rank by itself, gave no numbers.
    """
    deadline = time.monotonic() + seconds
    alone, *others = variants_of(plan)
    first = {alone.name: run(alone, factory, directory, seconds)}
    if said := _error(first[alone.name]):
        raise UnusableError(f"{factory}: {said.removeprefix(f'{factory}: ')}")
    rounds = [first]
    while True:
        began = time.monotonic()
        ways = [way for way in (alone, *others) if way.name not in rounds[-1] and _may_run(way, rounds)]
        for way in ways if len(rounds) % 2 else reversed(ways):
            if (left := deadline - time.monotonic()) > 0:
                rounds[-1][way.name] = run(way, factory, directory, left)
        if len(rounds) == ROUNDS or time.monotonic() + 1.2 * (time.monotonic() - began) > deadline:
            return tuple(throughput_of(way, alone, rounds) for way in (alone, *others))
        rounds.append({})


def _may_run(way: TrainingVariant, rounds: list[Round]) -> bool:
    return not any(_error(one[way.name]) for one in rounds if way.name in one)


def variants_of(plan: TrainingPlan) -> tuple[TrainingVariant, ...]:
    """One rank by itself first. All others train on as many samples a step as N ranks."""
    count = plan.ranks_per_device if plan.ranks_per_device > 1 else 2
    alone = msgspec.structs.replace(plan, strategy="none", devices=1, nodes=1, ranks_per_device=1)
    several = msgspec.structs.replace(alone, strategy="ddp", ranks_per_device=count)
    more = msgspec.structs.replace(alone, accumulate=plan.accumulate * count)
    ways = (
        TrainingVariant(name="one rank", plan=alone),
        TrainingVariant(name=f"{count} ranks on one device", plan=several, ranks=count),
        TrainingVariant(name=f"one rank, {count} times the batch", plan=alone, copies=count),
        TrainingVariant(name=f"one rank, accumulating {count} batches", plan=more),
    )
    if plan.precision != "32-true":
        return ways
    mixed = msgspec.structs.replace(alone, precision="bf16-mixed")
    return (*ways, TrainingVariant(name=f"one rank, {count} times the batch, bf16-mixed", plan=mixed, copies=count))


def run(way: TrainingVariant, factory: str, directory: Path, seconds: float) -> tuple[RankMeasurement, ...]:
    """What its ranks tell; they are killed after so many seconds."""
    deadline = time.monotonic() + seconds
    children: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="doctor-measure-") as scratch:
        task = TrainingTask(
            factory=factory,
            plan=way.plan,
            directory=str(directory),
            copies=way.copies,
            ranks=way.ranks,
            meeting=f"{scratch}/meeting",
            seconds=seconds,
        )
        try:
            for rank in range(way.ranks):
                children.append(_start(msgspec.structs.replace(task, rank=rank), _words(scratch, rank)))
            _wait(children, deadline)
            return tuple(_told(child, _words(scratch, rank)) for rank, child in enumerate(children))
        except OSError as error:
            return (RankMeasurement(error=f"no process can be started: {error.strerror}"),)
        finally:
            for child in children:
                abandon_child(child)


def _words(scratch: str, rank: int) -> Path:
    return Path(scratch) / f"rank{rank}.err"


def _start(task: TrainingTask, words: Path) -> subprocess.Popen[bytes]:
    arguments = [msgspec.json.encode(task).decode()]
    environ = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with words.open("wb") as stderr:
        return start_python("doctor.estimate.measure.training_child", arguments, stderr=stderr.fileno(), env=environ)


def _wait(children: Sequence[subprocess.Popen[bytes]], deadline: float) -> None:
    """Until all have ended, or one has failed: the others would wait for it."""
    while time.monotonic() < deadline:
        codes = [child.poll() for child in children]
        if None not in codes or any(codes):
            return
        time.sleep(0.02)


def _told(child: subprocess.Popen[bytes], words: Path) -> RankMeasurement:
    if child.returncode is None:
        return RankMeasurement(error=LATE)
    answer, _ = child.communicate()
    with contextlib.suppress(msgspec.DecodeError):
        return msgspec.json.decode(answer, type=prepared(RankMeasurement))
    lines = words.read_text(encoding="utf-8", errors="replace").split("\n")
    said = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return RankMeasurement(error=(_PREFIX.sub("", said) or f"its process ended with code {child.returncode}")[:KEPT])


def _error(told: tuple[RankMeasurement, ...]) -> str:
    """What went wrong; a rank that others waited for comes before these."""
    errors = [one.error for one in told if one.error]
    return next((error for error in errors if error != LATE), errors[0] if errors else "")


def throughput_of(way: TrainingVariant, alone: TrainingVariant, rounds: Sequence[Round]) -> MeasuredThroughput:
    """Its repetitions as one. Ratios are taken within a round; of a single round its stretches tell the spread."""
    runs = [one[way.name] for one in rounds if way.name in one]
    said = next((_error(told) for told in runs if _error(told)), "" if runs else "there was no time left for it")
    if said:
        return MeasuredThroughput(name=way.name, plan=way.plan, error=said)
    ratios = [_rate(one[way.name]) / _rate(one[alone.name]) for one in rounds if {way.name, alone.name} <= one.keys()]
    return MeasuredThroughput(
        name=way.name,
        plan=msgspec.structs.replace(way.plan, batch_size=runs[0][0].batch_size or way.plan.batch_size),
        samples_per_second=statistics.median(map(_rate, runs)),
        ratio=statistics.median(ratios) if ratios else None,
        spread=(max(ratios) - min(ratios)) / 2 if len(ratios) > 1 else _within(way, alone, rounds[0]),
        peak_bytes=max(sum(rank.peak_bytes for rank in told) for told in runs),
        device=runs[0][0].device,
    )


def _within(way: TrainingVariant, alone: TrainingVariant, one: Round) -> float:
    """How far the ratio of a single round may be off."""
    if way is alone or not {way.name, alone.name} <= one.keys():
        return 0.0
    unsteady = [max(rank.unsteady for rank in one[name]) for name in (way.name, alone.name)]
    return sum(unsteady) * _rate(one[way.name]) / _rate(one[alone.name])


def _rate(told: tuple[RankMeasurement, ...]) -> float:
    return sum(one.samples for one in told) / max(one.seconds for one in told)
