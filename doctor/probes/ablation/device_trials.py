"""Trials of a slow device: the same work on other processors of the host, or on another device, in new children."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import NamedTuple

import msgspec

from doctor.analysis.device_speed import What, speed_of
from doctor.analysis.trial_selection import AGAIN
from doctor.analysis.visible_devices import gpu_of, local_rank_of, processor_asked
from doctor.collectors.base import read_text
from doctor.core.clock import sleep
from doctor.core.facts import DeviceSpeed, GpuFacts, ProcessFacts, Trial
from doctor.core.message_bounds import Number, Processors, Rate
from doctor.core.text import ranges
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
"""Share of the time that a processor must be idle to count as free."""

MOST_PROCESSORS = 4
"""Processors that an unpinned rank is pinned to: the work is that of one thread."""

UNITS: Mapping[What, str] = {"product": "FLOP/s", "to_device": "B/s", "to_host": "B/s"}


class DeviceOrder(msgspec.Struct, frozen=True, tag="device"):
    """Measure ``task`` again.

    ``what``: was slow, compared with ``usual``; ``near``: processors of the NUMA node of the GPU, empty if not to be
    tried; ``pinned``: those that this rank may use, empty for all; ``other``: another GPU of the host, by its number;
    ``rank``: of this process.
    """

    what: What
    usual: Rate
    task: DeviceTask
    rank: Number
    pinned: Processors = ()
    near: Processors = ()
    other: Number | None = None
    on_gpu: bool = False


class _Change(NamedTuple):
    words: str
    setting: str = ""
    processors: tuple[int, ...] = ()
    changes: dict[str, str | None] | None = None
    task: DeviceTask | None = None


def device_orders(question: TrialRequest, processes: Sequence[ProbeParticipant]) -> StageOrders | None:
    """Return an order for the rank whose device is slow."""
    process = next((process for process in processes if process.number in question.ranks), None)
    if process is None or question.what is None or question.usual is None:
        return None
    order = _order(process, question.what, question.usual)
    limit = f"{DEVICE_SECONDS:.0f} s at most"
    words = f"why the device of rank {process.number} is slow: measured again in other processes, {limit}"
    return StageOrders.of({process.token: order}, DEVICE_SECONDS, words)


def _order(process: ProbeParticipant, what: What, usual: float) -> DeviceOrder:
    rank = process.rank
    gpu, gpus, own = gpu_of(rank), rank.find(GpuFacts), rank.find(ProcessFacts)
    allowed = own.cpus_allowed if own is not None else ()
    task = DeviceTask(local_rank_of(rank), processor=processor_asked(rank) is not None)
    if gpu is None or gpus is None or task.processor:
        return DeviceOrder(what, usual, task, process.number, allowed)
    near = gpu.cpus if gpu.cpus and not set(allowed) <= set(gpu.cpus) else ()
    other = next((one.index for one in gpus.gpus if one.index != gpu.index and one.name == gpu.name), None)
    return DeviceOrder(what, usual, task, process.number, allowed, near, other, on_gpu=True)


def try_device(order: DeviceOrder, context: ProbeContext, deadline: ProbeDeadline) -> tuple[Trial, ...]:
    """Measure unchanged and with each change in turn, twice."""
    changes = [_Change(AGAIN), *_changes(order, context.machine.proc)]
    if len(changes) == 1:
        on_gpu, on_cpu = "another GPU of its kind, or other CPUs", "other processors: none of them is free"
        return (not_tried("device", on_gpu if order.on_gpu else on_cpu),)
    environ = context.machine.environ
    with ExitStack() as stack:
        children = [
            stack.enter_context(closing(TorchChild(environ, change.changes, change.processors))) for change in changes
        ]
        rounds = [
            [_speed(child, order, change, deadline) for child, change in zip(children, changes, strict=True)]
            for _ in range(ROUNDS)
        ]
    before, *changed = (list(values) for values in zip(*rounds, strict=True))
    return tuple(_trials(order, changes[1:], before, changed))


def _speed(child: TorchChild, order: DeviceOrder, change: _Change, deadline: ProbeDeadline) -> float | None:
    try:
        sample = child.ask("device", change.task or order.task, DeviceSpeed, deadline.left())
    except (ChildLost, WorkRefused):
        return None
    return speed_of(sample, order.what)


def _trials(
    order: DeviceOrder, changes: Sequence[_Change], before: list[float | None], changed: Sequence[list[float | None]]
) -> Iterator[Trial]:
    unit, best = UNITS[order.what], max((value for value in before if value is not None), default=None)
    if best is not None and best >= USUAL_SHARE * order.usual:
        yield Trial("device", AGAIN, "", restores=False, after=best, unit=unit)
        return
    for change, after in zip(changes, changed, strict=True):
        least = min((value for value in after if value is not None), default=None)
        restores = is_improvement(before, after, order.usual)
        yield Trial("device", change.words, change.setting, restores, before=best, after=least, unit=unit)


def _changes(order: DeviceOrder, proc: Path) -> Iterator[_Change]:
    if not order.on_gpu:
        before = times_of(read_text(proc / "stat") or "")
        sleep(LOOK_SECONDS)
        found = free_processors(order.pinned, before, times_of(read_text(proc / "stat") or ""))
        if found:
            yield _Change(f"processors {ranges(found)}", _bound(found, order.rank), found)
        return
    if order.near:
        yield _Change(f"processors near the GPU ({ranges(order.near)})", _bound(order.near, order.rank), order.near)
    if order.other is not None:
        changes: dict[str, str | None] = {"CUDA_VISIBLE_DEVICES": str(order.other), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        task = msgspec.structs.replace(order.task, local_rank=0)
        yield _Change(f"another device of the host (GPU {order.other})", changes=changes, task=task)


def _bound(processors: Sequence[int], rank: int) -> str:
    return f"taskset -c {ranges(processors)} <command>  # for rank {rank}"


Times = Mapping[int, tuple[int, int]]
"""Idle and total ticks of each processor since boot."""


def times_of(text: str) -> Times:
    """Parse /proc/stat (proc_stat(5)): user, nice, system, idle, iowait, irq, softirq, steal; guest times are included
    in the first two."""
    times = {}
    for line in text.splitlines():
        name, *fields = line.split()
        if name.startswith("cpu") and name[3:].isdecimal() and len(fields) >= 5:
            numbers = [int(field) for field in fields[:8]]
            times[int(name[3:])] = (numbers[3] + numbers[4], sum(numbers))
    return times


def free_processors(pinned: Sequence[int], before: Times, after: Times) -> tuple[int, ...]:
    """Return processors that were mostly idle between two samples, the idlest first.

    Those in ``pinned`` are excluded if they are not all; as many as these are returned.
    """
    bound = [] if set(before) <= set(pinned) else [*pinned]
    shares = {
        number: (after[number][0] - idle) / max(1, after[number][1] - total)
        for number, (idle, total) in before.items()
        if number in after and number not in bound
    }
    free = sorted((number for number in shares if shares[number] >= IDLE_SHARE), key=lambda number: -shares[number])
    return tuple(sorted(free[: len(bound) or MOST_PROCESSORS]))
