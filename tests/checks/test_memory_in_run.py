"""Memory of processes that really grow, and forecasts against what then happens."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import msgspec
import pytest

from doctor.core.check_registry import builtin_checks
from doctor.facts import MemorySample, RunMemoryFacts, TrainingFacts
from doctor.testing import running

CHECKS = {check.id: check for check in builtin_checks()}
GIB, MIB = 1 << 30, 1 << 20

TRAINS = """
import sys, time
import msgspec
from doctor.monitor.telemetry.memory.memory_samples import MemorySampler

leak, memory, kept, cache = int(sys.argv[1]), MemorySampler(), [], []
for step in range(1, 25):
    if leak:
        kept.append(b"x" * (leak << 20))
    elif step <= 8:
        cache.append(b"x" * (8 << 20))
    time.sleep(0.01)
    memory.sample(step, None)
    facts = memory.facts()
sys.stdout.buffer.write(msgspec.json.encode(facts))
"""


def trained(leak_mebibytes):
    """What a process sees of its own memory that keeps so much of each step, or fills a cache of 64 MiB at first.

    Told as if each step took a second: a busy machine may let it wait for long in the middle, and a growth with a pause
    is no steady one.
    """
    ran = subprocess.run(
        [sys.executable, "-c", TRAINS, str(leak_mebibytes)], capture_output=True, timeout=60, check=True, env=os.environ
    )
    facts = msgspec.json.decode(ran.stdout, type=RunMemoryFacts)
    samples = tuple(msgspec.structs.replace(sample, at=float(sample.step)) for sample in facts.samples)
    return msgspec.structs.replace(facts, samples=samples)


def findings(check, sketch, **limits):
    return [one for one in CHECKS[check].judge(sketch.job(), **limits) if hasattr(one, "summary")]


@pytest.mark.parametrize(("leak", "blamed"), [(6, (1,)), (0, ())])
def test_a_process_that_leaks_and_one_that_fills_a_cache(leak, blamed):
    """A horizon that no real free memory is too large for: the test may not fill the machine."""
    facts = trained(leak)
    assert len([sample for sample in facts.samples if sample.resident]) > 15
    job = running(1, 2, gpus=0).put(facts, ranks=(1,))
    found = findings("MEM009", job, horizon=1e9)
    assert tuple(rank for finding in found for rank in finding.ranks) == blamed
    if blamed:
        (growth,) = found[0].evidence["growth"]
        per_step = growth["bytes_a_second"]["median"] * growth["watched_seconds"] / 23
        assert per_step == pytest.approx(leak * MIB, rel=0.15)


def run_with(samples, **changes):
    """A run without an end, of which rank 1 has these samples."""
    endless = running(1, 2).alter(TrainingFacts, max_epochs=None)
    return endless.alter(RunMemoryFacts, ranks=(1,), samples=samples, **changes)


@pytest.mark.parametrize("seed", range(6))
def test_the_forecast_of_a_leak_holds_what_then_happens(seed):
    """Tensors of different sizes are kept, as losses of batches of different lengths are."""
    dice = random.Random(seed)
    kept, steps, seen = 20 * GIB, 0, []
    while kept < 70 * GIB:
        steps += 1
        kept += int(dice.uniform(0.0, 4.0) * MIB)
        if steps % 50 == 0:
            seen.append(MemorySample(steps, allocated=kept + int(dice.gauss(0, 30 * MIB)), peak=kept + 8 * GIB))
    early = tuple(seen[: len(seen) // 3])
    (found,) = findings("MEM004", run_with(early, allocated=early[-1].allocated, peak_allocated=early[-1].peak))
    told = found.evidence["by_rank"]["1"]
    assert told["limit_bytes"] == 79 * GIB
    ends = steps + (79 - 78) * GIB / (2 * MIB)
    assert told["batch_now"] + told["batches_left"]["expected"] == pytest.approx(ends, rel=0.05)
    assert told["batches_left"]["low"] < ends - told["batch_now"] < 1.05 * told["batches_left"]["high"]


@pytest.mark.parametrize(
    "seed", [0, 1, 3, 4, 5, 6]
)  # of 2 three lengths are known: too few to tell a line from a curve
@pytest.mark.parametrize("power", [1, 2])
def test_the_forecast_of_a_batch_is_within_a_tenth(seed, power):
    """Peaks of new lengths alone are known, as the monitor tells them: the allocator's counter does not fall."""
    dice = random.Random(seed)
    largest, highest, samples = 40_000, 0, []

    def need(units):
        return int(20 * GIB + 60 * GIB * (units / largest) ** power + dice.gauss(0, 50 * MIB))

    for step in range(50, 10_000, 50):
        units = int(dice.triangular(4_000, 26_000, 8_000))
        peak = need(units)
        samples.append(MemorySample(step, allocated=20 * GIB, units=units, peak=peak if peak > highest else None))
        highest = max(highest, peak)
    met = (MemorySample(50, allocated=20 * GIB, units=largest, peak=80 * GIB),)
    run = run_with(tuple(samples), total=76 * GIB).alter(
        RunMemoryFacts, ranks=(0,), samples=met, total=140 * GIB, peak_allocated=80 * GIB
    )
    found = findings("MEM004", run)
    assert len(found) == 1, [sample for sample in samples if sample.peak]
    assert found[0].evidence["expected_bytes"] == pytest.approx(80 * GIB, rel=0.1)


@pytest.mark.parametrize(
    ("framework", "setting"),
    [
        ("lightning", "accumulate_grad_batches"),
        ("transformers", "per_device_train_batch_size"),
        ("plain", "smaller batch per rank"),
    ],
)
def test_a_nearly_full_device_names_the_settings_of_the_framework(framework, setting):
    sketch = running(1, 2).alter(TrainingFacts, framework=framework)
    full = sketch.alter(RunMemoryFacts, ranks=(1,), peak_allocated=76 * GIB, allocated=38 * GIB, retries=3)
    (finding,) = findings("MEM003", full)
    assert finding.ranks == (1,)
    assert setting in finding.fix
