"""Stage of the devices: measure how fast each computes and copies, and confirm those that look slow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Literal

import msgspec

from doctor.analysis.device_speed import compare_devices, samples_of, slow_devices
from doctor.analysis.visible_devices import local_rank_of, processor_asked
from doctor.core.decoding import prepared
from doctor.core.facts import DeviceSpeed, DeviceSpeedFacts, GpuFacts, Missing
from doctor.core.job import Job
from doctor.core.text import counted
from doctor.probes.base import ProbeContext, ProbeParticipant, Stage, StageOrders, StagePlan, StageResult
from doctor.probes.devices.device_worker import COPIES, COPY_BYTES, DeviceTask
from doctor.probes.runtime.cost_text import in_bytes, in_seconds
from doctor.probes.runtime.deadline import ProbeDeadline
from doctor.probes.runtime.torch_child import ChildLost, WorkRefused
from doctor.probes.runtime.torch_startup import loaded_in

LOAD_SECONDS = 60.0
"""torch from a cold network file system takes half a minute."""
MEASURE_SECONDS = 15.0
"""A measurement takes 1.5 s; the first CUDA context and kernels of a busy host may take ten."""
USUAL_HOSTS = 7
"""Hosts without suspects that measure again with those that have some: a median of seven is right if three of them are
disturbed."""
PAUSE = 2.0
"""Seconds before the last measurement: external load on a processor lasts longer than one measurement."""
TURN = 0.3
"""Seconds of the copies of one rank."""
MOST_TURNS = 16
_LOADED = b"loaded"


class DevicesOrder(msgspec.Struct, frozen=True):
    """Load torch, or measure ``task``."""

    act: Literal["load", "measure"]
    task: DeviceTask = DeviceTask()


class DevicesStage(Stage):
    """Stage of the devices (:class:`doctor.probes.base.Stage`).

    All ranks measure at the same time, as the job will compute; if one is slow, all ranks of its host measure again,
    with those of a few other hosts, and if it is still slow, again after a pause.
    """

    name = "devices"
    makes = (DeviceSpeedFacts,)

    def __init__(self) -> None:
        self.most_seconds = LOAD_SECONDS + 3 * MEASURE_SECONDS

    def steps(self, job: Job, processes: Sequence[ProbeParticipant]) -> StagePlan:
        """Load; measure if torch is available; measure again, twice, if something is slow."""
        who = f"{counted(len(processes), 'rank')} at the same time"
        words = f"devices: torch is loaded in a subprocess on {who}, at most {in_seconds(LOAD_SECONDS)}"
        load = DevicesOrder("load")
        job, processes = yield StageOrders.of({process.token: load for process in processes}, LOAD_SECONDS, words)
        ready = [process for process in processes if process.note == _LOADED]
        words = f"devices: matrix products for a second on {counted(len(ready), 'rank')} at the same time"
        orders = _orders([(process, _task(process)) for process in ready], words)
        if orders is None:
            return
        tokens = {process.token for process in ready}
        job, processes = yield orders
        ready = [process for process in processes if process.token in tokens]
        if orders := _to_confirm({slow.rank for slow in slow_devices(samples_of(job, 0))}, ready):
            job, processes = yield orders
            ready = [process for process in processes if process.token in tokens]
            if orders := _to_confirm({slow.rank for slow in compare_devices(job).slow}, ready, PAUSE):
                yield orders

    def take_part(self, order: bytes, context: ProbeContext, deadline: ProbeDeadline) -> StageResult:
        """Run the order in the child that has torch."""
        asked = msgspec.msgpack.decode(order, type=prepared(DevicesOrder))
        if asked.act == "measure":
            try:
                sample = context.torch_child().ask("device", asked.task, DeviceSpeed, deadline.left())
            except (ChildLost, WorkRefused) as error:  # a driver that hangs is a fault to find
                sample = DeviceSpeed("", confirms=asked.task.confirms, error=str(error))
            return StageResult({DeviceSpeedFacts.key: DeviceSpeedFacts(samples=(sample,))})
        loaded = loaded_in(context.torch_child(), deadline.left())
        return StageResult({DeviceSpeedFacts.key: loaded}) if isinstance(loaded, Missing) else StageResult({}, _LOADED)


def _to_confirm(
    suspects: Collection[int], processes: Sequence[ProbeParticipant], pause: float = 0.0
) -> StageOrders | None:
    """Measure all ranks of hosts with suspects and of a few other hosts again.

    Copies take turns, so that ranks of a host that share a PCIe switch do not slow each other down.
    """
    slow_hosts = {process.host for process in processes if process.number in suspects}
    if not slow_hosts:
        return None
    other_hosts = list(dict.fromkeys(process.host for process in processes if process.host not in slow_hosts))
    hosts = slow_hosts.union(other_hosts[:USUAL_HOSTS])
    chosen = [process for process in processes if process.host in hosts]
    turns: Counter[int] = Counter()
    tasks = []
    for process in chosen:
        wait = TURN * min(turns[process.host], MOST_TURNS)
        turns[process.host] += 1
        tasks.append((process, msgspec.structs.replace(_task(process), confirms=True, pause=pause, wait=wait)))
    slow, again = counted(len(suspects), "rank"), counted(len(chosen), "rank")
    return _orders(tasks, f"devices: {slow} may be slow; {again} measured again at the same time")


def _task(process: ProbeParticipant) -> DeviceTask:
    return DeviceTask(local_rank_of(process.rank), processor=processor_asked(process.rank) is not None)


def _orders(tasks: Sequence[tuple[ProbeParticipant, DeviceTask]], words: str) -> StageOrders | None:
    orders = {process.token: DevicesOrder("measure", task) for process, task in tasks}
    costs = ", at most "
    if any(not task.processor and process.rank.find(GpuFacts) is not None for process, task in tasks):
        copies = COPIES + 1  # one to warm up, each way
        costs = f", and {copies} copies of {COPY_BYTES >> 20} MiB to and from its GPU, at most "
        costs += f"{in_bytes(2 * copies * COPY_BYTES)} a rank and "
    words = f"{words}{costs}{in_seconds(MEASURE_SECONDS)}"
    return StageOrders.of(orders, MEASURE_SECONDS, words) if orders else None
