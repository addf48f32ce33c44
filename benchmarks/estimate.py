"""``doctor estimate`` against what training really takes: a table over many models and ways to train them.

    python benchmarks/estimate.py [--device cpu|cuda] [--only WORD | --again | --kept] [--write]
    python benchmarks/estimate.py --speed
    python benchmarks/estimate.py --published [--only WORD | --kept] [--write]
    python benchmarks/estimate.py [--published] --part

Each configuration is estimated without data and then trained for some steps in a fresh process (two for two ranks),
whose largest allocation is the truth: ``torch.cuda.max_memory_allocated`` on a GPU, and the allocations that torch's
profiler records on a CPU, where optimizers are made to use the kernels that torch takes on CUDA. Results are kept in
``estimate_<machine>.json`` beside this program. Ends with 1 where an aim is missed. ``--speed``: a GPT of a billion
parameters, its time and memory. ``--published``: the estimate against published peaks of real GPUs. ``--part``: one of
them, of which nothing is kept.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "checks")]

from estimate_cases import CASES, ON_GPU  # noqa: E402 - the path comes first
from estimate_published import main as published  # noqa: E402
from estimate_results import MIB, Results, Row, is_good, markdown, percent, summary  # noqa: E402
from estimate_truth import Case, Truth  # noqa: E402
from evidence_pages import add_part, write_between  # noqa: E402

from doctor.core.errors import UnusableError  # noqa: E402
from doctor.estimate.data_model import TracedStep, TrainingPlan  # noqa: E402
from doctor.estimate.memory.non_torch import WORKSPACE  # noqa: E402
from doctor.estimate.tracer_client import TracerClient  # noqa: E402

PATIENCE = 300.0
PART = "moe"
"""The configuration of ``--part``, of which the estimate is a bound."""
SPEED, BILLION = 10.0, "tests.estimate.models:gpt_billion"


def estimates(cases: Sequence[Case], device: str) -> dict[str, TracedStep | str]:
    """Of one rank, by the library, or what it said. For a CPU without the workspace that cuBLAS takes on a GPU."""
    found: dict[str, TracedStep | str] = {}
    for factory in dict.fromkeys(case.factory for case in cases):
        own = [case for case in cases if case.factory == factory]
        try:
            with TracerClient(factory, directory=ROOT, seconds=PATIENCE, workspace=workspace_of(device)) as tracer:
                found |= {case.name: estimate(tracer, case) for case in own}
        except UnusableError as error:
            found |= {case.name: str(error) for case in own}
    return found


def estimate(tracer: TracerClient, case: Case) -> TracedStep | str:
    """Of one configuration, whose loop returns from a function with the loss alone."""
    try:
        return tracer.run(msgspec.structs.replace(case.plan, outputs="released"))
    except UnusableError as error:
        return str(error)


def workspace_of(device: str) -> int:
    """Bytes that cuBLAS takes twice of this GPU (aten/src/ATen/cuda/CublasHandlePool.cpp); none on a CPU."""
    import torch

    if device == "cpu":
        return 0
    return WORKSPACE if torch.cuda.get_device_capability()[0] >= 9 else 8320 << 10


def train(case: Case, device: str) -> Truth:
    """Its ranks, each in a process; the first one's answer.

    Raises:
        RuntimeError: one of them failed, with its last line.
    """
    world = {"WORLD_SIZE": str(case.plan.world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    world["OMP_NUM_THREADS"] = "1"  # threads have buffers of their own, as many as this machine has cores
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "estimate_truth.py"),
        device,
        msgspec.json.encode(case).decode(),
    ]
    ranks = [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(case.processes(device))
    ]
    try:
        told = [rank.communicate(timeout=PATIENCE) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    failed = next((errors for rank, (_, errors) in zip(ranks, told, strict=True) if rank.returncode), None)
    if failed is not None:
        raise RuntimeError(failed.strip().splitlines()[-1] if failed.strip() else "ended without a word")
    return msgspec.json.decode(told[0][0].strip().splitlines()[-1], type=Truth)


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def compare(case: Case, traced: TracedStep | str, device: str) -> Row:
    """Estimate and truth of one configuration."""
    if isinstance(traced, str):
        return Row(name=case.name, error=traced)
    began = time.monotonic()
    try:
        truth = train(case, device)
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        return Row(name=case.name, error=str(error))
    row = Row(
        name=case.name,
        truth=truth.peak,
        reserved=truth.reserved,
        used=truth.used,
        moment=truth.moment,
        truth_seconds=round(time.monotonic() - began, 2),
    )
    return estimated(row, traced)


def estimated(row: Row, traced: TracedStep | str) -> Row:
    """The truth with another estimate."""
    if isinstance(traced, str):
        return Row(name=row.name, error=traced)
    return msgspec.structs.replace(
        row,
        estimate=traced.parts.allocated,
        estimated_reserved=traced.reserved,
        estimated_moment=traced.moment,
        bound=traced.bound,
        estimate_seconds=round(traced.seconds, 2),
    )


def machine_of(device: str) -> str:
    """Its accelerator, or its processor, by name."""
    import torch

    if device == "cuda":
        return str(torch.cuda.get_device_name())
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").exists() else ""
    found = re.search(r"model name\s*:\s*(.+)", text)
    return f"{found.group(1) if found else platform.machine()}, {len(os.sched_getaffinity(0))} cores"


def compared(device: str) -> str:
    """What is compared, in words."""
    if device == "cuda":
        return "torch.cuda.max_memory_allocated of a rank, three steps"
    return (
        "allocations of one rank on the CPU as torch's profiler records them, three steps: no accelerator was there. "
        "The estimate is that for a GPU, less cuBLAS's workspace; optimizers take the kernels that torch takes on a "
        "GPU (foreach). Convolutions, dropout and autocast differ on a CPU, so these models train without dropout"
    )


def table(device: str, only: str, *, part: bool = False) -> Results:
    """Run all with ``only`` in their name, printing as they come; ``part``: the first of them."""
    import torch

    every = (*CASES, *ON_GPU) if device == "cuda" else CASES
    cases = [case for case in every if only in case.name and can_run(case, device)][: 1 if part else None]
    traced = estimates(cases, device)
    rows = []
    for case in cases:
        rows.append(compare(case, traced[case.name], device))
        print(f"{case.name:60s} {line_of(rows[-1])}", flush=True)
    return Results(
        machine=machine_of(device), torch=str(torch.__version__), compared=compared(device), rows=tuple(rows)
    )


def can_run(case: Case, device: str) -> bool:
    """Whether there are devices for all of its ranks."""
    import torch

    return case.processes(device) == 1 or device == "cpu" or case.plan.world_size <= torch.cuda.device_count()


def line_of(row: Row) -> str:
    """A row for those who wait."""
    if row.error:
        return row.error
    return (
        f"{row.truth / MIB:9.1f} MiB  estimate {row.estimate / MIB:9.1f}  {percent(row.off):>8s}  "
        f"{row.moment or '?'} / {row.estimated_moment}  {row.estimate_seconds:.0f} + {row.truth_seconds:.0f} s  "
        f"{row.bound}"
    )


def speed() -> int:
    """Time and memory of the estimate for a billion parameters, the child's start and torch's import in them."""
    began = time.monotonic()
    with TracerClient(BILLION, directory=ROOT, seconds=PATIENCE) as tracer:
        traced = tracer.run(TrainingPlan())
    seconds = time.monotonic() - began
    largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    count, cores = traced.parameter_count / 1e9, len(os.sched_getaffinity(0))
    print(
        f"{count:.2f} B parameters ({traced.parameter_bytes / MIB:,.0f} MiB): {seconds:.1f} s on "
        f"{cores} cores (aim {SPEED:.0f}), peak {traced.parts.allocated / MIB:,.0f} MiB; the process that estimated "
        f"held {largest / MIB:,.0f} MiB at most{'; ' + traced.bound if traced.bound else ''}"
    )
    return int(seconds > SPEED or largest >= traced.parameter_bytes or bool(traced.bound))


def path_for(device: str) -> Path:
    """Where results of this machine are kept."""
    slug = "cpu" if device == "cpu" else re.sub(r"\W+", "_", machine_of(device)).strip("_").lower()
    return ROOT / "benchmarks" / f"estimate_{slug}.json"


def again(kept: Results, device: str) -> Results:
    """New estimates against the truths that were kept."""
    rows = {row.name: row for row in kept.rows if not row.error}
    cases = [case for case in (*CASES, *ON_GPU) if case.name in rows]
    traced = estimates(cases, device)
    new = tuple(estimated(rows[case.name], traced[case.name]) for case in cases)
    for row in new:
        print(f"{row.name:60s} {line_of(row)}")
    return msgspec.structs.replace(kept, rows=new, compared=compared(device))


def among(kept: Results | None, new: Results) -> Results:
    """The new rows in the places of those that were kept of the same machine."""
    rows = {row.name: row for row in kept.rows} if kept and kept.machine == new.machine else {}
    rows |= {row.name: row for row in new.rows}
    order = [case.name for case in (*CASES, *ON_GPU)]
    return msgspec.structs.replace(new, rows=tuple(rows[name] for name in order if name in rows))


def main(arguments: Sequence[str] | None = None) -> int:
    """All of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--only", default="", help="run configurations with this word in their name, and keep the others"
    )
    parser.add_argument("--kept", action="store_true", help="show what was kept in place of running")
    parser.add_argument("--again", action="store_true", help="estimate again, and keep what training took")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--published", action="store_true", help="compare with published peaks of real GPUs")
    add_part(parser, "one configuration, or one published peak")
    given = parser.parse_args(arguments)
    if given.speed:
        return speed()
    if given.published:
        return published(given.only, is_kept=given.kept, is_written=given.write, part=given.part)
    if given.part:
        print(summary(table(given.device, given.only or PART, part=True)))
        return 0
    path = path_for(given.device)
    kept = msgspec.json.decode(path.read_bytes(), type=Results) if path.exists() else None
    if kept and (given.kept or given.again):
        results = again(kept, given.device) if given.again else kept
    else:
        results = among(kept, table(given.device, given.only))
    path.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")
    print(summary(results))
    if given.write:
        write_between("estimate", markdown(results))
    return int(not is_good(results))


if __name__ == "__main__":
    sys.exit(main())
