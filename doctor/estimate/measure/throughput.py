"""Times a few real steps of several ranks on one device and of its alternatives.

Unlike an estimate, this calls the factory with real weights, in child processes that end within a deadline.
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
"""Repetitions of each variant, interleaved, so that a machine that gets slower affects all of them."""
LATE = "it did not finish in time"
KEPT = 300
"""Characters kept of the last line of a process."""
_PREFIX = re.compile(r"^(\[rank\d+\]: )?(doctor\.core\.errors\.UnusableError: )?")
"""Prefixes of an error by torch and the interpreter."""


class TrainingTask(msgspec.Struct, frozen=True, kw_only=True):
    """The task of one process: ``rank`` of ``ranks``, whose rendezvous is the file ``meeting``. ``copies``: factor of
    the batch size. ``seconds``: for all of it."""

    factory: str
    plan: TrainingPlan
    directory: str
    copies: int = 1
    rank: int = 0
    ranks: int = 1
    meeting: str = ""
    seconds: float = 60.0


class RankMeasurement(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one process: its own samples, their seconds, bytes; ``batch_size`` of one micro-batch.
    ``unsteady``: half the difference between its fastest and slowest window, relative to the median."""

    samples: int = 0
    seconds: float = 0.0
    unsteady: float = 0.0
    peak_bytes: int = 0
    batch_size: int = 0
    device: str = ""
    error: str = ""


class TrainingVariant(msgspec.Struct, frozen=True, kw_only=True):
    """One way to train on the same samples. ``copies``: factor of the batch size."""

    name: str
    plan: TrainingPlan
    ranks: int = 1
    copies: int = 1


Round = dict[str, tuple[RankMeasurement, ...]]
"""The results of the ranks of each variant in one round."""


def measure(factory: str, plan: TrainingPlan, *, directory: Path, seconds: float) -> tuple[MeasuredThroughput, ...]:
    """Time one rank, then N ranks on its device and the alternatives of one rank, on the same samples.

    N is ``plan.ranks_per_device``, or 2 if that is 1. Ranks use Gloo, because NCCL refuses two on one GPU.
    ``directory``: where the factory's module is imported from. ``seconds``: for everything; a variant that was not
    run for lack of time has an error.

    Raises:
        UnusableError: the first run, of one rank, failed.
    """
    deadline = time.monotonic() + seconds
    alone, *others = variants_of(plan)
    first = {alone.name: run(alone, factory, directory, seconds)}
    if error := _error(first[alone.name]):
        raise UnusableError(f"{factory}: {error.removeprefix(f'{factory}: ')}")
    rounds = [first]
    while True:
        began = time.monotonic()
        failed = {name for one in rounds for name, results in one.items() if _error(results)}
        due = [one for one in (alone, *others) if one.name not in rounds[-1] and one.name not in failed]
        for variant in due if len(rounds) % 2 else reversed(due):
            if (left := deadline - time.monotonic()) > 0:
                rounds[-1][variant.name] = run(variant, factory, directory, left)
        if len(rounds) == ROUNDS or time.monotonic() + 1.2 * (time.monotonic() - began) > deadline:
            return tuple(throughput_of(one, alone, rounds) for one in (alone, *others))
        rounds.append({})


def variants_of(plan: TrainingPlan) -> tuple[TrainingVariant, ...]:
    """Return the variants, one rank first. All others train on as many samples a step as N ranks."""
    count = plan.ranks_per_device if plan.ranks_per_device > 1 else 2
    alone = msgspec.structs.replace(plan, strategy="none", devices=1, nodes=1, ranks_per_device=1)
    several = msgspec.structs.replace(alone, strategy="ddp", ranks_per_device=count)
    more = msgspec.structs.replace(alone, accumulate=plan.accumulate * count)
    variants = (
        TrainingVariant(name="one rank", plan=alone),
        TrainingVariant(name=f"{count} ranks on one device", plan=several, ranks=count),
        TrainingVariant(name=f"one rank, {count} times the batch", plan=alone, copies=count),
        TrainingVariant(name=f"one rank, accumulating {count} batches", plan=more),
    )
    if plan.precision != "32-true":
        return variants
    mixed = msgspec.structs.replace(alone, precision="bf16-mixed")
    return (*variants, TrainingVariant(name=f"one rank, {count} times the batch, bf16-mixed", plan=mixed, copies=count))


def run(variant: TrainingVariant, factory: str, directory: Path, seconds: float) -> tuple[RankMeasurement, ...]:
    """Return the results of the variant's ranks, which are killed after ``seconds``."""
    deadline = time.monotonic() + seconds
    children: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="doctor-measure-") as scratch:
        task = TrainingTask(
            factory=factory,
            plan=variant.plan,
            directory=str(directory),
            copies=variant.copies,
            ranks=variant.ranks,
            meeting=f"{scratch}/meeting",
            seconds=seconds,
        )
        try:
            for rank in range(variant.ranks):
                children.append(_start(msgspec.structs.replace(task, rank=rank), _stderr(scratch, rank)))
            _wait(children, deadline)
            return tuple(_result(child, _stderr(scratch, rank)) for rank, child in enumerate(children))
        except OSError as error:
            return (RankMeasurement(error=f"cannot start a process: {error.strerror}"),)
        finally:
            for child in children:
                abandon_child(child)


def _stderr(scratch: str, rank: int) -> Path:
    return Path(scratch) / f"rank{rank}.err"


def _start(task: TrainingTask, log: Path) -> subprocess.Popen[bytes]:
    arguments = [msgspec.json.encode(task).decode()]
    environ = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with log.open("wb") as stderr:
        return start_python("doctor.estimate.measure.training_child", arguments, stderr=stderr.fileno(), env=environ)


def _wait(children: Sequence[subprocess.Popen[bytes]], deadline: float) -> None:
    while time.monotonic() < deadline:
        codes = [child.poll() for child in children]
        if None not in codes or any(codes):
            return
        time.sleep(0.02)


def _result(child: subprocess.Popen[bytes], log: Path) -> RankMeasurement:
    if child.returncode is None:
        return RankMeasurement(error=LATE)
    answer, _ = child.communicate()
    with contextlib.suppress(msgspec.DecodeError):
        return msgspec.json.decode(answer, type=prepared(RankMeasurement))
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return RankMeasurement(error=(_PREFIX.sub("", last) or f"its process exited with code {child.returncode}")[:KEPT])


def _error(results: tuple[RankMeasurement, ...]) -> str:
    """Return the error of a rank, if possible of one that others waited for."""
    errors = [one.error for one in results if one.error]
    return next((error for error in errors if error != LATE), errors[0] if errors else "")


def throughput_of(variant: TrainingVariant, alone: TrainingVariant, rounds: Sequence[Round]) -> MeasuredThroughput:
    """Summarize the repetitions. Ratios are per round; the spread of a single round is that of its windows."""
    name, plan = variant.name, variant.plan
    runs = [one[name] for one in rounds if name in one]
    error = next(filter(None, map(_error, runs)), "" if runs else "no time was left for it")
    if error:
        return MeasuredThroughput(name=name, plan=plan, error=error)
    ratios = [_rate(one[name]) / _rate(one[alone.name]) for one in rounds if {name, alone.name} <= one.keys()]
    return MeasuredThroughput(
        name=name,
        plan=msgspec.structs.replace(plan, batch_size=runs[0][0].batch_size or plan.batch_size),
        samples_per_second=statistics.median(map(_rate, runs)),
        ratio=statistics.median(ratios) if ratios else None,
        spread=(max(ratios) - min(ratios)) / 2 if len(ratios) > 1 else _spread_within(variant, alone, rounds[0]),
        peak_bytes=max(sum(rank.peak_bytes for rank in results) for results in runs),
        device=runs[0][0].device,
    )


def _spread_within(variant: TrainingVariant, alone: TrainingVariant, one: Round) -> float:
    """Return the uncertainty of the ratio of a single round."""
    if variant is alone or not {variant.name, alone.name} <= one.keys():
        return 0.0
    unsteady = [max(rank.unsteady for rank in one[name]) for name in (variant.name, alone.name)]
    return sum(unsteady) * _rate(one[variant.name]) / _rate(one[alone.name])


def _rate(results: tuple[RankMeasurement, ...]) -> float:
    return sum(one.samples for one in results) / max(one.seconds for one in results)
