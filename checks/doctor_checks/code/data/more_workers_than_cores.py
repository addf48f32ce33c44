"""CODE024: data loaders start more workers than the host has CPU cores."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

from doctor.api import Script, Severity, Violation, rule
from doctor.lint.python.gpu_use import runs_alone
from doctor.lint.python.project.starts.launch_counts import shown_counts
from doctor.lint.python.training import FABRIC, LOADER, TRAINER, several_ranks
from doctor.testing.script_cases import fails, passes

_ALL_CORES = ("os.cpu_count", "multiprocessing.cpu_count", "torch.multiprocessing.cpu_count", "psutil.cpu_count")
_SPAWNS = ("torch.multiprocessing.spawn", "torch.multiprocessing.start_processes")


@rule(
    id="CODE024",
    severity=Severity.WARNING,
    reads=Script,
    mentions=("num_workers",),
    foreshadows=("DATA009",),
    cases=lambda: (
        fails("more than the machine has", _LITERAL, processors=16),
        fails("times the ranks of the host", _SUM, processors=32),
        fails("all cores for each rank", _ALL_CORES_EACH),
        fails("an option whose default is too many", _DEFAULT, processors=8),
        passes("as many as there are cores, on a machine of that size", _ENOUGH, processors=32),
        passes("the machine is not known", _UNKNOWN_MACHINE),
        passes("shared between the ranks, or one process that may have them all", _SHARED, processors=8),
        passes("one process that may have them all", _ONE_PROCESS, processors=8),
    ),
)
def more_workers_than_cores(script: Script) -> Iterator[Violation]:
    """Ask whether the data loader workers of all ranks on a host fit its CPU cores.

    Why it hurts: workers compete for cores with the threads that feed the GPUs, so steps wait for data, and each worker
    may hold a copy of the dataset.
    Fix: Set `num_workers` to at most the cores of the host divided by its ranks, minus one for the rank itself.
    """
    ranks = _ranks_of_host(script)
    for call in script.calls(LOADER):
        given = script.argument(call, "num_workers", 5)
        workers = _workers(script, given) if given is not None else None
        if given is None or workers is None:
            continue
        if workers.number is None:
            yield from _every_core(script, call, workers, ranks)
        elif script.processors is not None and workers.number * ranks > script.processors:
            total, fitting = (workers.number or 0) * ranks, max(1, script.processors // ranks - 1)
            exceeds = f" on {ranks} ranks starts {total} workers on" if ranks > 1 else " exceeds the"
            yield Violation(
                call,
                f"{workers.of}{exceeds} {script.processors} CPU cores{'' if ranks > 1 else ' of this host'}",
                fix=f"Set `num_workers={fitting}`."
                if workers.certain
                else f"Pass `{workers.option} {fitting}`, or change the default in line {workers.line}.",
                confidence=1.0 if workers.certain else 0.7,
                evidence=(("workers", total), ("ranks", ranks), ("cores", script.processors)),
            )


_FEW = 2
"""Ranks of a host, where the script says how many it starts there."""


class _Workers(NamedTuple):
    """``number``: ``None`` for all cores. ``of``: where it is set. ``option``: the one whose default in ``line`` it
    is."""

    number: int | None
    of: str
    certain: bool = True
    option: str = ""
    line: int = 0


def _workers(script: Script, given: ast.expr) -> _Workers | None:
    value = script.value(given)
    if isinstance(value, int) and not isinstance(value, bool):
        return _Workers(value, f"num_workers={value}")
    if isinstance(given, ast.Name) and len(values := script.values_of(given)) == 1:
        given = values[0]
    if isinstance(given, ast.Call) and script.name(given.func) in _ALL_CORES:
        return _Workers(None, f"num_workers={script.text_of(given)}")
    if isinstance(given, ast.Attribute) and (found := _default_of(script, given.attr)) is not None:
        default, option, line = found
        return _Workers(default, f"num_workers={script.text_of(given)} ({default} by default)", False, option, line)
    return None


def _default_of(script: Script, name: str) -> tuple[int, str, int] | None:
    """The default of an option, its longest spelling, and the line of the default."""
    for call in script.method_calls("add_argument"):
        flags = [one.value for one in call.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
        if any(flag.lstrip("-").replace("-", "_") == name for flag in flags):
            given = script.argument(call, "default")
            default = script.value(given)
            if given is None or not isinstance(default, int) or isinstance(default, bool):
                return None
            return default, max(flags, key=len), given.lineno
    return None


def _ranks_of_host(script: Script) -> int:
    """Ranks that the script itself starts on one host, by default 1."""
    counts = [1]
    for call in script.calls(TRAINER, FABRIC):
        devices = script.value(script.argument(call, "devices") or script.argument(call, "gpus"))
        if isinstance(devices, tuple):
            counts.append(len(devices))
        elif isinstance(devices, int) and not isinstance(devices, bool):
            counts.append(devices)
    for call in script.calls(*_SPAWNS):
        processes = script.value(script.argument(call, "nprocs", 2))
        if isinstance(processes, int):
            counts.append(processes)
    return max(counts)


def _every_core(script: Script, call: ast.Call, workers: _Workers, ranks: int) -> Iterator[Violation]:
    shown = several_ranks(script)
    if shown is None or runs_alone(script, call):
        return
    counts = shown_counts(script) if ranks == 1 else []
    most = max(filter(None, counts), default=1) if counts and None not in counts else 0
    many = f"{ranks} ranks" if ranks > 1 else "each rank"
    yield Violation(
        call,
        f"{workers.of} gives {many} of a host one worker per CPU core",
        # At most two workers for a core
        severity=Severity.INFO if ranks == _FEW or 0 < most <= _FEW else None,
        preview=most == 1,
        fix='Set `num_workers=max(1, len(os.sched_getaffinity(0)) // int(os.environ["LOCAL_WORLD_SIZE"]) - 1)`.',
        evidence=(("job_started_at_line", shown.lineno),),
        confidence=0.9,
    )


_LITERAL = """\
from torch.utils.data import DataLoader

loader = DataLoader(data, batch_size=32, num_workers=64)  # !
"""
_SUM = """\
WORKERS = 8
train_loader = DataLoader(data, 32, num_workers=WORKERS)  # !
trainer = L.Trainer(devices=8, strategy="ddp")
trainer.fit(model, train_loader)
"""
_ALL_CORES_EACH = """\
import torch

dist.init_process_group("nccl")
loader = DataLoader(data, batch_size=64, sampler=sampler, num_workers=os.cpu_count())  # !
"""
_DEFAULT = """\
import argparse

parser = argparse.ArgumentParser()
parser.add_argument("-j", "--workers", default=48, type=int)
args = parser.parse_args()
loader = DataLoader(data, batch_size=64, num_workers=args.workers)  # !
"""
_ENOUGH = """\
loader = DataLoader(data, batch_size=32, num_workers=8)
trainer = L.Trainer(devices=4, strategy="ddp")
"""
_UNKNOWN_MACHINE = """\
from torch.utils.data import DataLoader

loader = DataLoader(data, batch_size=32, num_workers=64)
"""
_SHARED = """\
dist.init_process_group("nccl")
loader = DataLoader(data, 32, num_workers=os.cpu_count() // int(os.environ["LOCAL_WORLD_SIZE"]))
"""
_ONE_PROCESS = """\
loader = DataLoader(data, 32, num_workers=os.cpu_count())
other = make_loader(data, num_workers=64)
"""
