"""Trials of a slow device: the same work on other processors of the host, or on another device, in fresh children."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import msgspec

from doctor.analysis.device_speed import What, speed_of
from doctor.analysis.trial_conclusions import AGAIN
from doctor.analysis.visible_devices import gpu_of, local_rank_of, processor_asked
from doctor.collectors.base import read_text
from doctor.core.facts import DeviceSpeed, GpuFacts, ProcessFacts, Trial
from doctor.core.message_bounds import Number, Processors, Rate
from doctor.core.text import number_runs
from doctor.probes.ablation.experiments import TrialRequest
from doctor.probes.ablation.trials import ROUNDS, USUAL_SHARE, is_improvement, not_tried
from doctor.probes.base import ProbeContext, ProbeParticipant, StageOrders
from doctor.probes.devices.device_worker import DeviceTask
from doctor.probes.runtime.deadline import ProbeDeadline
from doctor.probes.runtime.torch_child import ChildLost, TorchChild, WorkRefused

DEVICE_SECONDS = 120.0
"""For two or three children that load torch one after the other, and two measurements in each."""

LOOK_SECONDS = 0.5
IDLE_SHARE = 0.7
"""Of the time that a processor has nothing to do, to be taken for a free one."""

MOST_PROCESSORS = 4
"""That a rank is bound to where it was bound to none: the work is that of one thread."""

UNITS: Mapping[What, str] = {"product": "FLOP/s", "to_device": "B/s", "to_host": "B/s"}


class DeviceOrder(msgspec.Struct, frozen=True, tag="device"):
    """Do ``task`` again. ``what``: was slow, against ``usual``; ``near``: processors of the GPU's own node, empty where
    they are not to be tried; ``pinned``: those that this rank may use, empty for all; ``other``: another GPU of the
    host, by its number; ``rank``: the own."""

    what: What
    usual: Rate
    task: DeviceTask
    rank: Number
    pinned: Processors = ()
    near: Processors = ()
    other: Number | None = None
    on_gpu: bool = False


class _Knob(NamedTuple):
    words: str
    setting: str = ""
    processors: tuple[int, ...] = ()
    changes: dict[str, str | None] | None = None
    task: DeviceTask | None = None


def device_orders(question: TrialRequest, posts: Sequence[ProbeParticipant]) -> StageOrders | None:
    """An order for the rank whose device is slow."""
    post = next((post for post in posts if post.number in question.ranks), None)
    if post is None or question.what is None or question.usual is None:
        return None
    order = _order(post, question.what, question.usual)
    words = f"why the device of rank {post.number} is slow: once more in other children, {DEVICE_SECONDS:.0f} s at most"
    return StageOrders.of({post.token: order}, DEVICE_SECONDS, words)


def _order(post: ProbeParticipant, what: What, usual: float) -> DeviceOrder:
    rank = post.rank
    gpu, gpus, process = gpu_of(rank), rank.find(GpuFacts), rank.find(ProcessFacts)
    allowed = process.cpus_allowed if process is not None else ()
    task = DeviceTask(local_rank_of(rank), processor=processor_asked(rank) is not None)
    if gpu is None or gpus is None or task.processor:
        return DeviceOrder(what, usual, task, post.number, allowed)
    near = gpu.cpus if gpu.cpus and not set(allowed) <= set(gpu.cpus) else ()
    other = next((one.index for one in gpus.gpus if one.index != gpu.index and one.name == gpu.name), None)
    return DeviceOrder(what, usual, task, post.number, allowed, near, other, on_gpu=True)


def try_device(order: DeviceOrder, bench: ProbeContext, deadline: ProbeDeadline) -> tuple[Trial, ...]:
    """Measure unchanged and with each change in turn, twice."""
    knobs = [_Knob(AGAIN), *_knobs(order, bench.surroundings.proc)]
    if len(knobs) == 1:
        what = (
            "another GPU of its kind, or other processors" if order.on_gpu else "other processors: none of them is free"
        )
        return (not_tried("device", what),)
    environ = bench.surroundings.environ
    with ExitStack() as stack:
        children = [TorchChild(environ, knob.changes, knob.processors) for knob in knobs]
        for child in children:
            stack.callback(child.close)
        rounds = [
            [_speed(child, order, knob, deadline) for child, knob in zip(children, knobs, strict=True)]
            for _ in range(ROUNDS)
        ]
    before, *changed = (list(values) for values in zip(*rounds, strict=True))
    return tuple(_trials(order, knobs[1:], before, changed))


def _speed(child: TorchChild, order: DeviceOrder, knob: _Knob, deadline: ProbeDeadline) -> float | None:
    try:
        sample = child.ask("device", knob.task or order.task, DeviceSpeed, deadline.left())
    except (ChildLost, WorkRefused):
        return None
    return speed_of(sample, order.what)


def _trials(
    order: DeviceOrder, knobs: Sequence[_Knob], before: list[float | None], changed: Sequence[list[float | None]]
) -> Iterator[Trial]:
    unit, best = UNITS[order.what], max((value for value in before if value is not None), default=None)
    if best is not None and best >= USUAL_SHARE * order.usual:
        yield Trial("device", AGAIN, "", restores=False, after=best, unit=unit)
        return
    for knob, after in zip(knobs, changed, strict=True):
        least = min((value for value in after if value is not None), default=None)
        restores = is_improvement(before, after, order.usual)
        yield Trial("device", knob.words, knob.setting, restores, before=best, after=least, unit=unit)


def _knobs(order: DeviceOrder, proc: Path) -> Iterator[_Knob]:
    if not order.on_gpu:
        found = free_processors(order.pinned, *_two_looks(proc))
        if found:
            yield _Knob(f"processors {_listed(found)}", _bound(found, order.rank), found)
        return
    if order.near:
        yield _Knob(f"processors near the GPU ({_listed(order.near)})", _bound(order.near, order.rank), order.near)
    if order.other is not None:
        changes: dict[str, str | None] = {"CUDA_VISIBLE_DEVICES": str(order.other), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        task = msgspec.structs.replace(order.task, local_rank=0)
        yield _Knob(f"another device of the host (GPU {order.other})", changes=changes, task=task)


def _bound(processors: Sequence[int], rank: int) -> str:
    return f"taskset -c {_listed(processors)} <command>  # for rank {rank}"


def _listed(processors: Sequence[int]) -> str:
    """As taskset takes them: ``0-3,8``."""
    runs = number_runs(sorted(processors))
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in runs)


Times = Mapping[int, tuple[int, int]]
"""Idle and all ticks of each processor since boot."""


def _two_looks(proc: Path) -> tuple[Times, Times]:
    first = times_of(read_text(proc / "stat") or "")
    time.sleep(LOOK_SECONDS)
    return first, times_of(read_text(proc / "stat") or "")


def times_of(text: str) -> Times:
    """From /proc/stat (proc_stat(5)): user, nice, system, idle, iowait, irq, softirq, steal, and guest times that count
    in the first two."""
    times = {}
    for line in text.splitlines():
        name, *fields = line.split()
        if name.startswith("cpu") and name[3:].isdecimal() and len(fields) >= 5:
            numbers = [int(field) for field in fields[:8]]
            times[int(name[3:])] = (numbers[3] + numbers[4], sum(numbers))
    return times


def free_processors(pinned: Sequence[int], before: Times, after: Times) -> tuple[int, ...]:
    """Processors that had little to do between two looks, the idlest first: others than ``pinned``, as many as these,
    where these are not all."""
    bound = [] if set(before) <= set(pinned) else [*pinned]
    shares = {
        number: (after[number][0] - idle) / max(1, after[number][1] - total)
        for number, (idle, total) in before.items()
        if number in after and number not in bound
    }
    free = sorted((number for number in shares if shares[number] >= IDLE_SHARE), key=lambda number: -shares[number])
    return tuple(sorted(free[: len(bound) or MOST_PROCESSORS]))
